"""ScaledBlock for Keras 2: `tf.keras` up to TensorFlow 2.15, and `tf_keras`.

There is one class for each Keras 2. It is created when this module is imported, or as
soon as that Keras is imported later.
"""

from __future__ import annotations

import copy
from typing import Any

from lossscale.blocks.base import ScaledBlock, block_of
from lossscale.runtime import kerases, registry


def _mix_into(keras: Any) -> None:
    """Creates and registers the block for one Keras 2."""

    def deserialize(config: Any, custom_objects: Any) -> Any:
        # Keras 2 changes the config that it deserializes, so it gets a copy.
        config = copy.deepcopy(config)
        return keras.layers.deserialize(config, custom_objects=custom_objects)

    members = {
        "__doc__": ScaledBlock.__doc__,
        "__module__": __name__,
        # The layer sets the masks of the results.
        "_compute_output_and_mask_jointly": True,
        "_serialize": staticmethod(keras.layers.serialize),
        "_deserialize": staticmethod(deserialize),
    }
    base = keras.layers.Layer
    block = type(base)("ScaledBlock", (ScaledBlock, base), members)
    block_of(base)(block)
    registry.register(keras, block, "ScaledBlock")


kerases.for_each_keras2(_mix_into)
