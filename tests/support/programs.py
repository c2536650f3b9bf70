"""A small language of training loops: what a loop's statements are, and their listing.

A program is a tree of these nodes. Its listing is Python, which `program_run.py` runs
as it is printed. `program_meaning.py` says what must come out, without TensorFlow.

`a` and `b` are optimizers with their variables; every name `g0`, `g1`, ... is a list of
gradients; `factors` and `flags` are one batch's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple

OPTIMIZERS = "ab"
#: How the batches are gone through: a call of the step for each, or one call for all,
#: in which they are a loop of TensorFlow, or one of Python.
CALLS, LOOP, UNROLLED = "calls", "loop", "unrolled"


def _indented(lines):
    return ["    " + line for line in lines]


@dataclass(frozen=True)
class Flag:
    """A condition that comes with the batch."""

    number: int

    def __str__(self):
        return f"flags[{self.number}]"


@dataclass(frozen=True)
class Good:
    """Whether a list of gradients is finite: how batches are dropped."""

    source: str

    def __str__(self):
        return f"is_good({self.source})"


@dataclass(frozen=True)
class Scaled:
    """Gradients of a scaled loss.

    Attributes:
      name: Of the result.
      of: The optimizer whose variables they are of.
      by: The optimizer that scales the loss.
      loss: "linear", "square" or "product".
      slot: Which of the batch's numbers is the loss's factor.
      counter: The variable of the loop around it that is added to that, or None.
    """

    name: str
    of: int
    by: int
    loss: str
    slot: int
    counter: Optional[str] = None

    def lines(self):
        slot = f"{self.slot} + {self.counter}" if self.counter else self.slot
        by = "" if self.by == self.of else f", by={OPTIMIZERS[self.by]}"
        given = f'"{self.loss}", factors[{slot}]{by}'
        return [f"{self.name} = {OPTIMIZERS[self.of]}.scaled({given})"]


@dataclass(frozen=True)
class Unscaled:
    """What `get_unscaled_gradients` returns for one list."""

    name: str
    by: int
    source: str

    def lines(self):
        return [f"{self.name} = {OPTIMIZERS[self.by]}.unscaled({self.source})"]


@dataclass(frozen=True)
class ByHand:
    """A scaled list, divided by the loss scale without the optimizer."""

    name: str
    by: int
    source: str
    how: str

    def lines(self):
        scale = f"{OPTIMIZERS[self.by]}.optimizer.loss_scale"
        return [f"{self.name} = divided_{self.how}({self.source}, {scale})"]


@dataclass(frozen=True)
class Changed:
    """A list that is computed from one list, perhaps in a nested function."""

    name: str
    how: str
    source: str
    is_nested: bool = False

    def lines(self):
        how = f"nested({self.how})" if self.is_nested else self.how
        return [f"{self.name} = {how}({self.source})"]


@dataclass(frozen=True)
class Sum:
    """Two lists, added up."""

    name: str
    sources: Tuple[str, str]

    def lines(self):
        return [f"{self.name} = added({', '.join(self.sources)})"]


@dataclass(frozen=True)
class Joined:
    """Two lists, one behind the other."""

    name: str
    sources: Tuple[str, str]

    def lines(self):
        return [f"{self.name} = {' + '.join(self.sources)}"]


@dataclass(frozen=True)
class Taken:
    """A part of a list."""

    name: str
    source: str
    start: int
    stop: int

    def lines(self):
        return [f"{self.name} = {self.source}[{self.start}:{self.stop}]"]


@dataclass(frozen=True)
class Zeros:
    """A list of zeros, which come from nowhere."""

    name: str
    of: int

    def lines(self):
        return [f"{self.name} = {OPTIMIZERS[self.of]}.zeros()"]


@dataclass(frozen=True)
class Logged:
    """The sum of all numbers of a list, which the step returns."""

    name: str
    source: str

    def lines(self):
        return [f"{self.name} = total({self.source})"]


@dataclass(frozen=True)
class Applied:
    """A list is applied to an optimizer's variables, or to some of them."""

    by: int
    source: str
    start: Optional[int] = None
    stop: Optional[int] = None

    def lines(self):
        part = "" if self.start is None else f", {self.start}, {self.stop}"
        return [f"{OPTIMIZERS[self.by]}.apply({self.source}{part})"]


@dataclass(frozen=True)
class Branch:
    """A tensor `if`. Each side ends with a list, or with none.

    Attributes:
      name: Of the result. None: there is none.
      condition: A `Flag` or `Good`.
      sides: Two pairs of statements and the name of their result.
      is_direct: Whether it is a `tf.cond`, not AutoGraph's.
    """

    name: Optional[str]
    condition: Any
    sides: Tuple[Tuple[tuple, Optional[str]], Tuple[tuple, Optional[str]]]
    is_direct: bool

    def lines(self):
        return self._direct() if self.is_direct else self._by_autograph()

    def _direct(self):
        found, names = [], []
        for word, (block, result) in zip(("then", "other"), self.sides):
            names.append(f"{word}_{self.name or _first_name(block)}")
            inner = [*_lines(block), f"return {result or 0}"]
            found += [f"def {names[-1]}():", *_indented(inner)]
        call = f"tf.cond({self.condition}, {', '.join(names)})"
        return [*found, f"{self.name} = {call}" if self.name else call]

    def _by_autograph(self):
        found = []
        words = (f"if {self.condition}:", "else:")
        for word, (block, result) in zip(words, self.sides):
            inner = list(_lines(block))
            if self.name:
                inner.append(f"{self.name} = {result}")
            found += [word, *_indented(inner or ["pass"])]
        return found


