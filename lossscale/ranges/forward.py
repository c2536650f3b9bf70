"""forward_ranges: which layers overflow in float16, before you train in it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, ClassVar, Dict, List, Optional, Set, Tuple

import numpy as np
import tensorflow as tf

from lossscale.ranges import exponents, inputs, model_state
from lossscale.ranges.advice import Advice, Attempt, Fault
from lossscale.ranges.calls import Call, Watcher, copy_of
from lossscale.ranges.magnitudes import are_alike, floats_in, is_float
from lossscale.ranges.model_state import SIXTEEN_BITS, all_in_float32
from lossscale.ranges.report import Ranges, Row
from lossscale.ranges.step import Step, build, has_own, of_fit
from lossscale.runtime import keras_versions
from lossscale.runtime.loss_scale_warning import warn

#: What was counted, by a layer's path and the row's name.
_Rows = Dict[Tuple[str, str], Row]

_ALL_FIT = "None of them overflows in float16: no layer needs float32."
_COVERED = """\
What overflows in float16 is computed in float32 already: no other layer needs it."""
_NEEDED = "float16 does not hold what these layers are given, compute or return."
_INSIDE = "Sums, squares or products inside overflow in float16: {}."
_NO_STEP = """\
Only the forward pass was looked at: with these data in float32, the model's own \
`train_step` raises {error!s:.200}"""
_MANY = """\
If they are most of the model, look for a learning rate that is too high, or data that \
are not normalized."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ForwardRanges(Ranges):
    """What float16 would do to the outputs of a model's layers, and to their inputs.

    `flushed`, `subnormal` and `overflowing` are shares of the values that are finite
    and not zero in float32, NaN if there are no such values. All arrays but `counts`
    and `histogram` have shape `[rows]`, in the order of `names`: from the input to the
    output.

    Attributes:
      names: A tuple of the rows' names. A row holds the outputs of one call of a layer,
        and has the layer's path, or holds inputs that no other layer returned.
      counts: An `int64` array of shape `[rows, lossscale.ranges.exponents.BINS]`.
      largest: A `float32` array, the largest finite magnitude of each row.
      batches: An integer, how many batches were counted.
      need_float32: A tuple of the paths of layers that need float32: some outputs,
        inputs, or values inside are beyond 65504. The model's name is there if the
        model itself casts such data.
      inside: A tuple of those layers that overflow inside, for example in a variance,
        so that their outputs in float16 are wrong.
      classes: A tuple of the class names of the layers in `need_float32`.
      need_cast: A tuple of the paths of operations, and of layers with operations of
        their own in `call`, whose inputs must be cast to float32.
      is_inside_known: A boolean, whether `inside` could be found. It could not in a
        Keras 2 model that is all in float32.
    """

    names: Tuple[str, ...]
    counts: Any
    largest: Any
    batches: int
    need_float32: Tuple[str, ...] = ()
    inside: Tuple[str, ...] = ()
    classes: Tuple[str, ...] = ()
    is_inside_known: bool = True
    need_cast: Tuple[str, ...] = ()

    # What `forward_ranges` knows besides, which no constructor takes.
    _is_keras3: ClassVar[bool] = False
    _paths: ClassVar[Tuple[str, ...]] = ()
    _remarks: ClassVar[Tuple[str, ...]] = ()
    loss_scale = 1.0
    _title, _what, _is_scaled = "Outputs of layers,", "outputs of layers", False
    _in_repr = ("need_float32",)

    @property
    def policy_map(self) -> Any:
        """A `DTypePolicyMap`: float32 for `need_float32`, mixed_float16 for the rest.

        It has an entry for each layer in float32, also for those that were in float32
        before, and those that a layer creates inside: under the layer's `path`, or its
        name while it has no path. Build a functional or sequential model again with it:

        ```
        policies = ranges.policy_map
        keras.config.set_dtype_policy("float32")  # for layers that only hold others

        def renew(layer):
            policy = policies[layer.path or layer.name]
            return type(layer).from_config({**layer.get_config(), "dtype": policy})

        model = keras.models.clone_model(model, clone_function=renew, recursive=True)
        ```

        A `Sequential` within a model must begin with `keras.Input`. Otherwise it casts
        its inputs to the dtype of the policy under which it was first created.

        Raises:
          NotImplementedError: The model's Keras has no DTypePolicyMap: Keras 2, or an
            early Keras 3. Write the lines that this report prints.
        """
        keras = keras_versions.keras3() if self._is_keras3 else None
        policies: Any = getattr(keras, "dtype_policies", None)
        map_class = getattr(policies, "DTypePolicyMap", None)
        if map_class is None:
            raise NotImplementedError(
                "`policy_map` needs a Keras with DTypePolicyMap, got one without. "
                'Write dtype="float32" in the layers of `need_float32`.'
            )
        float32 = policies.DTypePolicy("float32")
        policy_map = map_class(policies.DTypePolicy("mixed_float16"))
        for path in self._paths:
            policy_map[path] = float32
        return policy_map

    @property
    def _notes(self) -> List[str]:
        return list(self._remarks or [_ALL_FIT])


def forward_ranges(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batches: Optional[int] = 10,
    batch_size: Optional[int] = None,
    verbose: int = 1,
) -> ForwardRanges:
    """Finds the layers of a model that must stay in float32, while others use float16.

    Computes the outputs of every layer for some batches in float32, under any policy,
    with `training=True`, and counts how many overflow or underflow in float16. Then it
    runs each layer in float16 on its float32 inputs, which shows overflows inside, and
    tries what it advises:
    https://github.com/lossscale/lossscale/blob/main/docs/forward-ranges.md. If the
    model's class has its own `train_step`, it runs that, and its optimizers do nothing.
    The model stays as it was, except that missing weights are created.

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
      model: A Keras model.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets for a `train_step` of the model's own, or None. Others are not used.
      sample_weight: Weights for it, or None.
      batches: An integer, how many batches to use, or None: all.
      batch_size: An integer, the rows per batch if `x` holds arrays, or None: 32.
      verbose: An integer: 1 shows a progress bar.

    Returns:
      `ForwardRanges`: print it, read its arrays, or `plot` it.

    Raises:
      TypeError: An argument has the wrong type, or no layer returns float tensors.
      ValueError: The model has no layers, cannot be built, or belongs to a strategy
        with several replicas; `x` is empty or not finite, or never ends.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = inputs.keras_of(model, "forward_ranges")
    data = (x, y, sample_weight)
    first, chosen, length = inputs.first_batches(data, batch_size, batches)
    inputs.check_finite(inputs.triple(first)[0])
    counter = _Counter(keras, model, first)
    for batch in inputs.with_progress(keras, chosen, length, verbose):
        counter.see(batch)
    return counter.result()


