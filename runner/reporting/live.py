"""A page that is written again while what it shows goes on: report.html of a sweep, and of a run that trains."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from common.paths import REPO_ROOT
from runner.run_dir.metadata import RunMetadata

# of metrics.jsonl, about 30,000 records: a page reads all of them, and training waits for half a second
MAX_LIVE_BYTES = 8 << 20
MAX_SHARE = 0.005  # of the time, for a page that this process writes
SECONDS_BETWEEN_PAGES = 5.0  # at least, between two pages
MAX_CHILD_SHARE = 0.01  # of the time in which a process of its own writes the page of a longer file
SECONDS_TO_END = 5.0
WRITE_PAGE = """
import os, sys
os.nice(19)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from runner.reporting.run_page import write_run_page
write_run_page(Path(sys.argv[2]))
"""


class RepeatedPage:
    """Calls `write_page` in at most MAX_SHARE of the time after the first page.

    What goes wrong is passed to `warn` once and never raised.
    """

    def __init__(self, write_page: Callable[[], object], warn: Callable[[str], None]) -> None:
        self._write_page, self._warn = write_page, warn
        self._has_warned = self._has_written = False
        self._due = 0.0  # monotonic time of the next page

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        begun = time.monotonic()
        try:
            self._write_page()
        # the page only repeats what the other files hold: nothing that is wrong with it may end a training
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"report.html cannot be written: {type(error).__name__}: {error}")
        ended = time.monotonic()
        # the first page imports and compiles what the others use
        share = (ended - begun) / MAX_SHARE if self._has_written else 0.0
        self._has_written, self._due = True, ended + max(SECONDS_BETWEEN_PAGES, share)


class LivePage(RepeatedPage):
    """Writes the page after a logged record, in a small share of the time.

    What goes wrong is passed to `warn` once and never stops the run.

    While metrics.jsonl is longer than MAX_LIVE_BYTES, a child process writes the page, so that training does not wait
    for it.
    """

    def __init__(self, metadata: RunMetadata, warn: Callable[[str], None]) -> None:
        """Nothing is written into a directory that no longer belongs to this process."""

        def write_page() -> None:
            from runner.reporting.run_page import write_run_page

            metadata.check_owned()
            write_run_page(metadata.folder)

        super().__init__(write_page, warn)
        self._metadata = metadata
        self._child: subprocess.Popen[bytes] | None = None
        self._begun = 0.0  # monotonic time at which the child was started

    def record_logged(self) -> None:
        if self._child is None:
            if time.monotonic() >= self._due:
                self._start_child() if self._is_long() else self.write()
        elif self._child.poll() is not None:
            self._child, now = None, time.monotonic()
            self._due = now + max(SECONDS_BETWEEN_PAGES, (now - self._begun) / MAX_CHILD_SHARE)

    def write(self) -> None:
        """Write the page in this process, after the one that a child is writing: that one is older."""
        if self._child is not None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):  # while the disk does not answer
                self._child.wait(SECONDS_TO_END)
            self._child = None
        super().write()

    def _start_child(self) -> None:
        self._begun = time.monotonic()
        with suppress(Exception):  # the page at the end of the run names what is wrong, as the next record tries again
            self._metadata.check_owned()
            command = [sys.executable, "-c", WRITE_PAGE, str(REPO_ROOT), str(self._metadata.folder)]
            no = subprocess.DEVNULL
            self._child = subprocess.Popen(command, stdin=no, stdout=no, stderr=no)
        self._due = self._begun + SECONDS_BETWEEN_PAGES

    def _is_long(self) -> bool:
        with suppress(OSError):
            return (self._metadata.folder / "metrics.jsonl").stat().st_size > MAX_LIVE_BYTES
        return False
