"""Checks of one replica's gradients: are all finite, and which are infinite or NaN?

A *quick check* adds all elements up: a finite sum proves that each of them is finite.
Only if the sum is not finite does the *exact check* look at each element. In float16 a
quick check looks at each element, too: see `sum_is_finite`.

Each gradient has a *worst* number. It is NaN if an element is NaN, else infinite if an
element is infinite, else finite. The sum of a gradient's worst numbers, of several
replicas or times, is the worst of them. A good step does not compute them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.arguments import shown
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grad, Grads, PerGradient, Scalar, Tensor
from lossscale.runtime.control import either
from lossscale.runtime.graphs import current_graph, do_not_convert, graph_of

#: Gradients with more elements are not packed: a copy takes longer than it saves.
SMALL = 4096
#: The dtypes of which a quick check looks at each element: not under XLA, under XLA.
_CHECKED_EACH = {False: (tf.float16,), True: (tf.float16, tf.bfloat16)}
#: The dtypes that TensorFlow's reductions and `is_finite` take on every device.
_REDUCIBLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
#: dtype -> a factor. Of 2**60 largest numbers, each times that, the sum is finite.
_SHRINK = {tf.float32: 2.0**-95, tf.float64: 2.0**-991}


class Check(NamedTuple):
    """A quick check of gradients, and an exact check for when it fails.

    `earlier & later` joins two checks of the same gradients, or of two lists of
    gradients. `NO_CHECK` joined with another check is that other one.

    Attributes:
      quick: If True, all gradients are finite; if False, only the exact check can tell.
        The Python value True if there is nothing to check.
      exact_check: Returns the exact flag. It must work in a branch, and for either
        `quick`. None: `quick` is exact.
      worst: Returns the worst number of each gradient (see above). Called if a step is
        skipped, perhaps within a branch. None: not known here, or none is at fault.
      largest: The greatest magnitude of the gradients. None: not requested.
    """

    quick: Flag
    exact_check: Optional[Callable[[], Flag]] = None
    worst: Optional[Callable[[], PerGradient]] = None
    largest: Optional[Scalar] = None

    @property
    def checks_nothing(self) -> bool:
        """Whether it is `NO_CHECK`, but for the greatest magnitude."""
        return self.quick is True

    def exact(self) -> Flag:
        """Returns the exact flag, by the exact check only if the quick one fails."""
        if self.exact_check is None:
            return self.quick
        return either(self.quick, partial(tf.constant, True), self.exact_check)

    def _exact_in_branch(self) -> Flag:
        return self.quick if self.exact_check is None else self.exact_check()

    def worst_of(self, count: int) -> PerGradient:
        """Returns the worst numbers of `count` gradients."""
        return no_faults(count) if self.worst is None else self.worst()

    def without_gradients(self, count: int) -> Check:
        """Returns this check of `count` gradients, but does not hold them in memory.

        The exact check runs now, in a branch of its own. Otherwise the gradients would
        stay in memory until the step is decided, beside those that were clipped.
        """
        if self.exact_check is None:
            return self
        if mode.current().knows_values and self.quick:
            return Check(self.quick, largest=self.largest)
        flag, worst = either(
            self.quick,
            lambda: (tf.constant(True), no_faults(count)),
            lambda: (self._exact_in_branch(), self.worst_of(count)),
        )
        return Check(flag, None, lambda: worst, self.largest)

    def __and__(self, later: Check) -> Check:
        largest = greater(self.largest, later.largest)
        if self.checks_nothing or later.checks_nothing:
            remaining = later if self.checks_nothing else self
            return remaining._replace(largest=largest)

        def exact_check() -> Flag:
            return tf.logical_and(self._exact_in_branch(), later._exact_in_branch())

        def joined_worst() -> PerGradient:
            # A gradient that was not finite at the first check caused what the second
            # one finds: clipping by an infinite norm makes every gradient NaN.
            is_finite = self._exact_in_branch()
            return tf.where(is_finite, later.worst(), self.worst())  # type: ignore[misc]

        are_exact = self.exact_check is None and later.exact_check is None
        quick = tf.logical_and(self.quick, later.quick)
        have_both = self.worst is not None and later.worst is not None
        worst = joined_worst if have_both else self.worst or later.worst
        return Check(quick, None if are_exact else exact_check, worst, largest)


#: A check of nothing.
NO_CHECK = Check(True)


def greater(one: Optional[Scalar], other: Optional[Scalar]) -> Optional[Scalar]:
    """Returns the greater of two magnitudes. None means: not requested."""
    if one is None or other is None:
        return other if one is None else one
    return tf.maximum(one, other)


@do_not_convert
def all_finite(grads: Any) -> Any:
    """Tells whether all gradients are free of infinity and NaN. The answer is exact.

    It adds all elements up first, with one read of memory: if the sum is finite, so is
    each element. If it is not, each element is checked, since large finite numbers can
    overflow in the sum, too. For float16, and under XLA on a GPU or for bfloat16, each
    is checked from the start. This looks at one replica only. `LossScale.update` looks
    at all replicas.

    >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
    True
    >>> bool(all_finite({"kernel": tf.constant([1.0, float("inf")])}))
    False
    >>> bool(all_finite(tf.constant([3e38, 3e38])))  # their sum is not finite
    True

    Args:
      grads: A nest of gradients: tensors, variables, arrays or numbers of any shape.
        `None`s, integers and bools are ignored. Of a `tf.IndexedSlices` or sparse
        tensor only the `values` count.

    Returns:
      A `bool` tensor of shape `[]`. True if there are no gradients.
    """
    return checked(grads).exact()


def checked(grads: Any) -> Check:
    """Returns the check of a nest of gradients, without worst numbers."""
    values = floating_values(grads)
    if mode.current().looks_at_once:
        return Check(each_is_finite(values))
    return Check(sum_is_finite(values), lambda: each_is_finite(values))


def sum_is_finite(values: List[Tensor]) -> Flag:
    """Tells whether the sum of all elements is finite, which proves that each is.

    In float16 it checks each element instead: float16 ends at 65504, so a sum of scaled
    gradients is seldom finite. Under XLA a sum in bfloat16 takes longer than the check.
    """
    narrow = _CHECKED_EACH[mode.current().by_xla]
    looked_at = [value for value in values if value.dtype in narrow]
    summed = add_up([value for value in values if value.dtype not in narrow])
    flags = [each_is_finite(looked_at)] if looked_at else []
    if summed:
        sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in summed]
        flags.append(tf.math.is_finite(tf.add_n(sums)))
    return all_true(flags)


def each_is_finite(values: List[Tensor]) -> Any:
    """Tells whether each element is finite, by a check of each."""
    packed = pack(values)[0]
    return all_true([tf.reduce_all(tf.math.is_finite(as_stored(v))) for v in packed])


@do_not_convert
def sum_stays_finite(grads: Any, terms: int) -> Any:
    """Tells whether a sum of `terms` such gradients surely does not overflow.

    It does not if no element is larger than the dtype's maximum divided by `terms`. The
    Euclidean norm bounds the largest element and costs one read of memory. True also
    proves that the gradients are finite; False proves nothing.
    """
    checks = []
    for value in floating_values(grads):
        # Half of the range is left for the rounding of the norm and of the sum.
        limit = float(value.dtype.max) / (2 * terms)
        # In float16 squares overflow from 256 on. If one overflows in float32, the norm
        # is infinite and the answer False.
        wide = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
        norm = tf.sqrt(2 * tf.nn.l2_loss(wide))
        checks.append(norm <= tf.constant(limit, norm.dtype))
    return all_true(checks)


def all_true(flags: List[Flag]) -> Flag:
    """Tells whether all flags are True. True without any."""
    if len(flags) < 2:
        return flags[0] if flags else tf.constant(True)
    # Without the stack TensorFlow would compute the list's rank with five operations.
    return tf.reduce_all(tf.stack(flags))


def _not_a_gradient(leaf: Any) -> TypeError:
    return TypeError(f"`grads` must be a nest of gradients, got {shown(leaf)} in it.")


def floating_values(grads: Any) -> List[Tensor]:
    """Returns the dense floating-point tensors in the nest `grads`."""
    values: List[Tensor] = []
    for leaf in tf.nest.flatten(grads):
        if isinstance(leaf, tf.Tensor) and leaf.dtype in _REDUCIBLE:
            values.append(leaf)
        elif leaf is not None:
            values += _floating_parts(leaf)
    return values


def _floating_parts(leaf: Any) -> List[Tensor]:
    """Returns the floating-point tensors in what may be no plain tensor of floats."""
    try:
        value = tf.convert_to_tensor(dense_part(leaf))
    except (TypeError, ValueError) as error:
        raise _not_a_gradient(leaf) from error
    if value.dtype == tf.string:
        raise _not_a_gradient(leaf)
    if value.dtype.is_complex:
        return [tf.math.real(value), tf.math.imag(value)]
    if value.dtype in _REDUCIBLE:
        return [value]
    # The float8 family has few kernels.
    return [tf.cast(value, tf.float32)] if value.dtype.is_floating else []


def dense_part(grad: Grad) -> Any:
    """Returns the dense tensor in a sparse or ragged gradient, any other unchanged."""
    if isinstance(grad, (tf.IndexedSlices, tf.SparseTensor)):
        return grad.values
    return grad.flat_values if isinstance(grad, tf.RaggedTensor) else grad


def as_stored(value: Any) -> Any:
    """Returns the magnitudes of `value`, rounded as they will be in memory.

    XLA computes float16 and bfloat16 in float32. It may skip the rounding, in which a
    value overflows, but not before an operation on bits. Others stay unchanged.
    """
    if value.dtype.size != 2 or not mode.current().by_xla:
        return value
    bits = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int16), tf.int16.max)
    return tf.bitcast(bits, value.dtype)


def no_faults(count: int) -> PerGradient:
    """Returns the worst numbers of gradients that are all finite."""
    return tf.zeros([count])


def worst_of_each(packed: Grads, groups: List[List[int]]) -> PerGradient:
    """Returns the worst number, not negative, of each gradient, packed or not."""
    worst = list(map(_worst_of_packed, packed, map(len, groups)))
    return in_order(worst, groups)


def worst_of_all(values: Grads) -> PerGradient:
    """Returns the worst number of all values, as if they were one gradient's."""
    return sum([_worst_of_packed(value, 1) for value in values], no_faults(1))


