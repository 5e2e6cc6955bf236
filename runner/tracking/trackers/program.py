"""Program of a built-in tracker: reads the messages of a run on stdin and passes them to an experiment of SwanLab,
Weights & Biases or TensorBoard.

The library runs in this process only. It is given text without control characters, and never the settings that hold a
key.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

from common.errors import clean_texts
from common.filesystem import open_regular, remove_tree
from common.guarded_files import check_own_files
from common.limits import parse_json

NICENESS = 10  # training comes first where processors are short
PROBE_TIMEOUT = 3  # seconds
FINISH_TIMEOUT = 60  # seconds; an upload that hangs longer ends with the process, and the offline files stay
MAX_LINE_BYTES = 1 << 20  # a longer record is not replayed
MAX_STEP, LARGEST_NUMBER = (1 << 63) - 1, 1e305  # what the files of trackers can hold
# characters, and tags; the services refuse more
SERVICE_NAME_LENGTH, TAG_LENGTH, NOTE_LENGTH, SENT_TAGS = 128, 64, 1024, 30
EXPERIMENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # becomes a part of file names
NOT_LOGGED = {"kind", "step", "time", "attempt", "nonfinite"}  # fields of metrics.jsonl that a tracker does not get
ConnectedMode = Literal["online", "offline"]
NO_FINISH = ("failed", "the training process ended without a final message")


@dataclass
class Experiment:
    """First message of a run, with texts that a service accepts."""

    folder: Path  # <run>/<tracker name>, exists
    id: str  # the same after a resume and for each replay
    name: str
    project: str
    mode: str  # auto, online or offline
    config: dict[str, Any]  # all settings of the run, by section
    group: str = ""  # of the jobs of one sweep
    tags: list[str] = field(default_factory=list)
    note: str = ""
    stage: str = ""
    # bytes of metrics.jsonl and samples.jsonl that come before the messages; None: a new run
    history: dict[str, int] | None = None
    is_replay: bool = False  # of a run that has ended: what the tracker has of it is replaced

    def connect(
        self, api_key: str | None, api_host: str, variable: str, pattern: str
    ) -> tuple[ConnectedMode, str, int | None]:
        """Return (mode, reason, `history_from`) of an experiment of a service.

        What earlier attempts wrote offline, names of `pattern` in `folder`, is deleted: it is written again from
        metrics.jsonl, so that no step is there twice.
        """
        mode, reason = choose_mode(self.mode, api_key, api_host, variable)
        offline = sorted(self.folder.glob(pattern))
        for path in offline:
            remove_tree(path)
        return mode, reason, 0 if mode == "offline" or offline else None

    def init_arguments(self) -> dict[str, Any]:
        """Return the arguments that `init` of SwanLab and of wandb have in common."""
        texts = {"project": self.project, "name": self.name, "id": self.id, "group": self.group or None}
        return {**texts, "job_type": self.stage or None, "tags": self.tags, "config": self.config, "resume": "allow"}


class ExperimentLog(Protocol):
    """An open experiment of a tracker."""

    location: str  # mode and place, for the console
    # first step of the records before a resume that are to be written, too; None: none of them
    history_from: int | None

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None: ...

    def samples(self, step: int, samples: list[dict[str, str]]) -> None: ...

    def finish(self, status: str, error: str) -> None: ...


class ServiceLog:
    """What an experiment of SwanLab and one of wandb have in common."""

    _run: Any  # of the library

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)


def run_program(open_experiment: Callable[[Experiment], ExperimentLog]) -> None:
    """Serve the messages on stdin until `finish` or the end of the training process."""
    os.nice(NICENESS)
    console = sys.stdout
    # what the library prints goes to tracker.log; what this function prints to `console` is shown by the run
    sys.stdout = sys.stderr
    start = json.loads(sys.stdin.readline())
    experiment = read_start(start)
    # what a library opens there is no link
    check_own_files(experiment.folder, (), shallow=os.listdir(experiment.folder))
    from common.file_lock import FileLock

    lock = FileLock.acquire(experiment.folder / ".lock", wait=True)  # the process of a killed attempt may still write
    opened = open_experiment(experiment)
    print(f"{start['settings']['name']}: {opened.location}", file=console, flush=True)
    if opened.history_from is not None:
        for message in read_history(experiment):
            if message["step"] >= opened.history_from:
                _forward(opened, message)
    status, error = NO_FINISH
    for line in sys.stdin:
        message = clean_texts(json.loads(line))
        if message["event"] == "finish":
            status, error = message["status"], message["error"]
            break
        _forward(opened, message)
    signal.alarm(FINISH_TIMEOUT)
    opened.finish(status, error)
    lock.release()


def read_start(start: dict[str, Any]) -> Experiment:
    settings, texts = start["settings"], clean_texts(start)
    return Experiment(
        folder=Path(start["folder"]),
        id=start["id"]
        if EXPERIMENT_ID.fullmatch(start["id"])
        else hashlib.sha256(start["id"].encode("utf-8", "backslashreplace")).hexdigest()[:16],
        name=shorten(texts["name"], SERVICE_NAME_LENGTH),
        project=settings.get("project", ""),
        mode=settings.get("mode", "offline"),
        config=texts["config"],
        group=shorten(texts["group"], SERVICE_NAME_LENGTH),
        tags=[*dict.fromkeys(shorten(tag, TAG_LENGTH) for tag in texts["tags"] if tag)][:SENT_TAGS],
        note=shorten(texts["note"], NOTE_LENGTH),
        stage=shorten(texts["stage"], SERVICE_NAME_LENGTH),
        history=start["history"],
        is_replay=start.get("is_replay", False),
    )


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def choose_mode(requested: str, api_key: str | None, api_host: str, variable: str) -> tuple[ConnectedMode, str]:
    """Return (mode, reason).

    `auto`: what the environment variable says; otherwise online only if a key exists and the server answers.

    Without a key or a server the libraries wait up to 16 s and then raise.
    """
    chosen = os.environ.get(variable) if requested == "auto" else requested
    if chosen:  # any value but online, e.g. disabled, sends nothing
        reason = f"{variable}={chosen}" if requested == "auto" else f"tracker.mode={chosen}"
        return "online" if chosen in ("online", "cloud") else "offline", reason  # SwanLab: cloud
    if not api_key:
        return "offline", "no API key"
    try:
        urllib.request.urlopen(api_host, timeout=PROBE_TIMEOUT)
    except urllib.error.HTTPError:
        pass  # an HTTP error is an answer, too
    except OSError:
        return "offline", f"{api_host} does not answer"
    return "online", "API key found"


def read_history(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield the messages of metrics.jsonl and samples.jsonl before a resume in the order of their steps.

    Damaged lines are left out.
    """
    run_dir, sizes = experiment.folder.parent, experiment.history or {"metrics": 0, "samples": 0}
    metrics = (_log_message(record) for record in _read_records(run_dir / "metrics.jsonl", sizes["metrics"]))
    samples = _read_records(run_dir / "samples.jsonl", sizes["samples"])
    by_step = (
        {"event": "samples", "step": step, "samples": clean_texts(list(group))}
        for step, group in itertools.groupby(samples, itemgetter("step"))
    )
    yield from heapq.merge(metrics, by_step, key=itemgetter("step"))


def _log_message(record: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        name: value
        for name, value in record.items()
        if name not in NOT_LOGGED and type(value) in (int, float) and abs(value) < LARGEST_NUMBER
    }
    return clean_texts({"event": "log", "kind": str(record.get("kind")), "step": record["step"], "numbers": numbers})


def _read_records(path: Path, size: int) -> Iterator[dict[str, Any]]:
    try:
        fd, _ = open_regular(path)
    except FileNotFoundError:
        return
    with open(fd, "rb") as file:
        while file.tell() < size and (line := file.readline(MAX_LINE_BYTES)):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and type(step := record.get("step")) is int and 0 <= step <= MAX_STEP:
                yield record


def _forward(opened: ExperimentLog, message: dict[str, Any]) -> None:
    if message["event"] == "log":
        opened.log(message["kind"], message["step"], message["numbers"])
    else:
        texts = [
            {"prompt": str(sample.get("prompt", "")), "answer": str(sample.get("answer", ""))}
            for sample in message["samples"]
        ]
        opened.samples(message["step"], texts)
