"""External tracker in its own process. It may raise, hang, patch signal handlers or wait for a network without any effect on training,
and it outlives a kill -9 of the trainer long enough to record the run as crashed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from common.guarded_files import open_append, read_from
from common.paths import REPO_ROOT

QUEUE_SIZE = 10_000  # messages kept for a slow tracker
MAX_TRACKER_LOG_BYTES = 1 << 20  # read from the end of the log
CLOSE_TIMEOUT = 10.0  # seconds a tracker has to finish


class TrackerProcess:
    """Sends messages to a tracker's process, one JSON object per line: the settings first, then events `log`, `samples` and `finish`.

    No method blocks (`finish` waits at most CLOSE_TIMEOUT) and none raises: the first error becomes a warning, later ones are silent.
    What the process prints is passed to `info`; its stderr goes to `log_path`.
    """

    def __init__(self, command: list[str], log_path: Path, info: Callable[[str], None], warning: Callable[[str], None]) -> None:
        self._command, self._log_path, self._info, self._warning = command, log_path, info, warning
        self._messages: queue.Queue[dict[str, object]] = queue.Queue(QUEUE_SIZE)
        self._process: subprocess.Popen[str] | None = None
        self._writer: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._finishing = False
        self._warned = threading.Lock()  # acquired by the first warning and never released

    def start(self, **settings: object) -> None:
        self._writer = threading.Thread(target=self._writer_loop, args=(settings,), name="tracker writer", daemon=True)
        self._writer.start()

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._send({"event": "log", "kind": kind, "step": step, "numbers": numbers})

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        self._send({"event": "samples", "step": step, "samples": samples})

    def finish(self, status: str, error: str) -> None:
        """Wait for the process to end, at most CLOSE_TIMEOUT seconds; then kill it."""
        self._finishing = True
        self._send({"event": "finish", "status": status, "error": error})
        deadline = time.monotonic() + CLOSE_TIMEOUT
        if self._writer is not None:
            self._writer.join(CLOSE_TIMEOUT)
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn_once(f"it did not finish within {CLOSE_TIMEOUT:.0f} s")
            self._process.kill()
        if self._reader is not None:
            self._reader.join(1.0)  # its last output, or the warning about its exit code

    def _send(self, message: dict[str, object]) -> None:
        while True:
            try:
                return self._messages.put_nowait(message)
            except queue.Full:
                self._warn_once("it is too slow, the oldest numbers are dropped")
                with contextlib.suppress(queue.Empty):  # the writer thread has taken it meanwhile
                    self._messages.get_nowait()

    def _writer_loop(self, settings: dict[str, object]) -> None:
        try:
            if self._log_path.parent.is_symlink():
                raise OSError(errno.ELOOP, "a link is not followed", str(self._log_path.parent))
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            paths = [str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            with open_append(self._log_path) as log:
                # A session of its own: Ctrl-C and a scheduler's signals are meant for the trainer, which then sends `finish`.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
            self._reader = threading.Thread(target=self._reader_loop, args=(self._process,), name="tracker reader", daemon=True)
            self._reader.start()
            with self._process.stdin as pipe:  # type: ignore[union-attr]  # stdin=PIPE
                self._write(pipe, settings)
        except BrokenPipeError:
            return  # the process has ended; the reader thread reports how
        except OSError as error:
            self._warn_once(str(error))

    def _write(self, pipe: IO[str], message: dict[str, object]) -> None:
        while True:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
            if message.get("event") == "finish":
                return
            message = self._messages.get()

    def _reader_loop(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._info(line.rstrip("\n"))
        if process.wait() or not self._finishing:
            self._warn_once(_last_line(self._log_path) or f"it exited with code {process.returncode}")

    def _warn_once(self, reason: str) -> None:
        if self._warned.acquire(blocking=False):
            self._warning(f"tracker: {reason} (training continues; metrics.jsonl is complete; details in {self._log_path})")


def _last_line(path: Path) -> str:
    try:
        lines = read_from(path, 0, MAX_TRACKER_LOG_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
