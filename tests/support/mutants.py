"""Breaks the code, one decision at a time, and tells which tests see it.

    python tests/support/mutants.py            # by the quick tests, at most 2 may live
    python tests/support/mutants.py --smoke    # by the smoke tests, at most 6 may live
    python tests/support/mutants.py --only law

Each mutant is a line of the package that is changed in a copy of the checkout. First
the tests run that should see it (`tests`), later, if they pass, all tests of the set. A
mutant that lives is a promise that no test of the set holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Iterator, NamedTuple

ROOT = Path(__file__).parents[2]
#: What a copy of the checkout need not have.
WITHOUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "*.egg*")


#: Name -> what `pytest -m` is given, and how many mutants may live.
SETS = {"smoke": ("smoke", 6), "quick": ("not slow", 2)}


class Mutant(NamedTuple):
    """One broken decision: in `file`, `old` becomes `new`. `tests` should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


#: A file of the package and the tests that should see what is broken in it. Below, its
#: mutants: the name, what stands there, and what becomes of it.
TABLE = """
scales/dynamic.py: scales/test_dynamic.py scales/test_reference.py
    dynamic: it grows one step late
      - grows = good >= self._period(state)
      + grows = good > self._period(state)
    dynamic: each bad step lowers it, whatever hysteresis is
      - bad >= self.hysteresis)
      + bad >= 1)
    dynamic: it falls below its floor
      - return tf.maximum(scale / divisor, self.min_loss_scale)
      + return scale / divisor
    dynamic: it grows to infinity
      - larger = select(larger < _INFINITE, larger, scale)
      + pass
    dynamic: a cooldown never counts down
      - tf.maximum(left - 1, zero)
      + left
scales/spike_guard.py: scales/test_spike_guard.py
    guard: it never gives way
      - above > self.max_in_a_row)
      + above > 2**30)
    guard: it keeps zeros
      - largest >= arguments.FLOAT32_MIN
      + largest >= 0.0
scales/headroom.py: scales/test_headroom.py
    headroom: an overflow does not lower the ceiling
      - ceiling = tf.where(is_finite, ceiling, lowered)
      + ceiling = tf.where(is_finite, ceiling, state.ceiling)
scales/checks.py: scales/test_own.py
    every loss scale: what a rule returns has any shape
      - if new is None or new.dtype != dtype or not shape.is_compatible_with(new.shape):
      + if False:
scales/checks.py: scales/test_adjustment.py
    verdict: its flags are of any type
      - if not is_flag or flag.shape.num_elements() not in {None, 1}:
      + if False:
scales/adjustment.py: scales/test_conformance.py
    every loss scale: a restored 0 or NaN stays
      - valid = select(is_number, valid, loss_scale.initial_loss_scale)
      + valid = current
scales/adjustment.py: scales/test_adjustment.py
    chain: a verdict applies an overflow
      - should_apply = both(should_apply, verdict.should_apply)
      + should_apply = verdict.should_apply
    chain: a rule learns of what another loss scale keeps from it
      - passed_on.append(both(passed_on[-1], replicas.local_result(flag)))
      + passed_on.append(replicas.local_result(flag))
arguments.py: scales/test_conformance.py test_public_api.py
    every loss scale: a config leaves out what is None
      - if value is not None or name not in self._newer
      + if value is not None
optimizer/reduction.py: optimizer/test_reduction.py
    replicas: the first one decides
      - total, largest = replicas.all_reduce_sum(contributions), None
      + total, largest = replicas.local_result(contributions), None
optimizer/reduction.py: optimizer/test_looking.py
    replicas: the greatest magnitude is the first one's
      - tf.reduce_max(total[1:])
      + total[1]
optimizer/reduction.py: optimizer/test_two_replicas.py
    replicas: a sum that may overflow is not looked at
      - tf.logical_and(total > 0.0, total < self._count + 1.0)
      + total < 0.0
optimizer/communication.py: optimizer/test_communication.py
    communication_dtype: unscaled gradients cross as they are
      - scale if by is None else scale / by if by is unknown else None
      + None if by is None else scale / by if by is unknown else None
gradients/bundle.py: optimizer/test_loops.py
    step: an overflow that was clipped is forgotten
      - check = check.without_gradients(bundle.count) & now
      + check = now
gradients/bundle.py: gradients/test_bundle.py
    step: duplicate rows may add up to infinity
      - return bool(dtype.is_floating) and dtype.size == 2
      + return False
gradients/arithmetic.py: gradients/test_arithmetic.py
    step: a loss is multiplied in float16
      - loss = widened(loss)
      + loss = tf.convert_to_tensor(loss)
optimizer/step.py: optimizer/test_spike_record.py
    record: a spike is written down as an overflow
      - if not loss_scale.left_out_as:
      + if True:
    step: a spike is applied
      - run_either(should_apply, apply, skip)
      + run_either(check.exact(), apply, skip)
optimizer/sharing.py: optimizer/test_nonfinite_loss.py
    step: of two that share a loss scale a bad loss hides an overflow
      - rule_learns = tf.logical_or(rule_learns, bad_before > of_losses)
      + pass
scales/ignored_losses.py: optimizer/test_nonfinite_loss.py
    ignored: every bad loss counts as an overflow
      - return tf.logical_or(counts, tf.logical_not(is_of_loss))
      + return tf.constant(True)
scales/ignored_losses.py: scales/test_ignored_losses.py optimizer/test_blame.py
    ignored: however many there are, none counts
      - counts = tf.logical_and(is_of_loss, counts)
      + counts = tf.constant(False)
    ignored: a step that is applied ends the row
      - since = tf.maximum(applied - at, 0)
      + since = tf.where(applied > at, level, 0)
    ignored: a step that is applied takes nothing away
      - higher = tf.maximum(level - applied, 0) + _ADDED
      + higher = level + _ADDED
scales/variables.py: optimizer/test_cut_runs.py
    files: what an older checkpoint does not hold stays
      - self.ignored_loss_steps.assign(0)
      + pass
optimizer/engine.py: optimizer/test_cut_runs.py
    files: they do not hold the level
      - return {} if ignored_losses is None else ignored_losses.saved
      + return {}
scales/dynamic.py: optimizer/test_cut_runs.py
    files: a bad loss that was ignored ends the search
      - searches = state.skipped_steps <= ignored
      + searches = state.skipped_steps < 1
provenance/origins.py: optimizer/test_blame.py
    blame: a loss is at fault of gradients of which nothing is known
      - kinds = [kind for kind in kinds if kind.name != UNKNOWN]
      + pass
provenance/origins.py: optimizer/test_nonfinite_loss.py
    blame: unscaled gradients are of no loss
      - [value for unscaled in _lists_among(kinds) for value in unscaled.losses]
      + []
optimizer/sharing.py: optimizer/test_sharing.py
    step: each optimizer of a step adjusts a shared loss scale
      - if step is None or not step._continues(division):
      + if True:
optimizer/record.py: optimizer/test_fault_record.py
    record: it names another variable
      - for variable, kind in zip(variables, map(_kind, worst))
      + for variable, kind in zip(variables[::-1], map(_kind, worst))
optimizer/state.py: optimizer/test_pending.py
    step: its state begins with an infinity
      - NO_OVERFLOW, COUNTED, SEEN = 0.0, 1.0, 2.0
      + NO_OVERFLOW, COUNTED, SEEN = float("-inf"), 1.0, 2.0
removed.py: test_removed.py
    removed: an import of what went says nothing
      - if name in REMOVED and fullname.startswith("lossscale."):
      + if False:
provenance/witness.py: optimizer/test_pending.py
    law 1: what was given to unscale may be unscaled
      - if kind.name == UNKNOWN:
      + if False:
optimizer/pending.py: optimizer/test_pending.py
    law 1: gradients are not known again by their number
      - is_pending = tf.logical_or(is_pending, self.state.was_given(grads))
      + pass
    law 2: an apply leaves its optimizer waiting
      - self.note_waiting(False)
      + pass
optimizer/state.py: optimizer/test_pending.py
    law 2: another optimizer's loss moves the state of one that waits
      - state.move(Stage.SCALED, product.loss_scale, is_free)
      + state.move(Stage.SCALED, product.loss_scale)
provenance/walk.py: provenance/test_walk.py
    law 3: loops are of unknown kind
      - for _ in range(_TURNS):
      + for _ in range(0):
provenance/walk.py: optimizer/test_pending.py
    law 3: bodies are of unknown kind
      - if called and not is_used and
      + if False and
optimizer/state.py: optimizer/test_pending.py
    law 4: a counted overflow does not end
      - now = select(is_seen, SEEN, NO_OVERFLOW)  # a counted one has ended
      + now = tf.convert_to_tensor(self.overflow)
optimizer/state.py: optimizer/test_overflows.py
    law 4: an overflow that no apply has counted ends with the next list
      - now = select(is_finite, now, SEEN)
      + now = select(is_finite, NO_OVERFLOW, SEEN)
optimizer/pending.py: optimizer/test_overflows.py
    law 4: a counted overflow is not of the rest of its list, in another function
      - are_scaled.setdefault(self, False)
      + are_scaled.setdefault(self, True)
provenance/kinds.py: optimizer/test_pending.py
    law 5: mixed values are of unknown kind
      - return CHANGED if kind in {SQUARED, SCALED} and UNSCALED in names else kind
      + return UNKNOWN if kind in {SQUARED, SCALED} and UNSCALED in names else kind
provenance/witness.py: optimizer/test_pending.py
    law 5: nothing is said of gradients that another optimizer unscaled
      - program.unscaled_elsewhere()
      + pass
optimizer/pending.py: optimizer/test_pending.py
    a list is divided by the loss scale of now
      - return select(last.is_at(Stage.NOTHING), now, last.loss_scale)
      + return now
monitor/watched.py: monitor/test_watched.py
    monitor: no stall is told
      - is_long = skips.in_a_row >= self.patience and not is_search
      + is_long = False
monitor/batches.py: monitor/test_bad_batches.py
    monitor: a step is told of the batch after its own
      - at = bisect.bisect_right(before, number) - 1
      + at = bisect.bisect_right(before, number)
monitor/batches.py: monitor/test_bad_batches.py
    monitor: the last call of an epoch is a full one
      - end = min(end, self._count)
      + pass
monitor/model.py: monitor/test_table.py
    monitor: float16 is named in a model of float32
      - return "float16" in [*dtypes, added_up] or not dtypes
      + return True
monitor/findings.py: monitor/test_table.py
    monitor: batches of a stall are told twice
      - count -= now.skips.bad_losses
      + pass
monitor/causes.py: monitor/test_findings.py
    monitor: a learning rate is named before the first step
      - if w.last.applied and not w.applied:
      + if not w.applied:
ranges/cure.py: ranges/test_cure.py
    find_nonfinite: what a trial disproved is advised
      - if left is None:
      + if True:
    find_nonfinite: any scale with finite gradients is a cure
      - return is_below and whole is not None and whole.first_fault() is None
      + return is_below
ranges/training_step.py: ranges/test_cure.py
    find_nonfinite: gradients that are all zero are a cure
      - return not received or any(look(grad).largest > 0 for grad in received)
      + return True
monitor/callback.py: monitor/test_bad_batches.py
    monitor: a call of several batches has one
      - w.batches.begin(batch, run.batches_in_call)
      + w.batches.begin(batch, 1)
optimizer/keras_arguments.py: optimizer/test_keras_arguments.py
    files: Keras's own arguments mean a default loss scale
      - config["initial_loss_scale"] = scale
      + pass
"""


