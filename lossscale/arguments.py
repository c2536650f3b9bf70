"""Checks of constructor arguments: each returns a plain Python value, or raises.

The first argument of a check is the name of the argument that it checks, for the error.
Constructors run all checks before any variable exists.
"""

from __future__ import annotations

import numbers
import os
from typing import Any, Callable, Optional, Sequence, Tuple

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
#: A smaller positive float32 is subnormal, and processors may flush it to zero.
FLOAT32_MIN = float(np.finfo(np.float32).tiny)
INT64_MAX = int(np.iinfo(np.int64).max)
#: More steps than any run has. A counter that starts here never passes INT64_MAX.
MOST_STEPS = 2**62


def shown(value: Any) -> str:
    """Returns `value` as text for an error."""
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} that is too long to show"


def number(name: str, value: Any) -> Any:
    """Returns `value` as a Python number. Refuses bools and all that is no number."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # NumPy's timedelta64 is a subclass of its integers.
    refused = isinstance(value, (bool, np.bool_, np.timedelta64))
    if refused or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number, got {shown(value)} of type "
            f"{type(value).__name__}. Pass a Python or NumPy number."
        )
    return value.item() if isinstance(value, np.generic) else value


def loss_scale(name: str, value: Any) -> float:
    """Returns `value` as a float that is positive and in float32's normal range."""
    given = number(name, value)
    # This comes before float(), which fails for an integer above 2**1024.
    if not FLOAT32_MIN <= given <= FLOAT32_MAX:
        raise ValueError(
            f"`{name}` must be positive, finite and within float32's normal range, "
            f"{FLOAT32_MIN} to {FLOAT32_MAX}, got {shown(value)}. "
            "Powers of two such as 2.0**15 are exact."
        )
    return float(given)


def at_least_one(name: str, value: float) -> None:
    """Raises unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {shown(value)}.")


def factor(name: str, value: Any, above: float, below: Optional[float] = None) -> float:
    """Returns `value` as a float strictly between `above` and `below` in float32."""
    given = number(name, value)
    limit = FLOAT32_MAX if below is None else below
    # NaN fails both comparisons. The rule computes in float32, where 1.00000001 is 1
    # and would never move the loss scale.
    inside = above < given < limit and above < np.float32(given) < limit
    if not inside:
        bounds = f"greater than {above:g}" + (
            " and finite" if below is None else f" and less than {below:g}"
        )
        raise ValueError(f"`{name}` must be {bounds} in float32, got {shown(value)}.")
    return float(given)


def share(name: str, value: Any) -> float:
    """Returns `value` as a float from 0 to 1."""
    given = number(name, value)
    if not 0 <= given <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {shown(value)}.")
    return float(given)


def count(name: str, value: Any, least: int = 1, most: int = INT64_MAX) -> int:
    """Returns `value` as an int within these bounds. Accepts a float such as 2e3."""
    given = number(name, value)
    # The bounds come first: int() fails for NaN and infinity.
    if not (least <= given <= most and int(given) == given):
        bound = f"at most {most}" if given > most else f"at least {least}"
        raise ValueError(
            f"`{name}` must be a whole number of {bound}, got {shown(value)}."
        )
    return int(given)


def boolean(name: str, value: Any) -> bool:
    """Returns `value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")
    return bool(value)


def array(name: str, value: Any) -> Any:
    """Returns `value` as a NumPy array."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"`{name}` must be an array of one number per step, got {shown(value)}."
        ) from error


def path(name: str, value: Any) -> str:
    """Returns `value`, a path of a file, as a string."""
    try:
        decoded = os.fsdecode(value)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be the path of a file, got {shown(value)}."
        ) from error
    if not decoded or "\0" in decoded:
        raise ValueError(f"`{name}` must be the path of a file, got {value!r}.")
    return decoded


def text(name: str, value: Any, without: str = "") -> str:
    """Returns `value`, a string without any character of `without`."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {shown(value)}.")
    if set(without) & set(value):
        raise ValueError(f"`{name}` must not contain {without!r}, got {value!r}.")
    return value


def names(name: str, value: Any, allowed: Sequence[str]) -> Tuple[str, ...]:
    """Returns `value`, a sequence of any of the `allowed` strings, as a tuple."""
    listed = ", ".join(repr(word) for word in allowed)
    if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(
            f"`{name}` must be a sequence of any of {listed}, got {shown(value)}. "
            f"Write a tuple such as ({allowed[0]!r},)."
        )
    for word in value:
        if not isinstance(word, str) or word not in allowed:
            raise ValueError(
                f"`{name}` must hold only {listed}, got {shown(word)} in "
                f"{shown(value)}."
            )
    return tuple(word for word in allowed if word in value)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Returns `value`, which is one of the `allowed` strings."""
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")
    return value


def writable_path(name: str, value: Any) -> str:
    """Returns `value`, the path of a file in an existing folder, as a string."""
    found = path(name, value)
    if os.path.isdir(found) or found.endswith(("/", os.sep)):
        raise ValueError(
            f"`{name}` must be the name of a file, got the folder {found!r}. Write, "
            f"for example, {os.path.join(found, 'run.npz')!r}."
        )
    folder = os.path.dirname(found) or os.curdir
    if not os.path.isdir(folder):
        raise ValueError(
            f"`{name}` must be in a folder that exists, got {found!r}. Create {folder}."
        )
    return found


def optional(check: Callable[..., Any], name: str, value: Any, **kwargs: Any) -> Any:
    """Returns None if `value` is None, otherwise the result of `check`."""
    return None if value is None else check(name, value, **kwargs)


def ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises unless `low` is at most `high`."""
    if low > high:
        raise ValueError(
            f"`{high_name}` must be at least `{low_name}`, got "
            f"{high_name}={high!r} and {low_name}={low!r}. "
            f"Raise `{high_name}` or lower `{low_name}`."
        )
