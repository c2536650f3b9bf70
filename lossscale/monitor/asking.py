"""What a finding is, and when and how often it may be said.

A finding is a function. It gets a `Run` or a `Watched`, yields a text where that is
true now, and changes nothing. Its row in `findings` says the rest.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Literal, NamedTuple, Optional, Tuple

from lossscale.monitor.watched import Run

Texts = Iterator[str]


class Finding(NamedTuple):
    """A row of the table: something that a monitor can say.

    Attributes:
      when: When it is asked: as training begins, at each look, or as an epoch ends.
      of: Whether it is asked of the `Run`, or of the `Watched` of each optimizer.
      once_per: In which time it is said once. None: as long as it says the same.
      find: The function.
      stops: Whether it ends training, if `on_stall` says so.
      tells: Findings of the model that are said in further lines of it, and not again.
    """

    when: Literal["begin", "look", "epoch end"]
    of: Literal["model", "optimizer"]
    once_per: Optional[Literal["process", "training", "epoch", "skips in a row"]]
    find: Callable[[Any], Texts]
    stops: bool = False
    tells: Tuple[Callable[[Run], Texts], ...] = ()


def told(run: Run, table: List[Finding], when: str) -> Iterator[Tuple[Finding, str]]:
    """Yields what there is to say now, but for what was said in its time."""
    for row in table:
        subjects: List[Any] = [run] if row.of == "model" else [*run.watched]
        for subject in subjects if row.when == when else ():
            for text in _news(row, subject, run):
                lines = [f"{subject.name}: {text}" if subject.name else text]
                for other in row.tells:
                    run.said[other] = tuple(other(run))
                    lines.extend(run.said[other])
                yield row, "\n  * ".join(lines)


def _news(row: Finding, subject: Any, run: Run) -> Tuple[str, ...]:
    before, time = subject.said.get(row.find), row.once_per
    now: Any = time
    if time == "training":
        now = run.training
    elif time == "epoch":
        now = run.training, run.epochs
    elif time == "skips in a row":
        now = subject.run_of_skips
    if time and now == before:
        return ()
    texts = tuple(row.find(subject))
    if texts or not time:
        subject.said[row.find] = now if time else texts
    return () if texts == before else texts
