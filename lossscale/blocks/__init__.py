"""ScaledBlock: a layer whose backward pass has a scale of its own.

Knows gradients as numbers and the Kerases; no loss scale. In the order of its imports:

* `block_scale`: the power of two that fits a gradient into float16;
* `attempts`: gradients at that scale, and again at a smaller one if they overflowed;
* `nests`: any nest of arguments and results, and which of its tensors have gradients;
* `reads`: what operations read that none of them computed;
* `outside`: tensors that a layer reads, and that are no arguments of its call;
* `backward`: a call whose gradients are computed so;
* `signatures`: what a block can be called with: what its layer can;
* `base`: what the blocks of all Kerases have in common;
* `keras2`, `keras3`: the blocks. Files name these two modules: they stay.

Begin with `backward`.
"""

from lossscale.blocks.base import ScaledBlock
from lossscale.runtime import kerases

# Importing a block makes it known, to us and to its Keras.
if kerases.keras3() is not None:
    from lossscale.blocks import keras3  # noqa: F401
from lossscale.blocks import keras2  # noqa: F401

__all__ = ["ScaledBlock"]
