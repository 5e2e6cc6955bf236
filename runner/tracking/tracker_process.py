"""Copies of a run's numbers in outside trackers. Each tracker is a process of its own, so nothing it does can reach the training:
it may raise, hang, patch signal handlers or wait for a network, and it outlives a kill -9 long enough to write down that the run crashed."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

# tracker.name -> the program that reads our messages on its standard input
TRACKER_PROGRAMS = {"swanlab": Path(__file__).parent / "trackers" / "swanlab.py"}
QUEUE_LINES = 10_000  # messages kept for a tracker that is slow
CLOSE_TIMEOUT = 10.0  # seconds a tracker has to finish; none needs them unless it hangs


class TrackerProcess:
    """A tracker's program, fed one JSON message a line: start, log, text, finish.

    No verb blocks and none raises: the first trouble becomes one warning, later ones are silent.
    Whatever the program prints is passed to `say`; its standard error goes to `log_path`.
    """

    def __init__(self, command: list[str], log_path: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._command, self._log_path, self._say, self._warn = command, log_path, say, warn
        self._messages: queue.Queue[dict[str, object]] = queue.Queue(QUEUE_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._feeder: threading.Thread | None = None
        self._listener: threading.Thread | None = None
        self._finishing = False
        self._warned = threading.Lock()  # taken by the first warning and never given back

    def start(self, **settings: object) -> None:
        self._feeder = threading.Thread(target=self._feed, args=(settings,), name="mirror", daemon=True)
        self._feeder.start()

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._put({"verb": "log", "kind": kind, "step": step, "numbers": numbers})

    def text(self, step: int, samples: list[dict[str, str]]) -> None:
        self._put({"verb": "text", "step": step, "samples": samples})

    def finish(self, status: str, error: str) -> None:
        """Wait for the tracker to end, at most LAST_WORDS seconds; then it is ended."""
        self._finishing = True
        self._put({"verb": "finish", "status": status, "error": error})
        deadline = time.monotonic() + CLOSE_TIMEOUT
        if self._feeder is not None:
            self._feeder.join(CLOSE_TIMEOUT)
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._complain(f"it did not finish within {CLOSE_TIMEOUT:.0f} s")
            self._process.kill()
        if self._listener is not None:
            self._listener.join(1.0)  # its last words, a warning among them

    def _put(self, message: dict[str, object]) -> None:
        while True:
            try:
                return self._messages.put_nowait(message)
            except queue.Full:
                self._complain("it is too slow, the oldest numbers are dropped")
                with contextlib.suppress(queue.Empty):  # the feeder was quicker
                    self._messages.get_nowait()

    def _feed(self, settings: dict[str, object]) -> None:
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log_path, "a") as log:
                # A session of its own: Ctrl-C and a scheduler's signals are meant for the training, which then says goodbye properly.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8", start_new_session=True
                )
            self._listener = threading.Thread(target=self._listen, args=(self._process,), name="mirror-words", daemon=True)
            self._listener.start()
            with self._process.stdin as pipe:  # type: ignore[union-attr]  # a pipe was asked for
                self._pour(pipe, settings)
        except BrokenPipeError:
            return  # it ended; the listener knows how
        except OSError as error:
            self._complain(str(error))

    def _pour(self, pipe: IO[str], message: dict[str, object]) -> None:
        while True:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
            if message.get("verb") == "finish":
                return
            message = self._messages.get()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._say(line.rstrip("\n"))
        if process.wait() or not self._finishing:
            self._complain(_last_line(self._log_path) or f"it ended with code {process.returncode}")

    def _complain(self, what: str) -> None:
        if self._warned.acquire(blocking=False):
            self._warn(f"tracker: {what} (training goes on; metrics.jsonl has everything; details in {self._log_path})")


def start_tracker(name: str, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> TrackerProcess | None:
    """The tracker of this name, its files under `folder/<name>/`; None for `none`."""
    if name == "none":
        return None
    return TrackerProcess([sys.executable, "-P", str(TRACKER_PROGRAMS[name])], folder / name / "mirror.log", say, warn)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