def _worst_of_packed(grad: Grad, size: int) -> PerGradient:
    """Returns the worst number of each of the `size` gradients packed into one.

    It is a sum of magnitudes, made so small that no finite sum overflows. An XLA that
    joins that factor and the divisor would hide an overflow: see `Mode.joins_factors`.
    """
    sums = []
    for value in map(as_stored, floating_values([grad])):
        wide = tf.cast(value, tf.float32) if value.dtype.size < 4 else value
        rows = tf.reshape(wide, [size, -1])
        if mode.current().joins_factors:
            is_finite = tf.math.is_finite(rows)
            small = tf.where(is_finite, tf.zeros_like(rows), tf.abs(rows))
        else:
            small = tf.abs(rows * _SHRINK[rows.dtype])
        sums.append(tf.cast(tf.reduce_sum(small, 1), tf.float32))
    return tf.add_n(sums) if sums else no_faults(size)


def pack(grads: Grads) -> Tuple[List[Any], List[List[int]]]:
    """Stacks small dense floating-point gradients of equal shape and dtype.

    Returns:
      packed: A list of gradients, not longer than `grads`.
      groups: For each of them, the positions in `grads` of the gradients within it.
    """
    groups = _groups(grads)
    members = [[grads[position] for position in group] for group in groups]
    return [tf.stack(some) if len(some) > 1 else some[0] for some in members], groups


