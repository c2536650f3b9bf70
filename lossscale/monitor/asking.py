"""What a finding is, and when and how often it may be said.

A finding is a function. It gets a `Run` or a `Watched`, yields a text where that is
true now, and changes nothing. Its row in `findings` says the rest.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Iterator, List, NamedTuple, Optional, Tuple

from lossscale.monitor.watched import Run

Texts = Iterator[str]

#: When a monitor asks.
BEGIN, LOOK, EPOCH_END = "as training begins", "at each look", "as an epoch ends"
#: Of what it asks.
MODEL, OPTIMIZER = "the model", "each optimizer"
#: In which time it says something once. Of the model, `EVER` is in this training.
EVER, TRAINING, EPOCH, SKIPS = "ever", "a training", "an epoch", "skips in a row"


class Finding(NamedTuple):
    """A row of the table: something that a monitor can say.

    Attributes:
      when: When it is asked.
      of: Of what.
      once_per: In which time it is said once. None: as long as it says the same.
      find: The function.
      stops: Whether it ends training, if `on_stall` says so.
      tells: Findings of the model that are said in further lines of it, and not again.
    """

    when: str
    of: str
    once_per: Optional[str]
    find: Callable[[Any], Texts]
    stops: bool = False
    tells: Tuple[Callable[[Run], Texts], ...] = ()


def told(run: Run, table: List[Finding], when: str) -> Iterator[Tuple[Finding, str]]:
    """Yields what there is to say now, but for what was said in its time."""
    for finding in table:
        if finding.when != when:
            continue
        subjects: List[Any] = [run] if finding.of == MODEL else [*run.watched]
        for subject in subjects:
            for text in _news(finding, subject):
                lines = [f"{subject.name}: {text}" if subject.name else text]
                for other in finding.tells:
                    texts = tuple(other(run))
                    run.said[other] = texts
                    lines.extend(texts)
                yield finding, "\n  * ".join(lines)


def _news(finding: Finding, subject: Any) -> Tuple[str, ...]:
    said, find, time = subject.said, finding.find, _time(finding.once_per, subject)
    if time is not None and said.get(find) == time:
        return ()
    texts = tuple(find(subject))
    if time is None:
        is_new = texts != said.get(find)
        said[find] = texts
        return texts if is_new else ()
    if texts:
        said[find] = time
    return texts


def _time(once_per: Optional[str], subject: Any) -> Hashable:
    """Returns what tells this time from the next one."""
    time: Hashable = once_per
    if once_per == TRAINING:
        time = subject.run.training
    elif once_per == EPOCH:
        time = subject.run.training, subject.run.epochs
    elif once_per == SKIPS:
        time = subject.run_of_skips
    return time
