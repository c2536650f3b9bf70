"""ScaledBlock for Keras 2: `tf.keras` up to TensorFlow 2.15, and `tf_keras`.

There is one class for each Keras 2. It is made when this module is imported, for one
that is imported later as soon as it is.
"""

from __future__ import annotations

import copy
from typing import Any

from lossscale.blocks.base import ScaledBlock, block_of
from lossscale.runtime import kerases, registry


def _mix_into(keras: Any) -> None:
    """Makes and registers the block for one Keras 2."""

    def deserialize(config: Any, custom_objects: Any) -> Any:
        # Keras 2 writes into what it deserializes: the caller's own would change.
        config = copy.deepcopy(config)
        return keras.layers.deserialize(config, custom_objects=custom_objects)

    members = {
        "__doc__": ScaledBlock.__doc__,
        "__module__": __name__,
        # The results have their masks from the layer.
        "_compute_output_and_mask_jointly": True,
        "_serialize": staticmethod(keras.layers.serialize),
        "_deserialize": staticmethod(deserialize),
    }
    base = keras.layers.Layer
    block = type(base)("ScaledBlock", (ScaledBlock, base), members)
    block_of(base)(block)
    registry.register(keras, block, "ScaledBlock")


kerases.for_each_keras2(_mix_into)