class _Counter:
    """Counts the outputs of layers, and finds what overflows."""

    def __init__(self, keras: Any, model: Any, batch: Any) -> None:
        self._keras, self._model = keras, model
        self._rows: _Rows = {}
        self._advice = Advice(keras)
        #: The paths of layers that overflow inside, though inputs and outputs fit.
        self._inside: Set[str] = set()
        self._batches, self._can_try, self._overflows = 0, True, False
        self._notes: List[str] = []
        is_compiled = getattr(model, "optimizer", None) is not None
        self._has_own_step = is_compiled and has_own(model, "train_step")
        build(model, inputs.triple(batch)[0], self._step_on(batch))
        if self._has_own_step:
            try:
                with model_state.in_float32(keras, keras_versions.layers_of(model)):
                    Step(model, self._step_on(batch), Watcher())
            except Exception as error:  # such as a step that needs targets
                self._has_own_step = False
                self._notes.append(_NO_STEP.format(error=error))

    def _step_on(self, batch: Any) -> Callable[[Step], Any]:
        """Returns what computes what `fit` computes of a batch, as far as layers go."""
        if self._has_own_step:
            return of_fit(self._keras, self._model, None, batch)
        return lambda _: self._model(inputs.triple(batch)[0], training=True)

    def see(self, batch: Any) -> None:
        inputs.check_finite(inputs.triple(batch)[0])
        self._batches += 1
        first = _Float32Pass(self._rows)
        with model_state.in_float32(self._keras, keras_versions.layers_of(self._model)):
            Step(self._model, self._step_on(batch), first)
        outside = [call for call in first.calls if call in first.overflowing]
        self._overflows = self._overflows or bool(outside)
        with model_state.in_float16(self._keras, self._model) as can_try:
            # Keras 2 cannot try a model that is all in float32.
            self._can_try = can_try and self._can_try
            if self._can_try:
                self._try(batch, first, outside)
            elif all_in_float32(self._model):
                for call in outside:
                    self._advice.add(Fault(call))

    def _try(self, batch: Any, first: _Float32Pass, outside: List[Call]) -> None:
        attempt_of = functools.partial(_Float16Pass, first)

        def overflows_in(attempt: _Float16Pass) -> List[Fault]:
            Step(self._model, self._step_on(batch), attempt)
            return attempt.overflows

        faults: List[Fault] = []
        try:
            faults = overflows_in(attempt_of(Advice(self._keras)))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            # Such as an operation that has no float16 kernel.
            self._can_try = False
            warn(
                "The model could not run in float16, so overflows inside its layers "
                f"are unknown: {error!s:.300}"
            )
        paths = {call.path for call in outside}
        for fault in faults:
            if fault.call and not fault.is_cast and fault.call.path not in paths:
                self._inside.add(fault.call.owner.path)
        # So the attempts need not find one layer after the other.
        for call in outside:
            owner, is_cast = call.owner, first.overflowing[call]
            is_known = is_cast or not owner.is_written_around_layers
            takes_dtype = owner.is_layer and owner.parent is not None
            if is_known and takes_dtype and call.dtype in SIXTEEN_BITS:
                self._advice.add(Fault(call, None, is_cast))
        if self._can_try and (faults or self._advice):
            self._advice.complete(attempt_of, overflows_in)

    def result(self) -> ForwardRanges:
        if not self._rows:
            raise TypeError(
                "`model` must have layers that return float tensors, got "
                f"{self._model.name!r}, which has none."
            )
        places = [path for path, _ in self._rows]  # from the input to the output

        advice = self._advice

        def place_of(path: str) -> int:
            if advice.layers[path].parent is None:
                return -1  # the model itself, which casts its data
            is_inner = [f"{place}/".startswith(f"{path}/") for place in places]
            return [*is_inner, True].index(True)

        needed = sorted(advice.layers, key=place_of)
        advice.layers = {path: advice.layers[path] for path in needed}
        layers = [call.layer for call in advice.layers.values()]
        inside = [path for path in needed if path in self._inside]
        notes = [_COVERED if self._overflows else _ALL_FIT]
        if advice:
            notes = [f"{_NEEDED} {advice}" if layers else str(advice)]
            notes += [_INSIDE.format(", ".join(inside)), _MANY] if inside else [_MANY]
        in_float32: List[Any] = []
        for layer in layers:
            # Layers that this one makes have its dtype, those that it is given do not.
            is_given = hasattr(layer, "layers") or hasattr(layer, "layer")
            in_float32 += [layer] if is_given else keras_versions.layers_of(layer)
        if not all_in_float32(self._model):
            of_model = keras_versions.layers_of(self._model)
            in_float32 += [each for each in of_model if each.compute_dtype == "float32"]
        rows = self._rows.values()
        ranges = ForwardRanges(
            names=tuple(name for _, name in self._rows),
            counts=np.stack([row.counts[1.0] for row in rows]),
            largest=np.array([row.largest for row in rows], np.float32),
            batches=self._batches,
            need_float32=tuple(needed),
            inside=tuple(inside),
            classes=tuple(type(layer).__name__ for layer in layers),
            is_inside_known=self._can_try,
            need_cast=tuple(advice.casts),
        )
        vars(ranges).update(
            _is_keras3=keras_versions.is_keras3(self._keras),
            # A layer that builds nothing has no path. In Keras 2 no layer has one.
            _paths=tuple(
                getattr(layer, "path", None) or layer.name for layer in in_float32
            ),
            _remarks=(*notes, *self._notes),
        )
        return ranges


