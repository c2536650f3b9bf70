"""Programs of programs.py, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from programs import (
    CALLS,
    LOOP,
    UNROLLED,
    Applied,
    Branch,
    ByHand,
    Changed,
    Flag,
    Good,
    Joined,
    Kept,
    Logged,
    Loop,
    Nested,
    Program,
    Scaled,
    Sum,
    Taken,
    Unscaled,
    Zeros,
)

NAN, INF = float("nan"), float("inf")
TOO_LARGE = 2.0**126  # overflows when it is scaled, if the loss scale is 16 or more
SCALES = [2.0**4, 2.0**7, 2.0**10, 2.0**14]
SIZES = [(4,), (2, 2), (1, 3)]
FACTORS = [0.25, 0.5, 1.0, 2.0, -1.0]
BAD = [INF, NAN, -INF, TOO_LARGE]
KEEPING = ["by_norm", "halved", "halved_if_large", "copied", "over_largest"]
LINEAR = ["halved", "copied", "over_largest"]
BY_HAND = ["directly", "by_value", "by_reciprocal", "by_power", "by_multiple"]
BY_HAND += ["by_maximum", "by_square", "by_a_function"]
HIDING = ["by_value", "cleaned"]
BATCHES = 4
MIXED = "mixed"


class Writer:
    """Draws the statements of a step, in order.

    Attributes:
      one_of: Returns one of a list.
      shared: Whether the optimizers share a loss scale.
      sizes: The sizes of each optimizer's variables.
      slots: How many factors have been used.
      scaler: Who scales the losses. None: each optimizer its own.
    """

    def __init__(self, one_of, shared, sizes):
        self.one_of, self.shared, self.sizes = one_of, shared, sizes
        self.slots, self._names = 0, 0
        self._block, self._seen = [], {}
        self._loop = None
        whose = [None, None, None, 0, 1, MIXED] if shared else [None]
        self.scaler = one_of(whose)

    def name(self):
        self._names += 1
        return f"g{self._names - 1}"

    def maybe(self, in_ten=5):
        return self.one_of(range(10)) < in_ten

    def add(self, node):
        self._block.append(node)
        return node.name

    def within(self, write, *arguments):
        """Returns the statements that `write` writes, and what it returns."""
        kept = self._block, self._seen
        self._block, self._seen = [], {k: list(v) for k, v in self._seen.items()}
        result = write(*arguments)
        block = tuple(self._block)
        self._block, self._seen = kept
        return block, result

    # Lists of gradients.

    def scaled(self, of, depth):
        """Writes a list of gradients of the scaled loss, and returns its name."""
        seen = self._seen.setdefault(of, [])
        kinds = ["fresh"] * 4 + ["seen"] * bool(seen)
        if depth:
            kinds += ["sum", "halved", "branch", "loop", "nested"]
        kind = self.one_of(kinds)
        if kind == "seen":
            return self.one_of(seen)
        name = self._fresh(of) if kind == "fresh" else self._made(kind, of, depth, True)
        seen.append(name)
        return name

    def _fresh(self, of):
        losses = ["linear", "linear", "square"] + ["product"] * (len(self.sizes) > 1)
        times, counter = (1, None) if self._loop is None else self._loop
        slot, self.slots = self.slots, self.slots + times
        by = of if self.scaler is None else self.scaler
        by = self.one_of([0, 1]) if by == MIXED else by
        node = Scaled(self.name(), of, by, self.one_of(losses), slot, counter)
        return self.add(node)

    def unscaled(self, of, depth):
        """Writes a list of unscaled gradients."""
        kinds = ["fresh"] * 3
        if depth:
            kinds += ["sum", "change", "change", "branch", "loop", "nested"]
        kind = self.one_of(kinds)
        if kind == "fresh":
            source = self.scaled(of, depth)
            if self.scaler is None and self.maybe(2):
                how = self.one_of(BY_HAND)
                return self.add(ByHand(self.name(), of, source, how))
            return self.add(Unscaled(self.name(), of, source))
        return self._made(kind, of, depth, False)

    def _list(self, of, depth, is_scaled):
        return (self.scaled if is_scaled else self.unscaled)(of, depth)

    def _made(self, kind, of, depth, is_scaled):
        get = (self._list, of, depth - 1, is_scaled)
        if kind in ("change", "halved"):
            how = self.one_of(LINEAR if is_scaled else KEEPING + 2 * HIDING)
            source = self._list(*get[1:])
            return self.add(Changed(self.name(), how, source, self.maybe(2)))
        if kind == "sum":
            sources = self._list(*get[1:]), self._list(*get[1:])
            return self.add(Sum(self.name(), sources))
        if kind == "nested":
            return self._nested(get)
        if kind == "branch":
            return self._branch(get, of)
        return self._loop_of(get, of)

    def _nested(self, get):
        block, result = self.within(*get)
        if not block:
            return result
        return self.add(Nested(self.name(), block, result))

    def _branch(self, get, of):
        sides = [self.within(*get), self.within(*get)]
        if self.maybe(1):
            zeros = self.name()
            sides[1] = (Zeros(zeros, of),), zeros
        node = Branch(self.name(), self._flag(), tuple(sides), self.maybe())
        return self.add(node)

    def _loop_of(self, get, of):
        if self._loop is not None:
            return self._list(*get[1:])
        name, times = self.name(), self.one_of([1, 2, 3])
        self._loop = times, f"i_{name}"
        block, result = self.within(*get)
        self._loop = None
        return self.add(Loop(name, of, times, block, result, self.maybe()))

    def _flag(self):
        return Flag(self.one_of([0, 1]))

    # How a step ends.

    def step_of(self, of):
        """Writes one optimizer's part of a step."""
        if self.maybe(2):
            self._look_at(self.unscaled(of, 1))
        kinds = ["all"] * 4 + ["branches"] * 2 + ["parts"] * (len(self.sizes[of]) > 1)
        getattr(self, "_apply_" + self.one_of(kinds))(of)

    def _look_at(self, name):
        self._block.append(Logged(f"log_{name}", name))

    def _any(self, of, depth):
        return self._list(of, depth, self.maybe(4))

    def _apply_all(self, of):
        self._block.append(Applied(of, self._any(of, 2)))

    def _apply_branches(self, of):
        """Applies in one branch or in both, what was made outside or in them."""
        base = self.scaled(of, 1)
        condition = self._flag()
        if self.maybe(3):
            good = self.add(Unscaled(self.name(), of, base))
            condition = Good(good)
            first = self.within(self._apply_this, of, good)
        else:
            first = self.within(self._apply_this, of, base)
        other = self.within(self._apply_this, of, base) if self.maybe() else ((), None)
        node = Branch(None, condition, (first, other), self.maybe())
        self._block.append(node)

    def _apply_this(self, of, base):
        kind = self.one_of(["base", "change", "new"])
        if kind == "new":
            base = self._any(of, 1)
        elif kind == "change" and base in self._seen[of]:
            base = self.add(Unscaled(self.name(), of, base))
        if kind == "change":
            base = self.add(
                Changed(self.name(), self.one_of(KEEPING + 2 * HIDING), base)
            )
        self._block.append(Applied(of, base))

    def _apply_parts(self, of):
        """Applies two variables' gradients by themselves, as Keras's users do."""
        source = self._any(of, 1)
        parts = [Taken(self.name(), source, i, i + 1) for i in (0, 1)]
        for part in parts:
            self.add(part)
        names = [each.name for each in parts]
        if source in self._seen.get(of, ()):
            at = self.one_of([0, 1])
            names[at] = self.add(Unscaled(self.name(), of, names[at]))
            if self.maybe():
                how = self.one_of(KEEPING + 2 * HIDING)
                names[at] = self.add(Changed(self.name(), how, names[at]))
        for i in self.one_of([(0, 1), (1, 0)]):
            self._block.append(Applied(of, names[i], i, i + 1))

    def step_of_both(self):
        """Writes a step in which one optimizer unscales for both."""
        sources = self.scaled(0, 1), self.scaled(1, 1)
        joined = self.add(Joined(self.name(), sources))
        joined = self.add(Unscaled(self.name(), self.one_of([0, 1]), joined))
        if self.maybe():
            how = self.one_of(KEEPING + 2 * HIDING)
            joined = self.add(Changed(self.name(), how, joined))
        start = 0
        parts = []
        for of, sizes in enumerate(self.sizes):
            stop = start + len(sizes)
            parts.append((of, self.add(Taken(self.name(), joined, start, stop))))
            start = stop
        for of, name in self.one_of([parts, parts[::-1]]):
            self._block.append(Applied(of, name))


