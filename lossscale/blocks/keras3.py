"""ScaledBlock for Keras 3 on the TensorFlow backend."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.blocks import base
from lossscale.runtime import registry


# It has the name of the public class, since Keras names layers after their class.
@base.block_of(keras.layers.Layer)
class ScaledBlock(base.ScaledBlock, keras.layers.Layer):  # noqa: D101 - it has the public class's
    __doc__ = base.ScaledBlock.__doc__
    _keras = keras

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        # Keras's own method asks for shapes only, and assumes this layer's dtype.
        return keras.Operation.compute_output_spec(self, *args, **kwargs)


registry.register(keras, ScaledBlock, "ScaledBlock")
