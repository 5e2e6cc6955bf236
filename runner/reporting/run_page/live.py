"""report.html of a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MAX_SHARE = 0.005  # of the time of training
SECONDS_BETWEEN_PAGES = 5.0  # between two pages


class LivePage:
    """Writes the page after a logged record, in at most MAX_SHARE of the time. What goes wrong is passed to `warn` once and never stops the run."""

    def __init__(self, run_dir: Callable[[], Path], check_owned: Callable[[], None], warn: Callable[[str], None]) -> None:
        """`check_owned` raises if the directory no longer belongs to this process: then nothing is written."""
        self._run_dir, self._check_owned, self._warn = run_dir, check_owned, warn
        self._has_warned = False
        self._due = 0.0  # monotonic time of the next page

    def record_logged(self) -> None:
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        begun = time.monotonic()
        try:
            from runner.reporting.run_page.page import write_run_page

            self._check_owned()
            write_run_page(self._run_dir())
        except Exception as error:  # the page only repeats what the other files hold: nothing that is wrong with it may end a training
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"report.html cannot be written: {type(error).__name__}: {error}")
        ended = time.monotonic()
        self._due = ended + max(SECONDS_BETWEEN_PAGES, (ended - begun) / MAX_SHARE)
