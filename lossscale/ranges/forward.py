"""forward_ranges: which layers overflow in float16, before you train in it."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.ranges import checks, exponents
from lossscale.ranges.advice import Advice, Fault
from lossscale.ranges.batches import first_batches, with_progress
from lossscale.ranges.calls import Call, Watcher, things_of, without_functions
from lossscale.ranges.magnitudes import floats_in
from lossscale.ranges.model_state import (
    SIXTEEN_BITS,
    all_in_float32,
    in_float16,
    in_float32,
    unchanged,
)
from lossscale.ranges.origins import Origins
from lossscale.ranges.report import Ranges
from lossscale.runtime import kerases

_ALL_FIT = "None of them overflows in float16: no layer needs float32."
_COVERED = """\
What overflows in float16 is computed in float32 already: no other layer needs it."""
_NEEDED = (
    "float16 does not hold what these layers are given, compute or return. Write\n"
)
_INSIDE = "Sums, squares or products inside overflow in float16: {}."
_MANY = """\
If they are most of the model, look for a learning rate that is too high, or data that \
are not normalized."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ForwardRanges(Ranges):
    """What float16 would do to the outputs of a model's layers, and to their inputs.

    Shares are of the values that are finite and not zero in float32; NaN if there are
    none. All arrays have shape `[rows]`, in the order of `names`: from the input to the
    output.

    Attributes:
      names: The names of the rows. A row holds the outputs of one call of a layer, and
        has the layer's path, or holds inputs that no other layer returned.
      counts: An `int64` array of shape `[rows, lossscale.ranges.exponents.BINS]`.
      largest: A `float32` array, the largest finite magnitude of each row.
      batches: How many batches were counted.
      need_float32: The paths of layers that need float32: some of their outputs,
        inputs, or values computed inside are beyond 65504.
      inside: Those layers that overflow inside, as in a variance or in attention's
        logits, so that their outputs in float16 are wrong.
      classes: The class names of the layers in `need_float32`.
      need_cast: The paths of operations, and of layers with operations of their own in
        `call`, whose inputs must be cast to float32, since no dtype reaches them.
      is_inside_known: Whether layers could run in float16. They cannot if a model of
        Keras 2 is all in float32: then `inside` is empty.
    """

    names: Tuple[str, ...]
    counts: Any
    largest: Any
    batches: int
    need_float32: Tuple[str, ...] = ()
    inside: Tuple[str, ...] = ()
    classes: Tuple[str, ...] = ()
    is_inside_known: bool = True
    _is_keras3: bool = False
    _paths: Tuple[str, ...] = ()
    need_cast: Tuple[str, ...] = ()
    _told: Tuple[str, ...] = ()

    loss_scale = 1.0
    _what = "outputs of layers"
    _is_scaled = False

    @property
    def policy_map(self) -> Any:
        """A `DTypePolicyMap`: float32 for `need_float32`, mixed_float16 for the rest.

        If the model mixes dtypes already, its layers in float32 stay in float32.

        This `keras.dtype_policies.DTypePolicyMap` has an entry for every such layer and
        for layers that a Keras layer creates inside, by `path`, or by name while there
        is none. Use it to build a functional or sequential model again from configs:

        ```
        policies = ranges.policy_map
        keras.config.set_dtype_policy("float32")  # for layers that only hold others

        def anew(layer):
            policy = policies[layer.path or layer.name]
            return type(layer).from_config({**layer.get_config(), "dtype": policy})

        model = keras.models.clone_model(model, clone_function=anew, recursive=True)
        ```

        A `Sequential` within a model must begin with `keras.Input`. Otherwise it casts
        its inputs to the dtype of the policy under which it was first created.

        Raises:
          NotImplementedError: The model's Keras has no DTypePolicyMap: Keras 2, or an
            early Keras 3. Write the lines that this report prints.
        """
        keras = kerases.keras3() if self._is_keras3 else None
        policies: Any = getattr(keras, "dtype_policies", None)
        made = getattr(policies, "DTypePolicyMap", None)
        if made is None:
            raise NotImplementedError(
                "`policy_map` needs a Keras with DTypePolicyMap, got one without. "
                'Write dtype="float32" in the layers of `need_float32`.'
            )
        float32 = policies.DTypePolicy("float32")
        found = made(policies.DTypePolicy("mixed_float16"))
        for path in self._paths:
            found[path] = float32
        return found

    def __repr__(self) -> str:
        return (
            f"ForwardRanges(rows={len(self.names)}, batches={self.batches}, "
            f"need_float32={self.need_float32})"
        )

    @property
    def _heading(self) -> str:
        return (
            f"Outputs of layers, {self._batches_text} in float32, and what float16 "
            "makes of them:"
        )

    @property
    def _notes(self) -> List[str]:
        return list(self._told or [_ALL_FIT])

    @property
    def _counts(self) -> Tuple[Any, int]:
        return self.counts, 0

    @property
    def _unscaled(self) -> Any:
        return self.counts

    @property
    def _all(self) -> ForwardRanges:
        return dataclasses.replace(
            self, counts=self.counts.sum(0)[None], largest=self.largest.max()[None]
        )


