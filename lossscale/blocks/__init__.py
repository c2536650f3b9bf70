"""ScaledBlock: a layer whose backward pass has a scale of its own.

These files know gradients and every Keras, but no loss scale. In the order of imports:

* `backward`: a call whose gradients are computed at a scale of their own;
* `base`: the code that the blocks of every Keras share;
* `keras2`, `keras3`: the blocks. Saved files name these modules: do not rename them.

Begin with `backward`.
"""

from lossscale.blocks.base import ScaledBlock
from lossscale.runtime import kerases

# Importing a block registers it, with us and with its Keras.
if kerases.keras3() is not None:
    from lossscale.blocks import keras3  # noqa: F401
from lossscale.blocks import keras2  # noqa: F401

__all__ = ["ScaledBlock"]
