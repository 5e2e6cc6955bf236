"""report.py: write the page of a run or sweep again, print its numbers, and serve the page on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from common.errors import UserError, print_safely
from runner.reporting.page_server import serve_page
from runner.reporting.run_page.page import run_text, write_run_page
from runner.reporting.sweep_results.leaderboard import LEADERBOARD_FILE, REPORT_FILE, leaderboard_text, resolve_sweep, update_report
from runner.run_dir.resolve import is_sweep_dir, resolve_run


@dataclass
class ReportConfig:
    sweep: Optional[str]  # a sweep directory, any path in it, or `last`: the newest sweep
    run: Optional[str]  # a run or sweep directory, any path in it, or `last`: the newest of both
    serve: bool  # serve the page on 127.0.0.1 until Ctrl-C; it is written again at each request and reloads while the run trains
    port: int  # of serve=true; 0: a free one

    def __post_init__(self) -> None:
        if bool(self.sweep) == bool(self.run):
            raise UserError("report.py needs one run or sweep", f"sweep={self.sweep} run={self.run}", "run=DIR, run=last or sweep=last")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"port must be from 0 to 65535, got {self.port}", f"port={self.port}", "port=0")


def print_report(cfg: ReportConfig) -> None:
    """Write the page of a run or sweep, print its numbers, and serve it where that is asked for."""
    folder = resolve_sweep(cfg.sweep) if cfg.sweep else resolve_run(cfg.run or "last", "run")
    page = write_page(folder)
    if is_sweep_dir(folder):
        print_safely(f"{leaderboard_text(folder)}\n\npage: {page}\ntable: {folder / LEADERBOARD_FILE}")
    else:
        print_safely(f"{run_text(folder)}\n\npage: {page}")
    if cfg.serve:
        serve_page(folder, lambda: write_page(folder), cfg.port)


def write_page(folder: Path) -> Path:
    """Write report.html of the run or sweep in `folder` again; return its path."""
    if not is_sweep_dir(folder):
        return write_run_page(folder)
    update_report(folder)
    return folder / REPORT_FILE
