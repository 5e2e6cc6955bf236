"""One rank of many, as `ranks` starts it: `python runner/launch/worker.py FILE PARENT`. FILE lies in the folder of the run."""

import os
import sys

if not __package__:  # run by path: Python put runner/launch/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import signal
from pathlib import Path
from types import FrameType

from common.filesystem import read_bounded
from runner.launch.signals import STOP_SIGNALS, StopFlag
from runner.launch.subprocesses import run_then_hard_exit
from runner.launch.train_process import config_from_json, train_as_rank
from runner.run_dir.lock import MAX_JSON_BYTES
from runner.run_dir.metadata import RunMetadata
from runner.tracking.progress import ignore_broken_pipe


def main(file: Path, parent: int) -> int:
    ignore_broken_pipe()
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore_signal)  # what the flag puts back
    with StopFlag() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what came since we were started is heard now
        return run_rank(file, parent, stop)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """A rank that is leaving leaves with its own code, whoever else wishes it to."""


def run_rank(file: Path, parent: int, stop: StopFlag) -> int:
    with RunMetadata.attach(file.parent, int(os.environ["RANK"])) as record:
        if os.getppid() != parent:  # gone before we held the folder: it may be another's by now
            return 128 + signal.SIGTERM
        return train_as_rank(config_from_json(json.loads(read_bounded(file, MAX_JSON_BYTES)), file), record, stop)


if __name__ == "__main__":
    run_then_hard_exit(lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