def add_up(grads: Grads) -> List[Any]:
    """Adds up the small gradients that `pack` would stack, and keeps the others."""
    return [tf.add_n([grads[i] for i in group]) for group in _groups(grads)]


def unpack(packed: Grads, groups: List[List[int]]) -> List[Any]:
    """Splits packed gradients, all changed in the same way, into the original list."""
    if len(packed) == sum(map(len, groups)):
        return packed
    grads: Dict[int, Any] = {}
    for group, value in zip(groups, packed):
        is_packed = len(group) > 1
        parts = tf.unstack(value, len(group)) if is_packed else [in_this_graph(value)]
        grads.update(zip(group, parts))
    return [grads[i] for i in range(len(grads))]


def in_order(of_groups: List[Tensor], groups: List[List[int]]) -> PerGradient:
    """Returns the numbers of all groups in the order of the gradients."""
    numbers = tf.concat(of_groups or [tf.zeros([0])], 0)
    listed = [position for group in groups for position in group]
    if listed == sorted(listed):
        return numbers
    return tf.gather(numbers, sorted(range(len(listed)), key=listed.__getitem__))


def is_small(tensor: Tensor) -> bool:
    """Tells whether a tensor is known to have at most `SMALL` elements."""
    size = tensor.shape.num_elements()
    return size is not None and size <= SMALL


def in_this_graph(grad: Grad) -> Any:
    """Returns a gradient as a tensor of the current graph: Keras 3 wants one graph."""
    if graph_of(grad) is current_graph():
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(
            in_this_graph(grad.values), grad.indices, grad.dense_shape
        )
    return tf.identity(grad) if isinstance(grad, tf.Tensor) else grad


def _groups(grads: Grads) -> List[List[int]]:
    """Returns groups of positions. The gradients of a group are packed into one."""
    groups: Dict[Any, List[int]] = {}
    packs = not mode.current().by_xla  # which makes one program of them anyway
    for position, grad in enumerate(grads):
        key: Any = position
        is_dense = isinstance(grad, tf.Tensor) and grad.dtype.is_floating
        if packs and is_dense and is_small(grad):
            # In a model that is spread over devices, each gradient stays on its own.
            key = (grad.dtype, tuple(grad.shape.as_list()), grad.device)
        groups.setdefault(key, []).append(position)
    return list(groups.values())
