"""What a finding is, and when and how often it may be said.

A finding is a function. It gets a `Run` or a `Watched`, yields a text where that is
true now, and changes nothing. Its row in `findings` says the rest.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Literal, NamedTuple, Tuple

from lossscale.monitor.watched import Run

Texts = Iterator[str]


class Finding(NamedTuple):
    """A row of the table: something that a monitor can say.

    Attributes:
      when: When it is asked: as training begins, at each look, or as an epoch ends.
      of: Whether it is asked of the `Run`, or of the `Watched` of each optimizer.
      once_per: In which time it is said once.
      find: The function.
      stops: Whether it ends training, if `on_stall` says so.
    """

    when: Literal["begin", "look", "epoch end"]
    of: Literal["model", "optimizer"]
    once_per: Literal["process", "training", "epoch", "skips in a row"]
    find: Callable[[Any], Texts]
    stops: bool = False


def told(run: Run, table: List[Finding], when: str) -> Iterator[Tuple[Finding, str]]:
    """Yields what there is to say now, but for what was said in its time."""
    training, epoch = (run.training,), (run.training, run.epochs)
    times = {"process": (), "training": training, "epoch": epoch}
    for row in table:
        subjects: List[Any] = [run] if row.of == "model" else [*run.watched]
        for subject in subjects if row.when == when else ():
            now = times.get(row.once_per)
            if now is None:
                now = subject.run_of_skips
            if subject.said.get(row.find) != now:
                for text in row.find(subject):
                    subject.said[row.find] = now
                    yield row, f"{subject.name}: {text}" if subject.name else text
