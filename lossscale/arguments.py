"""Checks of arguments: each returns a plain Python value, or raises.

The first argument of a check is the name of the argument that it checks, for the error.
Constructors run all checks before any variable exists. `Declared` runs those of a whole
constructor.
"""

from __future__ import annotations

import difflib
import numbers
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, Tuple

import numpy as np

ArgumentCheck = Callable[..., Any]

FLOAT32_MAX = float(np.finfo(np.float32).max)
#: A smaller positive float32 is subnormal, and processors may flush it to zero.
FLOAT32_MIN = float(np.finfo(np.float32).tiny)
INT64_MAX = int(np.iinfo(np.int64).max)
#: More steps than any run has. A counter that starts here never passes INT64_MAX.
MOST_STEPS = 2**62


class Declared:
    """The arguments of a constructor: checks them, keeps them, and writes the config.

    It has the check of each argument, in the order of the config. The config holds
    those that are `newer` only if they are not None, so that older versions of this
    package can read it.

    ```
    _ARGUMENTS = Declared(period=count, ceiling=or_none(loss_scale))

    def __init__(self, period: int = 2000, ceiling: Optional[float] = None) -> None:
        _ARGUMENTS.keep(self, locals())  # first of all
    ```
    """

    def __init__(self, *newer: str, **checks: ArgumentCheck) -> None:
        self._newer = newer
        self.checks = checks

    def keep(self, owner: object, values: Mapping[str, Any]) -> None:
        """Checks the arguments in `values`, and makes each an attribute of `owner`."""
        for name, check in self.checks.items():
            setattr(owner, name, check(name, values[name]))

    def config(self, owner: object) -> Dict[str, Any]:
        """Returns the kept arguments of `owner`, as JSON can hold them."""
        kept = {name: getattr(owner, name) for name in self.checks}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in kept.items()
            if value is not None or name not in self._newer
        }


def or_none(check: ArgumentCheck, **kwargs: Any) -> ArgumentCheck:
    """Returns a check that also takes None, and passes `kwargs` to `check`."""
    return lambda name, value: None if value is None else check(name, value, **kwargs)


def shown(value: Any) -> str:
    """Returns `value` as text for an error.

    An object whose `repr` is only an address, or a list of all its settings, is named
    by its class, so that the reader finds the rest of the sentence.
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} that is too long to show"
    is_plain = type(value).__module__ in ("builtins", "numpy")
    if (
        is_plain
        or isinstance(value, numbers.Number)
        or not (" object at 0x" in text or len(text) > 80)
    ):
        return text
    return f"an object of class {type(value).__name__}"


def typed(value: Any) -> str:
    """Returns `value` as text for an error, and its type, unless the text names it."""
    text, kind = shown(value), type(value).__name__
    return text if text.endswith(f" of class {kind}") else f"{text} of type {kind}"


def did_you_mean(value: Any, allowed: Iterable[str]) -> str:
    """Returns a question that ends an error: the allowed name nearest to `value`.

    Empty if none is near.
    """
    nearest = difflib.get_close_matches(value, allowed, 1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def number(name: str, value: Any) -> Any:
    """Returns `value` as a Python number. Refuses bools and all that is no number."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # NumPy's timedelta64 is a subclass of its integers.
    refused = isinstance(value, (bool, np.timedelta64))
    if refused or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number, got {typed(value)}. Pass a Python or NumPy "
            "number."
        )
    return value.item() if isinstance(value, np.generic) else value


def loss_scale(name: str, value: Any, least: float = FLOAT32_MIN) -> float:
    """Returns `value` as a float from `least` on, in float32's normal range."""
    checked = number(name, value)
    # This comes before float(), which fails for an integer above 2**1024.
    if not FLOAT32_MIN <= checked <= FLOAT32_MAX:
        raise ValueError(
            f"`{name}` must be positive and within float32's normal range, "
            f"{FLOAT32_MIN:.3g} to {FLOAT32_MAX:.3g}, got {shown(value)}. Write a "
            "power of two, such as 2.0**15, which is exact."
        )
    if checked < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {shown(value)}.")
    return float(checked)


def factor(name: str, value: Any, above: float, below: Optional[float] = None) -> float:
    """Returns `value` as a float strictly between `above` and `below` in float32."""
    checked = number(name, value)
    limit = FLOAT32_MAX if below is None else below
    # NaN fails both comparisons. The rule computes in float32, where 1.00000001 is 1
    # and would never move the loss scale.
    if not (above < checked < limit and above < np.float32(checked) < limit):
        bounds = f"greater than {above:g}" + (
            " and finite" if below is None else f" and less than {below:g}"
        )
        raise ValueError(f"`{name}` must be {bounds} in float32, got {shown(value)}.")
    return float(checked)


def share(name: str, value: Any) -> float:
    """Returns `value` as a float from 0 to 1."""
    checked = number(name, value)
    if not 0 <= checked <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {shown(value)}.")
    return float(checked)


def count(name: str, value: Any, least: int = 1, most: int = INT64_MAX) -> int:
    """Returns `value` as an int within these bounds. Accepts a float such as 2e3."""
    checked = number(name, value)
    # The bounds come first: int() fails for NaN and infinity.
    if not (least <= checked <= most and int(checked) == checked):
        bound = f"at most {most}" if checked > most else f"at least {least}"
        raise ValueError(
            f"`{name}` must be a whole number of {bound}, got {shown(value)}."
        )
    return int(checked)


def boolean(name: str, value: Any) -> bool:
    """Returns `value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")
    return bool(value)


def text(name: str, value: Any, without: str = "") -> str:
    """Returns `value`, a string without any character of `without`."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {shown(value)}.")
    if set(without) & set(value):
        raise ValueError(f"`{name}` must not contain {without!r}, got {value!r}.")
    return value


def one_of(allowed: Sequence[str]) -> str:
    """Returns names as text for an error."""
    return ", ".join(map(repr, allowed))


def names(name: str, value: Any, allowed: Sequence[str]) -> Tuple[str, ...]:
    """Returns `value`, a sequence of any of the `allowed` strings, as a tuple."""
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(
            f"`{name}` must be a sequence of any of {one_of(allowed)}, got "
            f"{shown(value)}. Write a tuple such as ({allowed[0]!r},)."
        )
    for word in value:
        if not isinstance(word, str) or word not in allowed:
            raise ValueError(
                f"`{name}` must hold only {one_of(allowed)}, got {shown(word)} in "
                f"{shown(value)}.{did_you_mean(str(word), allowed)}"
            )
    return tuple(word for word in allowed if word in value)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Returns `value`, which is one of the `allowed` strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"`{name}` must be one of {one_of(allowed)}, got {shown(value)}."
            f"{did_you_mean(str(value), allowed)}"
        )
    return value


def within_bounds(values: Mapping[str, Any]) -> None:
    """Raises unless the first loss scale is between the floor and the ceiling.

    A `max_loss_scale` of None is no bound.
    """
    names = ("min_loss_scale", "initial_loss_scale", "max_loss_scale")
    for low_name, high_name in zip(names, names[1:]):
        low, high = values[low_name], values[high_name]
        if high is not None and low > high:
            raise ValueError(
                f"`{high_name}` must be at least `{low_name}`, got "
                f"{high_name}={high!r} and {low_name}={low!r}. "
                f"Raise `{high_name}` or lower `{low_name}`."
            )