def _merged(one_of, one, other):
    """Returns two runs of statements as one, each in its order."""
    rest, found = [list(one), list(other)], []
    while all(rest):
        found.append(rest[one_of([0, 1])].pop(0))
    return (*found, *rest[0], *rest[1])


def _block(writer, count):
    if count == 1:
        return writer.within(writer.step_of, 0)[0]
    if writer.shared and writer.maybe(2):
        return writer.within(writer.step_of_both)[0]
    blocks = [writer.within(writer.step_of, of)[0] for of in range(count)]
    order = writer.one_of(["merged", "first", "second"])
    if order == "merged":
        return _merged(writer.one_of, *blocks)
    return sum(blocks if order == "first" else blocks[::-1], ())


def _batch(one_of, slots, may_be_bad):
    """Returns a batch; most are good."""
    factors = [one_of(FACTORS) for _ in range(slots)]
    if may_be_bad and one_of([True, False]):
        factors[one_of(range(slots))] = one_of(BAD)
    return tuple(factors), (one_of([False, True]), one_of([False, True]))


def program(one_of):
    """Returns a program; the meaning of some of them is open.

    Args:
      one_of: Returns one of a list.
    """
    count = one_of([1, 1, 2, 2, 2])
    shared = count > 1 and one_of([False, True, True])
    sizes = tuple(one_of(SIZES) for _ in range(count))
    writer = Writer(one_of, shared, sizes)
    block = _block(writer, count)
    scales = range(1 if shared else count)
    kept = [Kept(one_of(SCALES), one_of([1, 2, 2, 3, 3, None])) for _ in scales]
    may_be_bad = all(each.period for each in kept)
    return Program(
        tuple(kept),
        tuple(one_of([0.25, 0.5, 1.0]) for _ in range(count)),
        sizes,
        block,
        tuple(_batch(one_of, writer.slots, may_be_bad) for _ in range(BATCHES)),
        one_of([CALLS, CALLS, CALLS, LOOP, UNROLLED]),
    )


@st.composite
def programs(draw):
    """Returns programs that hypothesis can make smaller."""
    return program(lambda choices: draw(st.sampled_from(choices)))
