"""External tracker in its own process.

It may raise, hang, patch signal handlers or wait for a network without any effect on training, and it outlives a kill
-9 of the trainer long enough to record the run as crashed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from common.guarded_files import last_lines, open_append
from common.paths import REPO_ROOT, command_line_here

QUEUE_SIZE = 10_000  # messages kept for a slow tracker
MAX_TRACKER_LOG_BYTES = 1 << 20  # read from the end of the log
CLOSE_TIMEOUT = 10.0  # seconds a tracker has to finish
MAX_FILE_BYTES = 1 << 30  # of each file of a tracker; one that writes on is ended by the system
MAX_SHOWN_LINES, MAX_SHOWN_BYTES = 20, 1000  # of a tracker's output that are shown, and bytes of a line


class TrackerProcess:
    """Sends messages to a tracker's process, one JSON object per line: the settings first, then events `log`, `samples`
    and `finish`.

    No method blocks (`wait` waits at most until its deadline) and none raises: the first error becomes a warning, later
    ones are silent. What the process prints is passed to `info`; its stderr goes to `<folder>/tracker.log`.
    """

    def __init__(
        self, command: list[str], folder: Path, info: Callable[[str], None], warning: Callable[[str], None]
    ) -> None:
        """`folder`: that of the tracker in the run directory; its name is the name of the tracker."""
        self._command, self._folder, self._info, self._warning = command, folder, info, warning
        self._log_path = folder / "tracker.log"
        self._messages: queue.Queue[dict[str, object]] = queue.Queue(QUEUE_SIZE)
        self._process: subprocess.Popen[str] | None = None
        self._writer: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._finishing = False
        self._warned = threading.Lock()  # acquired by the first warning and never released

    def start(self, **first: object) -> None:
        """Start the process; `first`: fields of its first message besides `folder`."""
        first["folder"] = str(self._folder.absolute())
        self._writer = threading.Thread(target=self._writer_loop, args=(first,), name="tracker writer", daemon=True)
        self._writer.start()

    def send(self, event: str, **fields: object) -> None:
        while True:
            try:
                return self._messages.put_nowait({"event": event, **fields})
            except queue.Full:
                self._warn_once("it is too slow, the oldest numbers are dropped")
                with contextlib.suppress(queue.Empty):  # the writer thread has taken it meanwhile
                    self._messages.get_nowait()

    def finish(self, status: str, error: str) -> None:
        """Tell the process to end."""
        self._finishing = True
        self.send("finish", status=status, error=error)

    def wait(self, deadline: float) -> bool:
        """Wait for the process to end, until `deadline` (time.monotonic()); then kill it and what it has started.
        Return whether it ended well.
        """
        if self._writer is not None:
            self._writer.join(max(0.0, deadline - time.monotonic()))
        if self._process is None:
            return False
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            again = [*command_line_here("report"), f"run={self._folder.parent}", f"to={self._folder.name}"]
            self._warn_once(
                f"it did not finish in time and was ended; its files are written again by {shlex.join(again)}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a group of its own: start_new_session
        if self._reader is not None:
            self._reader.join(1.0)  # its last output, or the warning about its exit code
        return self._process.poll() == 0

    def _writer_loop(self, first: dict[str, object]) -> None:
        try:
            if self._folder.is_symlink():
                raise OSError(errno.ELOOP, "a link is not followed", str(self._folder))
            self._folder.mkdir(parents=True, exist_ok=True)
            paths = [str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            with open_append(self._log_path) as log:
                # A session of its own: Ctrl-C and a scheduler's signals are meant for the trainer, which then sends
                # `finish`.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
            _limit_files(self._process.pid)
            self._reader = threading.Thread(
                target=self._reader_loop, args=(self._process,), name="tracker reader", daemon=True
            )
            self._reader.start()
            with self._process.stdin as pipe:  # type: ignore[union-attr]  # stdin=PIPE
                self._write(pipe, first)
        except BrokenPipeError:
            return  # the process has ended; the reader thread reports how
        except OSError as error:
            self._warn_once(str(error))

    def _write(self, pipe: IO[str], message: dict[str, object]) -> None:
        while True:
            pipe.write(json.dumps(message, default=str) + "\n")  # str: a date in the YAML of a replayed run
            pipe.flush()
            if message.get("event") == "finish":
                return
            message = self._messages.get()

    def _reader_loop(self, process: subprocess.Popen[str]) -> None:
        with process.stdout as output:  # type: ignore[union-attr]  # stdout=PIPE
            shown = 0
            while line := output.readline(MAX_SHOWN_BYTES):
                shown += 1
                if shown > MAX_SHOWN_LINES:
                    self._warn_once(f"it prints more than {MAX_SHOWN_LINES} lines, the others are not shown")
                    break  # closes the pipe: a program that prints on is ended by the system
                self._info(line.rstrip("\n"))
        if process.wait() or not self._finishing:
            self._warn_once(_last_line(self._log_path) or f"it exited with code {process.returncode}")

    def _warn_once(self, reason: str) -> None:
        if self._warned.acquire(blocking=False):
            self._warning(
                f"tracker {self._folder.name}: {reason} (training continues; metrics.jsonl is complete; details in {self._log_path})"
            )


def finish_trackers(trackers: Iterable[TrackerProcess], status: str, error: str) -> None:
    """End all trackers at the same time; they have CLOSE_TIMEOUT seconds together."""
    trackers = list(trackers)
    for tracker in trackers:
        tracker.finish(status, error)
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for tracker in trackers:
        tracker.wait(deadline)


def describe_experiment(run_dir: Path, run_config: dict[str, Any]) -> dict[str, Any]:
    """Return `name`, `group` (the sweep that the run is a job of, else empty), `tags`, `note` and `stage` of a run for
    its trackers.
    """
    run_dir = run_dir.absolute()
    section, stage = (value if isinstance(value := run_config.get(name), dict) else {} for name in ("run", "stage"))
    sweep = next((folder for folder in run_dir.parents[:2] if (folder / "sweep.json").is_file()), None)
    location = str(run_dir.relative_to(sweep)) if sweep else "/".join(run_dir.parts[-2:])
    name, tags = str(section.get("name") or ""), section.get("tags")
    return {
        "name": " ".join(filter(None, [name, location])) if sweep else name or location,
        "group": "/".join(sweep.parts[-2:]) if sweep else "",
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "note": str(section.get("note") or ""),
        "stage": str(stage.get("name") or ""),
    }


def _limit_files(pid: int) -> None:
    """Limit the size of each file that the process writes. Without effect where the system cannot."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        limit = MAX_FILE_BYTES if hard == resource.RLIM_INFINITY else min(MAX_FILE_BYTES, hard)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))


def _last_line(path: Path) -> str:
    lines = reversed(last_lines(path, MAX_TRACKER_LOG_BYTES))
    return next((line.strip() for line in lines if line.strip()), "")