def forward_ranges(
    model: Any,
    x: Any,
    *,
    batches: Optional[int] = 10,
    batch_size: Optional[int] = None,
    verbose: int = 1,
) -> ForwardRanges:
    """Finds the layers of a model that must stay in float32, while others use float16.

    Computes the outputs of every layer for some batches in float32, under any policy of
    the model, with `training=True`, and counts how many would overflow or underflow in
    float16. Then it runs each layer in float16 on the inputs that the layer has in
    float32. So it also finds overflows in sums that a layer does not return: in a
    variance, a norm, the logits of attention. A mask of -inf or -1e9 is no overflow.

    What it says to write is tried: it runs the model again as if that had been done,
    and adds what else is needed, until nothing overflows.

    It runs your model itself, in eager mode, and leaves weights, moving statistics,
    policies and random streams as they were. (It creates missing weights.) It does not
    run a custom `train_step`. Memory does not grow with the number of batches.

    >>> import lossscale
    >>> import numpy as np
    >>> dense = tf.keras.layers.Dense
    >>> names = ("large", "small")
    >>> model = tf.keras.Sequential([dense(1, use_bias=False, name=n) for n in names])
    >>> x = np.full([8, 1], 2.0**10)
    >>> _ = model(x)
    >>> model.set_weights([np.full([1, 1], 2.0**8), np.full([1, 1], 2.0**-8)])
    >>> ranges = lossscale.forward_ranges(model, x, verbose=0)
    >>> ranges.names
    ('large, inputs', 'large', 'small')
    >>> ranges.largest_exponent.tolist(), ranges.overflowing.tolist()
    ([10.0, 18.0, 10.0], [0.0, 1.0, 0.0])
    >>> ranges.need_float32  # the first for its output, the second for its input
    ('large', 'small')

    Args:
      model: Any Keras model.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras. The last
        three may yield targets, too, which are ignored.
      batches: The number of batches to look at, from the first. None: all.
      batch_size: Rows per batch if `x` holds arrays. None: 32, as in Keras's `fit`.
      verbose: 1 shows a progress bar, 0 nothing.

    Returns:
      `ForwardRanges`: print it, read its arrays, `plot` it.

    Raises:
      TypeError: `model` is no Keras model, its layers return no float tensors, or an
        argument has the wrong type.
      ValueError: The model has no layers, or cannot be built; `x` is empty or not
        finite, or never ends and `batches` is None; the model belongs to a strategy
        with several replicas.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = checks.keras_of(model, "forward_ranges")
    batches = arguments.optional(arguments.count, "batches", batches)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    found, length = first_batches((x, None, None), batch_size, batches)
    first = next(found)
    checks.finite_data(first[0])
    checks.build(model, first[0])
    with unchanged(model):
        every = itertools.chain([first], found)
        return _Counter(keras, model).run(with_progress(keras, every, length, verbose))


class _Counter:
    """Counts the outputs of layers, batch by batch, and adds up the counts."""

    def __init__(self, keras: Any, model: Any) -> None:
        self._keras, self._model = keras, model
        self._rows: Dict[_Key, Tuple[Any, float]] = {}
        self._advice = Advice(keras)
        #: The paths of layers that overflow inside, though inputs and outputs fit.
        self._inside: Set[str] = set()
        self._batches, self._can_try, self._overflows = 0, True, False

    def run(self, batches: Iterator[Any]) -> ForwardRanges:
        """Counts all batches, and returns the result."""
        for x, _, _ in batches:
            checks.finite_data(x)
            self._see(x)
            self._batches += 1
        if not self._rows:
            raise TypeError(
                "`model` must have layers that return float tensors, got "
                f"{self._model.name!r}, which has none."
            )
        return self._report()

    def _see(self, x: Any) -> None:
        first = _Float32Pass()
        everywhere = in_float32(self._keras, kerases.layers_of(self._model))
        watched = first.watching(things_of(self._model))
        with everywhere, without_functions(), watched:
            self._model(x, training=True)
        for key, (counts, largest) in first.rows.items():
            before, largest_before = self._rows.get(key, (0, 0.0))
            self._rows[key] = (before + counts, max(largest, largest_before))
        outside = [call for call in first.calls if id(call) in first.overflowing]
        self._overflows = self._overflows or bool(outside)
        with in_float16(self._keras, self._model) as can_try:
            # Keras 2 cannot try a model that is all in float32.
            self._can_try = can_try and self._can_try
            if self._can_try:
                self._try(x, first, outside)
            elif all_in_float32(self._model):
                for call in outside:
                    self._advice.add(Fault(call))

    def _try(self, x: Any, first: _Float32Pass, outside: List[Call]) -> None:
        """Runs the model in float16, and tries what helps."""
        try:
            found = self._overflows_in(x, _Float16Pass(first, None))
        except tf.errors.OpError as error:  # an operation has no float16 kernel
            self._can_try = False
            warnings.warn(
                "The model could not run in float16, so overflows inside its layers "
                f"are unknown: {error!s:.300}",
                stacklevel=6,
            )
            found = []
        known = {call.path for call in outside}
        inside = [f.call for f in found if not f.is_cast and f.call.path not in known]
        self._inside |= {call.owner.path for call in inside}
        # So the trial need not find one layer after the other.
        for call in outside:
            made, is_cast = call.owner, first.overflowing[id(call)]
            is_known = is_cast or not made.is_written_around_layers
            takes_dtype = made.is_layer and made.parent is not None
            if is_known and takes_dtype and call.dtype in SIXTEEN_BITS:
                self._advice.add(Fault(call, None, is_cast))
        if not self._advice:
            for fault in found:
                self._advice.add(fault)
        if self._can_try and self._advice:
            self._advice.try_out(lambda: self._faults_now(x, first))

    def _faults_now(self, x: Any, first: _Float32Pass) -> List[Fault]:
        trial = _Float16Pass(first, self._advice)
        try:
            return self._overflows_in(x, trial)
        except (tf.errors.OpError, TypeError, ValueError):
            # Two dtypes meet now, in the call that failed.
            return [Fault(trial.failed, is_mixed=True)] if trial.failed else []

    def _overflows_in(self, x: Any, trial: _Float16Pass) -> List[Fault]:
        with trial.noted(self._model):
            self._model(x, training=True)
        return [fault for each in trial.overflows for fault in each.faults]

    def _report(self) -> ForwardRanges:
        advice = self._advice
        needed = sorted(advice.layers, key=self._place)
        layers = [advice.layers[path].layer for path in needed]
        advice.layers = {path: advice.layers[path] for path in needed}
        every = kerases.layers_of(self._model)
        is_mixed = not all_in_float32(self._model)
        kept = [each for each in every if is_mixed and each.compute_dtype == "float32"]
        return ForwardRanges(
            tuple(key.name for key in self._rows),
            np.stack([counts for counts, _ in self._rows.values()]),
            np.array([most for _, most in self._rows.values()], np.float32),
            self._batches,
            tuple(needed),
            tuple(path for path in needed if path in self._inside),
            tuple(type(layer).__name__ for layer in layers),
            self._can_try,
            kerases.is_keras3(self._keras),
            (*(p for layer in layers for p in _paths(layer)), *map(_path, kept)),
            tuple(advice.casts),
            tuple(self._notes([path for path in needed if path in self._inside])),
        )

    def _notes(self, inside: List[str]) -> List[str]:
        if not self._advice:
            return [_COVERED if self._overflows else _ALL_FIT]
        lines = [f"    {line}" for line in self._advice.lines]
        return [
            *([_NEEDED, *lines, ""] if lines else []),
            *self._advice.sentences,
            *([_INSIDE.format(", ".join(inside))] if inside else []),
            _MANY,
        ]

    def _place(self, path: str) -> int:
        """Returns a layer's place on the way from the input to the output."""
        places = [n for n, key in enumerate(self._rows) if _is_at(key.path, path)]
        return min(places, default=len(self._rows))


