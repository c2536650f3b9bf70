"""ScaledBlock: a layer whose backward pass has a scale of its own.

These files know gradients and every Keras, but no loss scale. In the order of imports:

* `block_scale`: the power of two that fits a gradient into float16;
* `attempts`: gradients at that scale, and again at a smaller one if they overflow;
* `nests`: any nest of arguments and results, and which of its tensors have gradients;
* `reads`: the tensors that operations read and none of them computed;
* `outside`: the tensors that a layer reads besides the arguments of its call;
* `backward`: a call whose gradients are computed at a scale of their own;
* `signatures`: the arguments of a block, which are those of its layer;
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
