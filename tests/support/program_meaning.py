"""What a program of programs.py must come to: plain Python, without TensorFlow.

Each gradient carries what is true of it: the loss scale that it is multiplied with, and
the unscalings that it was computed from. So it is divided if it is scaled, and a step
is skipped if a gradient is not finite or was not when it was unscaled. Every number is
exact in float32; a program whose numbers are not is `Inexact`.

Where the documents leave the meaning open, or say that an overflow is not seen, a
program is `Open`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, List

import numpy as np
from program_run import LIMIT, START
from programs import (
    CALLS,
    LOOP,
    UNROLLED,
    Applied,
    Branch,
    ByHand,
    Changed,
    Flag,
    Joined,
    Logged,
    Loop,
    Nested,
    Scaled,
    Sum,
    Taken,
    Unscaled,
    Zeros,
    names_in,
)

LARGEST = float(np.finfo(np.float32).max)
#: Finite numbers above it come too near to the end of float32 to be sure of.
LARGE = 2.0**60
ANY = "any"


class Inexact(Exception):  # noqa: N818 - no error of anybody
    """A number that float32 does not hold."""


class Open(Exception):  # noqa: N818
    """A program whose meaning the documents leave open."""


class _Function(str):
    """The scope of a nested `tf.function`."""


def _is_function(part):
    return isinstance(part, _Function)


@dataclass(eq=False)
class Check:
    """What was seen when a list was unscaled.

    Attributes:
      each: Whether each gradient was finite.
      scope: Where: the blocks around it.
    """

    each: List[bool]
    scope: tuple

    @property
    def is_finite(self):
        return all(self.each)


@dataclass(eq=False)
class Grad:
    """One gradient, and what is true of it.

    Attributes:
      values: Its numbers.
      scale: What it is multiplied with. 1: it is unscaled. ANY: it is zero anyway.
      roots: Pairs of a `Check` and a position: what it was computed from.
      rumours: Those of the sides of branches that were not taken.
      scopes: Where its losses were scaled: the blocks around each.
      is_by_hand: Whether it was divided by hand.
      is_returned: Whether a function, a branch or a loop has returned it.
    """

    values: Any
    scale: Any
    roots: frozenset = frozenset()
    rumours: frozenset = frozenset()
    scopes: frozenset = frozenset()
    is_by_hand: bool = False
    is_returned: bool = False

    def changed(self, values):
        return dataclasses.replace(self, values=values)

    @property
    def is_finite(self):
        return bool(np.isfinite(self.values).all())


def exact(values):
    """Returns values that float32 holds, or raises."""
    finite = values[np.isfinite(values)]
    if (np.abs(finite) > LARGE).any() or (np.float32(finite) != finite).any():
        raise Inexact
    return values


def plus(one, other):
    with np.errstate(invalid="ignore"):
        found = one + other
        at = np.isfinite(found)
        if ((found - one)[at] != other[at]).any():
            raise Inexact
        if ((found - other)[at] != one[at]).any():
            raise Inexact
    return exact(found)


def total(values):
    """Returns the sum of numbers if it is exact in every order."""
    numbers = [float(x) for each in values for x in each]
    if not all(map(math.isfinite, numbers)):
        return math.nan
    terms = [Fraction(x) for x in numbers]
    finest = max(term.denominator for term in terms)
    if sum(map(abs, terms)) * finest >= 2**24:
        raise Inexact
    return float(sum(terms))


def times(values, number):
    with np.errstate(invalid="ignore", over="ignore"):
        return values * number


def _by_norm(grads):
    squares = total([times(g.values, g.values) for g in grads])
    if not math.isfinite(squares):
        return [np.full_like(g.values, np.nan) for g in grads]
    norm = math.sqrt(squares)
    if norm <= LIMIT:
        return [g.values for g in grads]
    if math.frexp(norm)[0] != 0.5:
        raise Inexact
    return [g.values * (LIMIT / norm) for g in grads]


def _halved_if_large(grads):
    largest = np.max([np.abs(g.values).max() for g in grads])
    factor = 0.5 if largest > LIMIT else 1.0
    return [times(g.values, factor) for g in grads]


def _cleaned(grads):
    return [np.where(np.isfinite(g.values), g.values, 0.0) for g in grads]


def _over_largest(grads):
    found = []
    for grad in grads:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            squares = grad.values * grad.values
            found.append(exact(squares) / np.abs(grad.values).max())
    return found


CHANGES = {
    "over_largest": _over_largest,
    "by_norm": _by_norm,
    # A NaN may become anything, and is skipped: its check knows.
    "by_value": lambda grads: [np.clip(g.values, -LIMIT, LIMIT) for g in grads],
    "cleaned": _cleaned,
    "halved": lambda grads: [g.values * 0.5 for g in grads],
    "halved_if_large": _halved_if_large,
    "copied": lambda grads: [g.values for g in grads],
}
HIDING = {"by_value", "cleaned"}
#: What computes each gradient from all of the list.
MIXING = {"by_norm", "halved_if_large"}


class Scale:
    """A loss scale, which its optimizers adjust together once per step."""

    def __init__(self, kept):
        self.kept = kept
        self.state = (kept.initial, 0, 0)
        self.applied, self.eagerly_applied = set(), set()
        self.before, self.was_good = self.state, True
        self.has_moved = False

    def begin(self):
        self.applied, self.has_moved = set(), False

    def adjust(self, member, is_good):
        """Adjusts it, and returns whether eager mode knows the step that this is of."""
        is_new = not self.applied or member in self.applied
        seems_new = not self.eagerly_applied or member in self.eagerly_applied
        if is_new:
            self.before, self.was_good, self.applied = self.state, True, set()
            self.eagerly_applied = set()
        self.applied.add(member)
        self.eagerly_applied.add(member)
        self.was_good = self.was_good and is_good
        old, self.state = self.state, self._moved(*self.before)
        self.has_moved |= self.state[0] != old[0]
        return is_new == seems_new

    def _moved(self, scale, good, skipped):
        if not self.was_good:
            return max(scale / self.kept.multiplier, 1.0), 0, skipped + 1
        if good + 1 < self.kept.period:
            return scale, good + 1, skipped
        grown = scale * self.kept.multiplier
        return (grown if grown <= LARGEST else scale), 0, skipped


@dataclass
class Optimizer:
    """An optimizer and its weights."""

    rate: float
    weights: List[Any]
    scale: Scale
    steps: int = 0
    dropped: Any = dataclasses.field(default_factory=set)


class Meaning:
    """A run of a program."""

    def __init__(self, program, mode):
        self.program, self.is_eager = program, mode == "eager"
        self.tells_steps = not self.is_eager and program.way != UNROLLED
        scales = [Scale(kept) for kept in program.scales]
        self.optimizers = [
            Optimizer(
                rate,
                [np.full([size], START) for size in sizes],
                scales[0 if program.is_shared else i],
            )
            for i, (rate, sizes) in enumerate(zip(program.rates, program.sizes))
        ]
        self.logs = []

    def run(self):
        """Returns the states and the logs that must come out, as `program_run` does."""
        for batch in self.program.batches:
            self.batch, self.names, self.scope = batch, {}, ()
            self.counters, self.logged = {}, []
            if self.program.way != UNROLLED:
                self._begin()
            self._block(self.program.block)
            self.logs.append(self.logged)
        logs = self.logs if self.program.way == CALLS else [[]]
        return [self._state(each) for each in self.optimizers], logs

    def _begin(self):
        for each in self.optimizers:
            each.scale.begin()

    def _state(self, optimizer):
        kept = optimizer.scale.kept
        numbers = () if kept.period is None else optimizer.scale.state
        return [w.tolist() for w in optimizer.weights], numbers, optimizer.steps

    def _block(self, block):
        for each in block:
            getattr(self, "_" + type(each).__name__.lower())(each)

    # The statements.

    def _scaled(self, node: Scaled):
        by, of = self.optimizers[node.by], self.optimizers[node.of]
        slot = node.slot + self.counters.get(node.counter, 0)
        factor, scale = self.batch[0][slot], by.scale.state[0]
        found = []
        for each in of.weights:
            slope = self._slope(node, each)
            values = _slope_times(slope, factor, scale)
            found.append(Grad(values, scale, scopes=frozenset([self.scope])))
        self.names[node.name] = found

    def _slope(self, node, weights):
        if node.loss == "square":
            return weights
        other = self.optimizers[len(self.optimizers) - 1 - node.of]
        return np.full_like(
            weights, other.weights[0][0] if node.loss == "product" else 1.0
        )

    def _unscaled(self, node: Unscaled):
        by, grads = self.optimizers[node.by], self.names[node.source]
        self._divide(by, grads)
        each = [grad.is_finite for grad in grads]
        check = Check(each, self.scope)
        if not check.is_finite:
            by.dropped.add(check)
        is_shown = self._is_within() and not all(each)
        self.names[node.name] = [
            Grad(
                times(_unscaled(grad, grad.scale), np.nan if is_shown else 1.0),
                1.0,
                frozenset([(check, i)]) | grad.roots,
                grad.rumours,
            )
            for i, grad in enumerate(grads)
        ]

    def _is_within(self):
        """Tells whether this is part of a graph that is part of another one."""
        if self.is_eager:
            return len([part for part in self.scope if _is_function(part)]) > 1
        return bool(self.scope) or self.program.way == LOOP

    def _byhand(self, node: ByHand):
        by, grads = self.optimizers[node.by], self.names[node.source]
        now = by.scale.state[0]
        if any(grad.is_returned for grad in grads):
            raise Open("divided by hand after it was returned")
        self.names[node.name] = [
            Grad(_unscaled(g, now), 1.0, g.roots, g.rumours, is_by_hand=True)
            for g in grads
        ]

    def _divide(self, by, grads):
        """Notes that scaled gradients are divided here."""
        scopes = frozenset().union(*(grad.scopes for grad in grads))
        ended = [scope for scope in scopes if not self._sees(scope)]
        functions = [part for scope in ended for part in scope if _is_function(part)]
        if functions and not self.is_eager and by.scale.has_moved:
            # A trace is used again: a warning says that nobody knows.
            raise Open("scaled in a function that has ended, and the scale has moved")

    def _sees(self, scope):
        if self.is_eager:  # loops and branches are Python's
            scope = tuple(part for part in scope if _is_function(part))
            own = tuple(part for part in self.scope if _is_function(part))
            return own[: len(scope)] == scope
        return self.scope[: len(scope)] == scope

    def _changed(self, node: Changed):
        grads = self.names[node.source]
        values = [exact(each) for each in CHANGES[node.how](grads)]
        found = [grad.changed(new) for grad, new in zip(grads, values)]
        if node.is_nested:
            found = _returned(found)
        if node.how in MIXING:
            _one_scale(grads)
            found = [_merged(g.values, g.scale, grads) for g in found]
        if node.how in (*HIDING, *MIXING) and _one_scale(grads) != 1.0:
            raise Open("scaled gradients that are clipped")
        self.names[node.name] = found

    def _sum(self, node: Sum):
        pairs = zip(*(self.names[source] for source in node.sources))
        self.names[node.name] = [_sum(*pair) for pair in pairs]

    def _joined(self, node: Joined):
        one, other = node.sources
        self.names[node.name] = self.names[one] + self.names[other]

    def _taken(self, node: Taken):
        self.names[node.name] = self.names[node.source][node.start : node.stop]

    def _zeros(self, node: Zeros):
        weights = self.optimizers[node.of].weights
        self.names[node.name] = [Grad(np.zeros_like(w), ANY) for w in weights]

    def _logged(self, node: Logged):
        self.logged.append(total([grad.values for grad in self.names[node.source]]))

    def _is_true(self, condition):
        if isinstance(condition, Flag):
            return self.batch[1][condition.number]
        return all(grad.is_finite for grad in self.names[condition.source])

    def _branch(self, node: Branch):
        is_first = self._is_true(node.condition)
        (block, result), (others, other) = node.sides[:: 1 if is_first else -1]
        outside, scope = dict(self.names), self.scope
        self.scope = (*scope, node.name or id(node))
        self._block(block)
        found = None if node.name is None else self.names[result]
        if found is not None and not self.is_eager:
            found = _returned(found)
        self.names, self.scope = outside, scope
        if found is not None:
            used = names_in(others) | {other}
            rumours = frozenset().union(
                *(g.roots | g.rumours for name in used for g in outside.get(name, ()))
            )
            self.names[node.name] = found if self.is_eager else _heard(found, rumours)

    def _loop(self, node: Loop):
        outside, scope = dict(self.names), self.scope
        weights = self.optimizers[node.of].weights
        found = [Grad(np.zeros_like(w), ANY) for w in weights]
        for i in range(node.times):
            self.counters[node.counter] = i
            self.scope = (*scope, (node.name, i))
            self._block(node.block)
            found = [_sum(*pair) for pair in zip(found, self.names[node.result])]
            self.names = dict(outside)
        if not self.is_eager:
            found = _returned(found)
        self.names[node.name], self.scope = found, scope

    def _nested(self, node: Nested):
        outside, scope = dict(self.names), self.scope
        self.scope = (*scope, _Function(node.name))
        self._block(node.block)
        found = _returned(self.names[node.result])
        self.names, self.scope = {**outside, node.name: found}, scope

    # How a step ends.

    def _applied(self, node: Applied):
        by, grads = self.optimizers[node.by], self.names[node.source]
        self._divide(by, grads)
        is_finite = all(grad.is_finite for grad in grads)
        roots = frozenset().union(*(grad.roots for grad in grads))
        were_finite = all(check.each[i] for check, i in roots)
        checks = {check for check, _ in roots}
        if is_finite and were_finite != all(check.is_finite for check in checks):
            raise Open("a part of a list of which another part was not finite")
        if not self._is_seen(grads, checks, were_finite) and is_finite:
            raise Open("an overflow that nobody sees")
        if by.dropped - checks and is_finite and were_finite:
            raise Open("an overflow that was unscaled, and applied by nobody")
        by.dropped = set()
        self._end(node, by, grads, is_finite and were_finite)

    def _end(self, node, by, grads, is_good):
        if by.scale.kept.period is None:
            if not is_good:
                raise Open("a fixed loss scale looks at nothing")
        elif not by.scale.adjust(node.by, is_good) and not self.tells_steps:
            raise Open("it is not known where a step ends")
        if is_good:
            by.steps += 1
            weights = by.weights[node.start : node.stop]
            for i, (old, grad) in enumerate(zip(weights, grads), node.start or 0):
                scale = 1.0 if grad.scale == ANY else grad.scale
                change = -by.rate * grad.values / scale
                by.weights[i] = plus(old, exact(change))

    def _is_seen(self, grads, checks, were_finite):
        """Tells whether it is known what was not finite when it was unscaled."""
        for grad in grads:
            for check, _ in grad.rumours:
                is_bad = not check.is_finite and were_finite
                if is_bad and self._sees(check.scope):
                    return False
        seen = {check for check in checks if self._sees(check.scope)}
        return were_finite == all(check.is_finite for check in seen)


def _unscaled(grad, scale):
    """Returns the values of a gradient, divided by a loss scale."""
    return grad.values / (1.0 if grad.scale == ANY else scale)


def _slope_times(slope, factor, scale):
    """Returns `slope * factor * scale`, as float32 has it in every order."""
    found = times(slope, factor * scale)
    if math.isfinite(factor) and abs(factor * scale) > LARGE:
        if (np.abs(found) < 2.0**130).any() or (np.abs(slope) < 1).any():
            raise Inexact
        return np.copysign(np.inf, found)
    exact(times(slope, factor))
    return exact(found)


def _one_scale(grads):
    """Returns by what gradients are multiplied that are computed together."""
    scales = {grad.scale for grad in grads} - {ANY}
    if len(scales) > 1:
        raise Open("gradients of different loss scales")
    return scales.pop() if scales else ANY


def _sum(one, other):
    scale = _one_scale([one, other])
    return _merged(plus(one.values, other.values), scale, [one, other])


def _merged(values, scale, grads):
    """Returns a gradient that is computed from several."""
    names = "roots", "rumours", "scopes"
    every = [frozenset().union(*(getattr(g, name) for g in grads)) for name in names]
    names = "is_by_hand", "is_returned"
    flags = [any(getattr(g, name) for g in grads) for name in names]
    return Grad(values, scale, *every, *flags)


def _returned(grads):
    """Returns what a function, a branch or a loop returns of gradients."""
    if any(grad.is_by_hand for grad in grads):
        raise Open("divided by hand, and returned")
    return [dataclasses.replace(grad, is_returned=True) for grad in grads]


def _heard(grads, rumours):
    """Returns what a branch returns in a graph: new tensors, of either side."""
    return [
        dataclasses.replace(g, rumours=g.rumours | (rumours - g.roots)) for g in grads
    ]


def meaning(program, mode):
    """Returns what must come out.

    Raises:
      Inexact: float32 does not hold the numbers.
      Open: The documents do not say.
    """
    return Meaning(program, mode).run()
