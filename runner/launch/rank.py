"""One rank of many, as `ranks` starts it: `python runner/launch/rank.py FILE PARENT`. FILE lies in the folder of the run."""

import os
import sys

if not __package__:  # run by path: Python put runner/launch/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import signal
from pathlib import Path
from types import FrameType

from runner.engine.console import outlive_readers
from runner.engine.disk import read_file
from runner.engine.signals import SIGNALS, StopFlag
from runner.launch.carry import as_rank, handed_over
from runner.launch.lock import LIMIT
from runner.launch.processes import run_and_end
from runner.launch.record import Record


def main(file: Path, parent: int) -> int:
    outlive_readers()
    for number in SIGNALS:
        signal.signal(number, _unheard)  # what the flag puts back
    with StopFlag() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what came since we were started is heard now
        return run(file, parent, stop)


def _unheard(number: int, frame: FrameType | None) -> None:
    """A rank that is leaving leaves with its own code, whoever else wishes it to."""


def run(file: Path, parent: int, stop: StopFlag) -> int:
    with Record.attach(file.parent, int(os.environ["RANK"])) as record:
        if os.getppid() != parent:  # gone before we held the folder: it may be another's by now
            return 128 + signal.SIGTERM
        return as_rank(handed_over(json.loads(read_file(file, LIMIT)), file), record, stop)


if __name__ == "__main__":
    run_and_end(lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
