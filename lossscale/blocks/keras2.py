"""ScaledBlock for Keras 2: `tf.keras` up to TensorFlow 2.15, and `tf_keras`.

There is one class for each Keras 2. It is created when this module is imported, or as
soon as that Keras is imported later.
"""

from __future__ import annotations

from typing import Any

from lossscale.blocks.base import ScaledBlock, block_of
from lossscale.runtime import kerases, registry


def _mix_into(keras: Any) -> None:
    """Creates and registers the block for one Keras 2."""
    members = {
        "__doc__": ScaledBlock.__doc__,
        "__module__": __name__,
        # The layer sets the masks of the results.
        "_compute_output_and_mask_jointly": True,
        "_keras": keras,
    }
    base = keras.layers.Layer
    block = type(base)("ScaledBlock", (ScaledBlock, base), members)
    block_of(base)(block)
    registry.register(keras, block, "ScaledBlock")


kerases.for_each_keras2(_mix_into)
