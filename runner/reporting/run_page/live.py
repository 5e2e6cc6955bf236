"""report.html of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runner.reporting.live_page import RepeatedPage

MAX_LIVE_BYTES = 8 << 20  # of metrics.jsonl, about 30,000 records: a page reads all of them, and training waits for half a second


class LivePage(RepeatedPage):
    """Writes the page after a logged record, in a small share of the time. What goes wrong is passed to `warn` once and never stops the run."""

    def __init__(self, run_dir: Callable[[], Path], check_owned: Callable[[], None], warn: Callable[[str], None]) -> None:
        """`check_owned` raises if the directory no longer belongs to this process: then nothing is written."""

        def write_page() -> None:
            from runner.reporting.run_page.page import write_run_page

            check_owned()
            write_run_page(run_dir())

        super().__init__(write_page, warn)
        self._run_dir, self._is_short = run_dir, True

    def record_logged(self) -> None:
        if self._is_short and self._is_due() and not self._stays_short():
            self._is_short = False
            limit = f"metrics.jsonl is larger than {MAX_LIVE_BYTES >> 20} MiB: report.html is next written at the end"
            self._warn(f"{limit}; report.py run={self._run_dir()} serve=true draws it in a process of its own")
        if self._is_short:
            self.write_if_due()

    def _stays_short(self) -> bool:
        with suppress(OSError):
            return (self._run_dir() / "metrics.jsonl").stat().st_size <= MAX_LIVE_BYTES
        return True
