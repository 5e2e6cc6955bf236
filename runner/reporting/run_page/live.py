"""report.html of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runner.reporting.live_page import RepeatedPage


class LivePage(RepeatedPage):
    """Writes the page after a logged record, in a small share of the time. What goes wrong is passed to `warn` once and never stops the run."""

    def __init__(self, run_dir: Callable[[], Path], check_owned: Callable[[], None], warn: Callable[[str], None]) -> None:
        """`check_owned` raises if the directory no longer belongs to this process: then nothing is written."""

        def write_page() -> None:
            from runner.reporting.run_page.page import write_run_page

            check_owned()
            write_run_page(run_dir())

        super().__init__(write_page, warn)

    def record_logged(self) -> None:
        self.write_if_due()