def mutants() -> Iterator[Mutant]:
    """Yields the mutants of `TABLE`."""
    for line in TABLE.strip().splitlines():
        text = line.strip()
        if not line.startswith(" "):
            file, tests = line.split(": ")
        elif text.startswith("- "):
            old = text[2:]
        elif not text.startswith("+ "):
            name = text
        else:
            yield Mutant(name, file, old, text[2:], tests)


class Copy:
    """A copy of the checkout, in which one decision after the other is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._time = folder, int(time.time())
        shutil.copytree(ROOT, folder, ignore=WITHOUT)

    def passes(self, expression: str, tests: str, *options: str) -> bool:
        """Tells whether no test fails of those files, or of all if there are none."""
        files = [f"tests/{each}" for each in sorted(set(tests.split()))]
        command = ["pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", expression]
        done = subprocess.run(
            [sys.executable, "-m", *command, *options, *files],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1, 5):  # 5: there are no such tests
            raise SystemExit(done.stdout[-2000:] + done.stderr[-500:])
        return done.returncode != 1

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """Breaks a decision within."""
        path = self._folder / "lossscale" / mutant.file
        text = path.read_text()
        self._write(path, text.replace(mutant.old, mutant.new))
        yield
        self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Python would take what it compiled in the same second for that of this text.
        self._time += 1
        os.utime(path, (self._time, self._time))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    for name in SETS:
        which.add_argument(f"--{name}", dest="name", action="store_const", const=name)
    parser.set_defaults(name="quick")
    parser.add_argument("--only", default="", help="those with this in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen = [each for each in mutants() if given.only in each.name]
    for each in chosen:
        found = (ROOT / "lossscale" / each.file).read_text().count(each.old)
        if found != 1:
            raise SystemExit(f"{each.name}: {found} times in {each.file}: {each.old}")
    expression, few = SETS[given.name]
    in_one = ["-n", "0"] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Copy] = Queue()
        for number in range(given.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        first = copies.queue[0]
        if not first.passes(expression, " ".join(each.tests for each in chosen)):
            raise SystemExit("Tests fail although nothing is broken.")

        def dies_by_its_own(mutant: Mutant) -> bool:
            copy = copies.get()
            with copy.broken(mutant):
                dies = not copy.passes(expression, mutant.tests, *in_one)
            copies.put(copy)
            return dies

        left, living = [], []
        with ThreadPoolExecutor(given.jobs) as pool:
            for mutant, dies in zip(chosen, pool.map(dies_by_its_own, chosen)):
                left += [] if dies else [mutant]
                print("dies " if dies else "later", mutant.name, flush=True)
        for mutant in left:
            with first.broken(mutant):
                if first.passes(expression, ""):
                    living.append(mutant)
                    print("LIVES", mutant.name, flush=True)
    dead = len(chosen) - len(living)
    print(f"{given.name}: {dead} of {len(chosen)} die, {few} may live")
    sys.exit(len(living) > few)


if __name__ == "__main__":
    main()
