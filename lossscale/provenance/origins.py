"""Origins: where the gradients of one list come from, and which loss is at fault."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.gradients.check import Check, dense_part
from lossscale.provenance.kinds import UNKNOWN, UNSCALED, Kind
from lossscale.provenance.walk import Kinds
from lossscale.runtime import graphs
from lossscale.runtime.aliases import Divisors, Grad, Grads, Scalar, Tensor
from lossscale.scales.base import Product

#: The attribute of an unscaled tensor that tells what it was before.
BEFORE = "_lossscale_before"
#: The attribute of a tensor of S that tells which loss it multiplied.
LOSS = "_lossscale_loss"
#: In the place of a divisor: what there is for scaled gradients.
_AS_SCALED: Any = object()


class Unscaled(NamedTuple):
    """A list of gradients that was unscaled: the source of what is made of them."""

    owner: Any  # the optimizer that unscaled it
    check: Check
    length: int  # `None`s count, too
    losses: List[Tensor]  # those of which it is known that it was made of them


class Before(NamedTuple):
    """What an unscaled gradient was, and what divided it. It hangs on the tensor."""

    grad: Grad
    divisor: Scalar


def before(grad: Grad) -> Optional[Before]:
    """Returns what a gradient was before it was unscaled. None: not known.

    Eager mode keeps it of small gradients only.
    """
    known: Optional[Before] = getattr(dense_part(grad), BEFORE, None)
    return known


class Loss(NamedTuple):
    """A loss and the optimizer that scaled it. It hangs on the tensor of S."""

    value: Tensor
    #: Returns None for `LossScale.scale` itself.
    owner: Callable[[], Any]


class Origins:
    """Where the gradients of one list come from, as far as it can be seen.

    Attributes:
      kinds: The kind of each gradient.
      count: How many gradients are not None.
      names: The names of their kinds.
      lists: The lists that `get_unscaled_gradients` returned and that these gradients
        were made of, each once.
      losses: The unscaled losses that these gradients are known to come from.
      owners: The optimizers that scaled a loss that these gradients may come from.
    """

    def __init__(self, grads: Grads, kinds: Kinds) -> None:
        self._grads = grads
        # Of a number nothing is known: the state of the step decides.
        self.kinds = [kind or Kind(UNKNOWN) for kind in kinds.of(grads)]
        self.count = sum(grad is not None for grad in grads)
        self.names = {k.name for g, k in zip(grads, self.kinds) if g is not None}
        self.lists = _lists_among(self.kinds)
        self.losses = _losses_at_fault(self.kinds)
        self.owners = [loss.owner() for loss in _losses_among(self.kinds)]

    @property
    def has_unknown(self) -> bool:
        """Whether the state of the step has to decide about some of them."""
        return UNKNOWN in self.names

    @property
    def has_unscaled(self) -> bool:
        """Whether some were made of an unscaled list, and S is not in them."""
        return bool(_lists_among(k for k in self.kinds if k.name == UNSCALED))

    @property
    def is_measured(self) -> List[bool]:
        """Of each gradient, whether the lists it was made of know its magnitude."""
        return [
            kind.name == UNSCALED
            and bool(kind.sources)
            and all(map(_measures, kind.sources))
            for kind in self.kinds
        ]

    def divisors(
        self,
        last_scale: Callable[[], Scalar],
        of_unknown: Optional[Scalar] = _AS_SCALED,
    ) -> Divisors:
        """Returns what divides each gradient. None: it is unscaled, or is None.

        A scaled gradient is divided by what multiplied its loss. Where that is not
        known, it is what `last_scale` returns, which is called at most once.
        `of_unknown` divides those of unknown kind. Not given: they are scaled.
        """
        divisors: Divisors = []
        last: Optional[Scalar] = None
        for grad, kind in zip(self._grads, self.kinds):
            if grad is None or kind.name == UNSCALED:
                divisors.append(None)
            elif kind.name == UNKNOWN and of_unknown is not _AS_SCALED:
                divisors.append(of_unknown)
            else:
                scales = scales_of(kind)
                if len(scales) == 1 and graphs.is_visible(scales[0]):
                    divisors.append(scales[0])
                else:
                    last = last_scale() if last is None else last
                    divisors.append(last)
        return divisors


def note_product(kinds: Kinds, product: Product, owner: Any) -> None:
    """Notes that an optimizer multiplied a loss by S. None: `LossScale.scale` did."""
    whose = weakref.ref(owner) if owner is not None else lambda: None
    scales = [product.loss_scale]
    if product.factor is not None:
        kinds.note_product(product)
    else:  # it was multiplied by what its kind tells
        products = filter(tf.is_tensor, tf.nest.flatten(product.product))
        scales = [s for k in kinds.of(products) if k is not None for s in scales_of(k)]
    for scale in scales:
        setattr(scale, LOSS, Loss(product.loss, whose))


def scales_of(kind: Kind) -> List[Any]:
    """Returns the tensors of S that may have multiplied a value."""
    return [source for source in kind.sources if not isinstance(source, Unscaled)]


def _lists_among(kinds: Iterable[Kind]) -> List[Unscaled]:
    sources = {id(source): source for kind in kinds for source in kind.sources}
    return [source for source in sources.values() if isinstance(source, Unscaled)]


def _measures(source: Any) -> bool:
    largest = source.check.largest if isinstance(source, Unscaled) else None
    return largest is not None and graphs.is_visible(largest)


def _losses_among(kinds: Iterable[Kind]) -> List[Loss]:
    sources = [source for kind in kinds for source in kind.sources]
    return [getattr(source, LOSS) for source in sources if hasattr(source, LOSS)]


def _losses_at_fault(kinds: List[Kind]) -> List[Tensor]:
    """Returns the losses of which it is known that values were made of them.

    A loss is at fault only if the tensor of S that multiplied it is a source of the
    gradients, or of the unscaled lists that they were made of. Where that is not known,
    no loss is: one halving too many is a small harm, but a loss scale that never falls
    ends a run.
    """
    kinds = [kind for kind in kinds if kind.name != UNKNOWN]
    values = [loss.value for loss in _losses_among(kinds)]
    values += [value for unscaled in _lists_among(kinds) for value in unscaled.losses]
    visible = [value for value in values if graphs.is_visible(value)]
    return list({id(value): value for value in visible}.values())
