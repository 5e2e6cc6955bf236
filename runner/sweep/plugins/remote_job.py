"""A job of a sweep where a foreign launcher has put it: on a node of a cluster, in a worker of joblib's or of Ray's.

Such a launcher calls a function. Ours starts the job there as a process of its own, through the door, like any run: its folder
is locked, what it has saved is continued, what is complete is left alone, and nothing is left behind in a worker that lives on.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from common.exit_codes import INTERRUPTED, OK
from common.filesystem import make_dirs
from runner.launch import subprocesses
from runner.run_dir.metadata import has_started, read_run_metadata
from runner.sweep import scheduler

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # USR2 is submitit's: the time is up, or another needs the node


class RemoteJobFailed(Exception):
    """How a job ended that has failed; one line."""


class RemoteJobInterrupted(Exception):
    """The job was asked to stop and has saved."""


@dataclass
class RemoteJobs:
    """What Hydra calls in the place of training. `words`: the command line of each job, by the name of its folder."""

    words: dict[str, list[str]]

    def __call__(self, tree: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        run_remote_job(folder, self.words[folder.name])


def run_remote_job(folder: Path, words: list[str]) -> None:
    """The job to its end. Raises Ended, or Saved where it did not come to it."""
    if has_started(read_run_metadata(folder)) and not words[0].startswith("resume="):
        words = [f"resume={folder}"]  # it was here before, and was sent back to the queue
    make_dirs(folder)
    log = folder / scheduler.CONSOLE_LOG
    with open(log, "ab") as out:
        process = scheduler.spawn_job(words, scheduler.Slot(threads=None, devices=None), out.fileno())
    code, asked = _wait_forwarding_signals(process)
    if code == INTERRUPTED:
        for number in asked[:1]:
            signal.raise_signal(number)  # it was meant for whoever runs us, too: submitit now puts the job back into the queue
        raise RemoteJobInterrupted(f"{folder.name} was asked to stop and has saved")
    if code != OK:
        raise RemoteJobFailed(subprocesses.failure_reason(code, read_run_metadata(folder), subprocesses.last_lines(log)))


def _wait_forwarding_signals(process: subprocess.Popen) -> tuple[int, list[int]]:
    """(exit code, the signals that came): the first asks the job to save and leave."""
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not asked:
            process.send_signal(signal.SIGTERM)
        asked.append(number)

    ours = FORWARDED_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        return process.wait(), asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
