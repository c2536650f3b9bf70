"""ForwardRanges: what float16 would do to what layers compute, and what to write."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Tuple

from lossscale import arguments
from lossscale.ranges import exponents, picture
from lossscale.ranges.figures import Figures
from lossscale.ranges.table import row_lines
from lossscale.runtime import kerases

_ALL_FIT = "float16 holds all of them: no layer needs float32."
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

    Shares are of the values that are finite and not zero in float32; NaN where there
    are none. All arrays have shape `[rows]`, in the order of `names`: from the input to
    the output.

    Attributes:
      names: The rows: each layer's path, once for each call; its inputs where no other
        layer returned them.
      counts: An `int64` array of shape `[rows, lossscale.ranges.exponents.BINS]`.
      largest: A `float32` array, the largest finite magnitude of each row.
      batches: How many batches were looked at.
      need_float32: The paths of layers that float16 does not suffice for: what they
        return, are given, or compute inside is beyond 65504.
      inside: Those of them that overflow in between, as in a variance or in attention's
        logits, so that float16 makes their outputs wrong.
      classes: The names of the classes of `need_float32`.
      is_inside_known: Whether layers could be tried in float16. They cannot in a model
        of Keras 2 that is all in float32: then `inside` is empty.
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

    #: Nothing is scaled on the way forward.
    loss_scale = 1.0

    @property
    def histogram(self) -> Tuple[Any, Any]:
        """The histogram of the magnitudes: exponents, and counts by row.

        An `int64` array of the exponents from -127, where float32's subnormals are, to
        127, and one of shape `[rows, 255]`.
        """
        return exponents.by_exponent(self.counts)

    @property
    def policy_map(self) -> Any:
        """A `keras.dtype_policies.DTypePolicyMap`: these in float32, others mixed.

        It has every layer of `need_float32`, and what a layer of Keras makes inside, by
        its `path`, or by its name while it has none. With it a functional or sequential
        model is made anew from its layers' configs:

        ```
        policies = ranges.policy_map
        keras.config.set_dtype_policy("float32")  # for what only holds other layers

        def anew(layer):
            policy = policies[layer.path or layer.name]
            return type(layer).from_config({**layer.get_config(), "dtype": policy})

        model = keras.models.clone_model(model, clone_function=anew, recursive=True)
        ```

        A `Sequential` within a model must begin with `keras.Input`: else it casts what
        it is given to the policy under which it was made first.

        Raises:
          NotImplementedError: The model's Keras has none: Keras 2, or Keras 3 before it
            had it. Write the lines that are printed.
        """
        keras = kerases.keras3() if self._is_keras3 else None
        policies: Any = getattr(keras, "dtype_policies", None)
        made = getattr(policies, "DTypePolicyMap", None)
        if made is None:
            raise NotImplementedError(
                "`policy_map` must have a Keras with DTypePolicyMap, got one without. "
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
        """Draws the exponents of layers, from input to output, over what float16 holds.

        One histogram for all, and one for each row: of those with the greatest shares
        overflowing or flushed to zero if there are many.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.
          rows: At most so many rows.

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
        return self.counts, 0  # nothing is scaled on the way forward

    @property
    def _all(self) -> ForwardRanges:
        return dataclasses.replace(
            self, counts=self.counts.sum(0)[None], largest=self.largest.max()[None]
        )


def _line(path: str, kind: str) -> str:
    name = path.rsplit("/", maxsplit=1)[-1]
    if kind == "Sequential":  # whose constructor takes no dtype
        return (
            f"    Sequential([keras.Input(...), ...], name={name!r})  # made in float32"
        )
    return f'    {kind}(..., dtype="float32", name={name!r})'