def _is_at(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _paths(layer: Any) -> List[str]:
    """Returns a layer's path in Keras 3, and the paths of layers that it creates."""
    is_models_own = hasattr(layer, "layers") or hasattr(layer, "layer")
    inner = [layer] if is_models_own else kerases.layers_of(layer)
    return list(map(_path, inner))


def _path(layer: Any) -> str:
    # A layer that builds nothing has no path. In Keras 2 no layer has one.
    return str(getattr(layer, "path", None) or layer.name)


class _Key(NamedTuple):
    """The row in which a tensor is counted."""

    path: str
    number: int
    is_input: bool

    @property
    def name(self) -> str:
        """The row's name: the layer's path, the number of the call, inputs or not."""
        which = f" (call {self.number})" if self.number > 1 else ""
        return f"{self.path}{which}{', inputs' if self.is_input else ''}"


class _Float32Pass(Watcher):
    """Counts the outputs of each call, and inputs not counted before.

    A tensor that several layers return or pass on counts only once, for the first.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By row: counts of shape `[BINS]`, and the largest finite magnitude.
        self.rows: Dict[_Key, Tuple[Any, float]] = {}
        #: Calls in the order in which they returned.
        self.calls: List[Call] = []
        #: The ids of calls whose inputs or outputs overflow in float16, and whether
        #: those are inputs, which the call casts.
        self.overflowing: Dict[int, bool] = {}
        self._numbers: Dict[Any, int] = {}
        self._keys: Dict[int, Tuple[str, int]] = {}
        # The tensor is kept, too, since Python reuses the ids of deleted objects.
        self._seen: Dict[int, Tuple[Any, bool]] = {}

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        call.inputs = floats_in((args, kwargs))
        if call.parent is not None:
            self._keys[id(call)] = (call.path, self._number_of(call))
            self._see(call, call.inputs, is_input=True)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        call.outputs = floats_in(outputs)
        self.calls.append(call)
        if call.parent is not None:
            self._see(call, call.outputs, is_input=False)
        return outputs

    def _number_of(self, call: Call) -> int:
        """Returns the number of a call of its layer, from 1 on; always 1 in a loop."""
        above = call.parent
        while above is not None:
            if above.is_recurrent:
                return 1
            above = above.parent
        key = (call.path, id(call.layer))
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._numbers[key]

    def _see(self, call: Call, tensors: List[Any], is_input: bool) -> None:
        for tensor in tensors:
            is_new = id(tensor) not in self._seen
            if is_new:
                self._count(_Key(*self._keys[id(call)], is_input), tensor)
            # A layer that only passes the tensor on is not at fault.
            overflows = self._seen[id(tensor)][1]
            is_cast = is_input and kerases.casts_inputs(call.layer)
            if overflows and ((is_new and not is_input) or is_cast):
                self.overflowing.setdefault(id(call), is_input)

    def _count(self, key: _Key, tensor: Any) -> None:
        found, most = exponents.count(tensor)
        counts, largest = found.numpy().astype(np.int64), float(most.numpy())
        self._seen[id(tensor)] = (tensor, _overflows(tensor.numpy()))
        before, largest_before = self.rows.get(key, (0, 0.0))
        self.rows[key] = (before + counts, max(largest, largest_before))


def _overflows(values: Any) -> bool:
    """Tells whether values overflow in float16. The values of a mask do not count."""
    values = values.astype(np.float32).ravel()
    bad = values[~(np.abs(values) < exponents.INFINITE_FROM)]  # NaN, too
    if not len(bad):
        return False
    # A mask has one negative number, -1e9 or -inf, for all hidden places, and others.
    low, high = bad.min(), bad.max()
    is_one = low == high or low > high * 1.001
    is_mask = high < 0 and is_one and len(bad) < len(values)
    return not is_mask


class _Float16Pass(Origins):
    """Runs each layer in float16 on its inputs from the float32 pass.

    It replaces each layer's outputs by those of the first pass, clipped to the dtype's
    range, so that a layer that overflows does not spoil the next ones.
    """

    def __init__(self, first: _Float32Pass, advice: Optional[Advice]) -> None:
        super().__init__(advice)
        self._first = first
        self._next, self._in_step = 0, True

    def end(self, call: Call, outputs: Any) -> Any:
        place, self._next = self._next, self._next + 1
        calls = self._first.calls
        same = place < len(calls) and calls[place].layer is call.layer
        # If the second pass calls layers in another order, replace nothing from there.
        self._in_step = self._in_step and same
        if self._in_step:
            outputs = _replaced(outputs, calls[place].outputs)
        return super().end(call, outputs)


def _replaced(outputs: Any, others: List[Any]) -> Any:
    """Returns a nest whose floats are replaced by others, cast to its own dtypes."""
    flat, left = tf.nest.flatten(outputs), list(others)
    if len(floats_in(outputs)) != len(left):
        return outputs
    for at, tensor in enumerate(flat):
        if floats_in(tensor):
            other = left.pop(0)
            if other.shape == tensor.shape:
                flat[at] = _bounded(other, tensor.dtype)
    return tf.nest.pack_sequence_as(outputs, flat)


def _bounded(tensor: Any, dtype: Any) -> Any:
    if dtype.name in SIXTEEN_BITS:
        tensor = tf.clip_by_value(tensor, -exponents.LARGEST, exponents.LARGEST)
        tensor = tf.where(tf.math.is_finite(tensor), tensor, tf.zeros_like(tensor))
    return tf.cast(tensor, dtype)
