"""The detectors over the records of a run: one by one while it trains, or over its metrics.jsonl afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.filesystem import open_regular
from common.limits import parse_record
from runner.diagnostics.detectors import OF_EVALUATIONS, OF_STEPS
from runner.diagnostics.history import RunHistory
from runner.diagnostics.symptoms import PAGE, LoggedRecord, RunFacts, Symptom

# of a longer metrics.jsonl or train.log the first and the newest half of this is read
MAX_REPLAYED_BYTES = 64 << 20
# the end of `Symptom.message`
REPORTED_SYMPTOM = re.compile(rb"^warning: .*" + re.escape(f"{PAGE}#".encode()) + rb"([a-z-]{1,40})$")
# symptom -> those that it explains
EXCLUDES = {"diverging": ("loss-flat", "loss-spike", "always-clipped"), "loss-flat": ("diverging",)}


class RunMonitor:
    """Reports each symptom once. It keeps numbers that were logged, and computes nothing on the device."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts, self._history = facts, RunHistory()
        self._done: set[str] = set()

    def skip(self, names: Iterable[str]) -> None:
        """Report these symptoms no more."""
        for name in names:
            self._done |= {name, *EXCLUDES.get(name, ())}

    def add(self, record: LoggedRecord) -> list[Symptom]:
        """Return what is new with this record of metrics.jsonl."""
        self._history.add(record)
        found = []
        for name, detect in (OF_EVALUATIONS if record.get("kind") == "eval" else OF_STEPS).items():
            if name not in self._done and (symptom := detect(self._history, self._facts)) is not None:
                found.append(symptom)
                self.skip([name])
        return found


def watch_records(facts: RunFacts, earlier: Path | None, warn: Callable[[str], None]) -> Callable[[LoggedRecord], None]:
    """Return a function that takes each new record and warns of new symptoms.

    `earlier`: metrics.jsonl of a resumed run, which has reported its own.
    """
    monitor, is_watching = RunMonitor(facts), True

    def watch(record: LoggedRecord, is_new: bool = True) -> None:
        nonlocal is_watching
        try:
            symptoms = monitor.add(record) if is_watching else []
        except Exception as error:  # of any kind: a fault in a warning must not end a training
            is_watching, symptoms = False, []
            warn(f"the numbers of this run are not watched any more: {type(error).__name__}: {error}"[:300])
        for symptom in symptoms if is_new else ():
            warn(symptom.message)

    if earlier:
        # the log has those of steps that are trained again, too: it counts where not all records are replayed
        if earlier.exists() and earlier.stat().st_size > MAX_REPLAYED_BYTES:
            monitor.skip(reported_symptoms(earlier.with_name("train.log")))
        for record in read_metrics(earlier):
            watch(record, is_new=False)
    return watch


def read_metrics(path: Path) -> Iterator[LoggedRecord]:
    """Yield the records of a metrics.jsonl, of a long one the first and the newest; a line that is no object is left
    out.
    """
    return filter(None, map(parse_record, _first_and_newest(path)))


def reported_symptoms(log: Path) -> set[str]:
    """Return the names of the symptoms that a train.log warns of."""
    matches = (REPORTED_SYMPTOM.match(line.rstrip()) for line in _first_and_newest(log))
    return {match[1].decode() for match in matches if match}


def _first_and_newest(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, of one above MAX_REPLAYED_BYTES those of the first and the last half of as many bytes;
    none of a file that cannot be read.
    """
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as file:
            if size <= MAX_REPLAYED_BYTES:
                yield from file
                return
            half = MAX_REPLAYED_BYTES // 2
            yield from file.read(half).split(b"\n")[:-1]
            file.seek(size - half)
            yield from file.read(half).split(b"\n")[1:]
    except OSError:
        return
