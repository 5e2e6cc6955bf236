"""A page that is written again while what it shows goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_SHARE = 0.005  # of the time
SECONDS_BETWEEN_PAGES = 5.0  # at least, between two pages


class RepeatedPage:
    """Calls `write_page` in at most MAX_SHARE of the time after the first page. What goes wrong is passed to `warn` once and never raised."""

    def __init__(self, write_page: Callable[[], object], warn: Callable[[str], None]) -> None:
        self._write_page, self._warn = write_page, warn
        self._has_warned = False
        self._has_written = False
        self._due = 0.0  # monotonic time of the next page

    def write_if_due(self) -> None:
        if self._is_due():
            self.write()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def write(self) -> None:
        begun = time.monotonic()
        try:
            self._write_page()
        except Exception as error:  # the page only repeats what the other files hold: nothing that is wrong with it may end a training
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"report.html cannot be written: {type(error).__name__}: {error}")
        ended = time.monotonic()
        share = (ended - begun) / MAX_SHARE if self._has_written else 0.0  # the first page imports and compiles what the others use
        self._has_written, self._due = True, ended + max(SECONDS_BETWEEN_PAGES, share)