@dataclass(frozen=True)
class Loop:
    """A loop over tensors that adds up a list.

    Attributes:
      name: Of the sum.
      of: The optimizer whose variables it is of.
      times: How often it runs.
      block: Its statements.
      result: What is added in each of its runs.
      is_direct: Whether it is a `tf.while_loop`, not AutoGraph's.
    """

    name: str
    of: int
    times: int
    block: tuple
    result: str
    is_direct: bool

    @property
    def counter(self):
        return f"i_{self.name}"

    def lines(self):
        name, zeros = self.name, f"{OPTIMIZERS[self.of]}.zeros()"
        inner, i = list(_lines(self.block)), self.counter
        total = f"added({name}, {self.result})"
        if not self.is_direct:
            head = [f"{name} = {zeros}", f"for {i} in tf.range({self.times}):"]
            return [*head, *_indented([*inner, f"{name} = {total}"])]
        body = [*inner, f"return {i} + 1, {total}"]
        ends = f"lambda {i}, _: {i} < {self.times}"
        loop = f"tf.while_loop({ends}, body_{name}, (0, {zeros}))"
        head = f"def body_{name}({i}, {name}):"
        return [head, *_indented(body), f"_, {name} = {loop}"]


@dataclass(frozen=True)
class Nested:
    """A nested `tf.function` that returns a list."""

    name: str
    block: tuple
    result: str

    def lines(self):
        inner = [*_lines(self.block), f"return {self.result}"]
        head = ["@tf.function", f"def make_{self.name}():"]
        return [*head, *_indented(inner), f"{self.name} = make_{self.name}()"]


@dataclass(frozen=True)
class Kept:
    """A loss scale: the arguments of a `DynamicLossScale`, or a fixed one."""

    initial: float
    period: Optional[int] = None
    multiplier: float = 2.0

    def __str__(self):
        if self.period is None:
            return f"FixedLossScale({self.initial})"
        return f"DynamicLossScale({self.initial}, {self.period}, {self.multiplier})"


@dataclass(frozen=True)
class Program:
    """A training loop, and the batches that it is given.

    Attributes:
      scales: A loss scale for each optimizer, or one for all.
      rates: Each optimizer's learning rate.
      sizes: The sizes of each optimizer's variables.
      block: The statements of a step.
      batches: Pairs of factors and flags.
      way: How the batches are gone through.
    """

    scales: Tuple[Kept, ...]
    rates: Tuple[float, ...]
    sizes: Tuple[Tuple[int, ...], ...]
    block: tuple
    batches: Tuple[Tuple[Tuple[float, ...], Tuple[bool, ...]], ...]
    way: str

    def __repr__(self):
        head = [f"# {self.way}; one loss scale for all: {self.is_shared}"]
        for i, (rate, sizes) in enumerate(zip(self.rates, self.sizes)):
            scale = self.scales[0 if self.is_shared else i]
            head.append(f"# {OPTIMIZERS[i]}: SGD({rate}), {scale}, sizes {sizes}")
        head += [f"# factors {f}, flags {b}" for f, b in self.batches]
        return "\n".join(["", *head, self.listing()])

    @property
    def is_shared(self):
        return len(self.scales) < len(self.rates)

    def listing(self):
        """Returns the program as Python: functions `step` and `run`."""
        logs = [each.name for each in self.block if isinstance(each, Logged)]
        inner = [*_lines(self.block), f"return [{', '.join(logs)}]"]
        numbers = "tf.range" if self.way == LOOP else "range"
        found = ["def step(factors, flags):", *_indented(inner)]
        if self.way != CALLS:
            found += ["", "def run(factors, flags):"]
            found += [f"    for n in {numbers}({len(self.batches)}):"]
            found += ["        step(factors[n], flags[n])"]
        return "\n".join(found) + "\n"


def _lines(block):
    return [line for statement in block for line in statement.lines()]


def _first_name(block):
    """Returns what tells a branch without a result from others."""
    names = [getattr(each, "name", None) or each.source for each in block]
    return names[0] if names else "nothing"


def names_in(block):
    """Returns the names of all lists that statements use."""
    found = set()
    for each in block:
        found |= {getattr(each, "source", None), getattr(each, "result", None)}
        found |= set(getattr(each, "sources", ()))
        found |= names_in(getattr(each, "block", ()))
        for inner, result in getattr(each, "sides", ()):
            found |= names_in(inner) | {result}
    return found - {None}
