"""The detectors over the records of a run: one by one while it trains, or over its metrics.jsonl afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.filesystem import open_regular
from runner.diagnostics.detectors import OF_EVALUATIONS, OF_STEPS
from runner.diagnostics.history import RunHistory
from runner.diagnostics.symptoms import LoggedRecord, RunFacts, Symptom

MAX_REPLAYED_BYTES = 64 << 20  # of a longer metrics.jsonl nothing is read: a symptom of an earlier attempt may be reported again
EXCLUDES = {"diverging": ("loss-flat", "loss-spike", "always-clipped"), "loss-flat": ("diverging",)}  # symptom -> those that it explains


class RunMonitor:
    """Reports each symptom once. It keeps numbers that were logged, and computes nothing on the device."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts, self._history = facts, RunHistory()
        self._done: set[str] = set()

    def add(self, record: LoggedRecord) -> list[Symptom]:
        """Return what is new with this record of metrics.jsonl."""
        self._history.add(record)
        found = []
        for name, detect in (OF_EVALUATIONS if record.get("kind") == "eval" else OF_STEPS).items():
            if name not in self._done and (symptom := detect(self._history, self._facts)) is not None:
                found.append(symptom)
                self._done |= {name, *EXCLUDES.get(name, ())}
        return found


def diagnose(records: Iterable[LoggedRecord], facts: RunFacts) -> list[Symptom]:
    """Return the symptoms of a run from its records, in the order in which it reported them."""
    monitor = RunMonitor(facts)
    return [symptom for record in records for symptom in monitor.add(record)]


def watch_records(facts: RunFacts, earlier: Path | None, warn: Callable[[str], None]) -> Callable[[LoggedRecord], None]:
    """Return a function that takes each new record and warns of new symptoms. `earlier`: metrics.jsonl of a resumed run, which has reported its own."""
    monitor = RunMonitor(facts)
    is_watching = True

    def symptoms_of(record: LoggedRecord) -> list[Symptom]:
        nonlocal is_watching
        try:
            return monitor.add(record) if is_watching else []
        except Exception as error:  # of any kind: a fault in a warning must not end a training
            is_watching = False
            warn(f"the numbers of this run are not watched any more: {type(error).__name__}: {error}"[:300])
            return []

    for record in read_metrics(earlier) if earlier else ():
        symptoms_of(record)

    def watch(record: LoggedRecord) -> None:
        for symptom in symptoms_of(record):
            warn(symptom.message)

    return watch


def read_metrics(path: Path) -> Iterator[LoggedRecord]:
    """Yield the records of a metrics.jsonl. A line that is no object is left out; nothing raises."""
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as lines:
            for line in lines if size <= MAX_REPLAYED_BYTES else ():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return
