"""The pages that report.py serves: a list of runs with a page for each, comparisons, and a sweep with its jobs. They
are not written to disk.
"""

from __future__ import annotations

import stat
import time
from pathlib import Path

from common.errors import UserError
from runner.reporting.page_server import Pages
from runner.reporting.run_folders import expand_sweeps, is_file, job_folders
from runner.reporting.sweep_results.leaderboard import REPORT_FILE
from runner.run_dir.contents import RUN_FILE, SWEEP_FILE, check_run_files, is_sweep_dir

RUN_PREFIX = "run/"  # of the address of a run's page
SCAN_SHARE = 0.1  # of the time at most: a list of many runs is kept longer


def list_pages(root: Path) -> Pages:
    """Return the pages of the list of `root`: "", `run/<path below root>/` and `compare?run=<path>&run=<path>`. Only
    runs below `root` are opened.
    """
    from runner.reporting.run_list.page import list_page, served_link
    from runner.reporting.run_list.scan import scan_runs

    kept, kept_until = b"", 0.0  # the list and the monotonic time until which it is not made again

    def listed() -> bytes:
        nonlocal kept, kept_until
        if time.monotonic() >= kept_until:
            begun = time.monotonic()
            kept = _encoded(list_page(scan_runs(root), served_link(root), is_served=True))
            kept_until = time.monotonic() + (time.monotonic() - begun) / SCAN_SHARE
        return kept

    def pages(path: str, query: dict[str, list[str]]) -> bytes | None:
        if not path:
            return listed()
        if path == "compare":
            names = query.get("run", [])
            folders = [run_folder(root, name) for name in names]
            missing = [name for name, folder in zip(names, folders, strict=True) if folder is None]
            if missing or not names:
                message = f"the list has no run {missing[0]}" if missing else "no run is chosen"
                raise UserError(message, f"compare?run={missing[0] if missing else ''}", "choose runs in the list")
            return comparison_bytes([folder for folder in folders if folder is not None])
        folder = run_folder(root, path.removeprefix(RUN_PREFIX).removesuffix(REPORT_FILE).rstrip("/"))
        return page_bytes(folder) if path.startswith(RUN_PREFIX) and folder is not None else None

    return pages


def run_folder(root: Path, name: str) -> Path | None:
    """Return the run or sweep at the relative path `name` below `root`; None if there is none, or the path leads
    through a link or out of `root`.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        return None
    folder = root
    for part in parts:
        folder = folder / part
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                return None
        except OSError:
            return None
    return folder if is_file(folder / RUN_FILE) or is_file(folder / SWEEP_FILE) else None


def folder_pages(folder: Path, page: Pages) -> Pages:
    """Return `page` and, below it, the pages of the jobs if `folder` is a sweep."""

    def pages(path: str, query: dict[str, list[str]]) -> bytes | None:
        if not path or not is_sweep_dir(folder):
            return page(path, query)
        name = path.removesuffix(REPORT_FILE).rstrip("/")
        return next((page_bytes(job) for job in job_folders(folder) if job.name == name), None)

    return pages


def comparison_bytes(folders: list[Path]) -> bytes:
    """Return the page that compares the runs and sweeps in `folders`."""
    from runner.reporting.compare_page.page import compare_page
    from runner.reporting.compare_page.read import read_comparison

    return _encoded(compare_page(read_comparison(expand_sweeps(folders)), reloads=True))


def page_bytes(folder: Path) -> bytes:
    """Return the page of the run or sweep in `folder`. Raises UserError if a file of it is a link."""
    if is_sweep_dir(folder):
        from runner.reporting.sweep_page.page import sweep_page
        from runner.reporting.sweep_results.read_results import read_sweep_results

        sweep = read_sweep_results(folder)
        return _encoded(sweep_page(sweep, is_final=sweep.status != "running"))
    from runner.reporting.run_page.page import run_page
    from runner.reporting.run_page.read import read_run_report

    check_run_files(folder)
    return _encoded(run_page(read_run_report(folder)))


def _encoded(page: str) -> bytes:
    return page.encode("utf-8", "backslashreplace")
