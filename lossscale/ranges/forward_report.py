"""ForwardRanges: what float16 would do to layers' outputs, and what to write."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Tuple

from lossscale import arguments
from lossscale.ranges import exponents, picture
from lossscale.ranges.figures import Figures
from lossscale.ranges.table import row_lines
from lossscale.runtime import kerases

_ALL_FIT = "None of them overflows in float16: no layer needs float32."
_NEEDED = (
    "float16 does not hold what these layers are given, compute or return. Write\n"
)
_INSIDE = "Sums, squares or products inside overflow in float16: {}."
_MANY = """\
If they are most of the model, look for a learning rate that is too high, or data that \
are not normalized."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ForwardRanges(Figures):
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

    #: A forward pass scales nothing.
    loss_scale = 1.0

    @property
    def histogram(self) -> Tuple[Any, Any]:
        """The histogram of the magnitudes: `(exponents, counts)`.

        Two `int64` arrays: the exponents from -127, which stands for float32's
        subnormals, to 127, and the counts, of shape `[rows, 255]`.
        """
        return exponents.by_exponent(self.counts)

    @property
    def policy_map(self) -> Any:
        """A `DTypePolicyMap`: float32 for `need_float32`, mixed_float16 for the rest.

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

    def __str__(self) -> str:
        batches = f"{self.batches} {'batches' if self.batches > 1 else 'batch'}"
        head = (
            f"Outputs of layers, {batches} in float32, and what float16 makes of them:"
        )
        return "\n".join([head, "", *row_lines(self), "", *self._notes()])

    def __repr__(self) -> str:
        return (
            f"ForwardRanges(rows={len(self.names)}, batches={self.batches}, "
            f"need_float32={self.need_float32})"
        )

    def plot(self, ax: Any = None, *, rows: int = 24) -> Any:
        """Draws the exponents of layers' outputs, over the range of float16.

        It draws a histogram of all values, and one for each row, from input to output.
        If there are too many, it draws the rows that overflow or underflow most.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.
          rows: The most rows to draw.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        rows = arguments.count("rows", rows)
        return picture.draw(self, ax, rows, "outputs of layers")

    def _notes(self) -> List[str]:
        if not self.need_float32:
            return [_ALL_FIT]
        lines = map(_line, self.need_float32, self.classes)
        inside = [_INSIDE.format(", ".join(self.inside))] if self.inside else []
        return [_NEEDED, *lines, "", *inside, _MANY]

    @property
    def _counts(self) -> Tuple[Any, int]:
        return self.counts, 0  # a forward pass scales nothing

    @property
    def _all(self) -> ForwardRanges:
        return dataclasses.replace(
            self, counts=self.counts.sum(0)[None], largest=self.largest.max()[None]
        )


def _line(path: str, kind: str) -> str:
    name = path.rsplit("/", maxsplit=1)[-1]
    if kind == "Sequential":  # its constructor takes no dtype
        return (
            f"    Sequential([keras.Input(...), ...], name={name!r})  # made in float32"
        )
    return f'    {kind}(..., dtype="float32", name={name!r})'