class _Float32Pass(Watcher):
    """Adds to rows the outputs of each call, and inputs that were not counted yet."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._rows = rows
        #: The calls whose inputs or outputs overflow in float16, and whether those are
        #: inputs, which the call casts.
        self.overflowing: Dict[Call, bool] = {}
        #: How often each layer was called, and the name of each call.
        self._numbers: Dict[Tuple[str, int], int] = {}
        self._names: Dict[Call, str] = {}
        #: Whether a tensor overflows. It is kept, since Python reuses the ids.
        self._seen: Dict[int, Tuple[Any, bool]] = {}

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        name = call.path
        if not any(above.is_recurrent for above in call.around):  # a loop is one call
            key = (name, id(call.layer))
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            name += f" (call {number})" if number > 1 else ""
        self._names[call] = name
        self._see(call, floats_in((args, kwargs)), is_input=True)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        outputs = super().end(call, outputs)
        self._see(call, call.outputs, is_input=False)
        return outputs

    def _see(self, call: Call, tensors: List[Any], is_input: bool) -> None:
        if call.parent is None:
            return  # the model's inputs and outputs are those of its layers
        row = call.path, self._names[call] + (", inputs" if is_input else "")
        for tensor in tensors:
            is_new = id(tensor) not in self._seen
            if is_new:
                self._seen[id(tensor)] = (tensor, _overflows(tensor.numpy()))
                self._rows.setdefault(row, Row()).add(tensor)
            # A layer that only passes the tensor on is not at fault.
            overflows = self._seen[id(tensor)][1]
            is_cast = is_input and keras_versions.casts_inputs(call.layer)
            if overflows and ((is_new and not is_input) or is_cast):
                self.overflowing.setdefault(call, is_input)


def _overflows(values: Any) -> bool:
    """Whether values overflow in float16. The values of a mask do not count.

    Nor do inf and NaN, which float32 does not hold either.
    """
    values = values.astype(np.float32).ravel()
    bad = values[(np.abs(values) >= exponents.INFINITE_FROM) & np.isfinite(values)]
    if not len(bad):
        return False
    # A mask has one negative number, -1e9 or -inf, for all hidden places, and others.
    low, high = bad.min(), bad.max()
    is_one = low == high or low > high * 1.001
    return not (high < 0 and is_one and len(bad) < len(values))


class _Float16Pass(Attempt):
    """Runs each layer in float16 on its inputs from the float32 pass.

    It replaces each layer's outputs by those of the first pass, clipped to the dtype's
    range, so that a layer that overflows does not spoil the next ones.
    """

    def __init__(self, first: _Float32Pass, advice: Advice) -> None:
        super().__init__(advice)
        self._left = list(first.calls)
        #: The calls whose outputs are right, whatever overflowed within, and those
        #: from which something bad has reached a layer, whose outputs are replaced.
        self._right: Set[Call] = set()
        self._spread: Set[Optional[Call]] = set()

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        args, kwargs = super().begin(call, args, kwargs)
        keys = [key for each in floats_in((args, kwargs)) for key in self.origins(each)]
        self._spread.update(self.faults[key].call for key in keys)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        before = self._left.pop(0) if self._left else None
        floats = floats_in(outputs)
        if before is None or before.layer is not call.layer:
            self._left = []  # it calls layers in another order: replace no more
        elif len(before.outputs) == len(floats):
            has_fault = any(fault.call is call for fault in self.faults.values())
            is_hidden = has_fault and call not in self._spread
            if is_hidden and all(map(are_alike, floats, before.outputs)):
                self._right.add(call)
            others = iter(before.outputs)
            # What a step of the user's does with outputs runs in float32, as before.
            is_outermost = call.parent in (None, self.root)

            def replaced(output: Any) -> Any:
                if not is_float(output):
                    return output
                other = next(others)
                other = other if is_outermost else _cast_like(output, other)
                return copy_of(output, lambda grad: tf.cast(grad, output.dtype), other)

            outputs = tf.nest.map_structure(replaced, outputs)
        return super().end(call, outputs)

    @property
    def overflows(self) -> List[Fault]:
        # What a later operation hides, as the branch that a tf.where leaves out, is
        # none.
        return [each for each in super().overflows if each.call not in self._right]


def _cast_like(tensor: Any, other: Any) -> Any:
    """Returns another tensor in the dtype of this one, which it does not overflow."""
    if other.shape != tensor.shape:
        return tensor
    if tensor.dtype.name in SIXTEEN_BITS:
        other = tf.clip_by_value(other, -exponents.LARGEST, exponents.LARGEST)
        other = tf.where(tf.math.is_finite(other), other, tf.zeros_like(other))
    return tf.cast(other, tensor.dtype)
