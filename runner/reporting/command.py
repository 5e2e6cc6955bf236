"""report.py: the page of a run or sweep, of several runs side by side, or of all runs; its numbers as text, or written
to a tracker; all of it served on this machine.
"""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from common.errors import TrainingError, UserError, did_you_mean_path, print_safely
from common.paths import display_path, outputs_dir
from runner.config.compose import compose_config
from runner.reporting.compare import compare_page, compare_text, read_comparison
from runner.reporting.leaderboard import LEADERBOARD_FILE, leaderboard_text, resolve_sweep
from runner.reporting.page_kit import write_text
from runner.reporting.page_server import comparison_bytes, folder_pages, list_pages, serve_pages, write_page
from runner.reporting.run_facts import run_text
from runner.reporting.run_list import file_link, list_page, list_text, scan_runs
from runner.reporting.runs import Run, as_dict, expand_sweeps, is_file, resolve_runs
from runner.run_dir.contents import find_runs, is_sweep_dir
from runner.run_dir.saved_config import load_saved_config
from runner.tracking.config import TRACKERS, ExternalTrackerConfig
from runner.tracking.tracker_process import TrackerProcess, describe_experiment

COMPARISON_FILE, LIST_FILE = "compare.html", "index.html"  # in outputs/
REPLAY_SECONDS = 600.0  # one run; a million records take TensorBoard and SwanLab less
REPLAYED_STATUS = {"completed": "completed", "interrupted": "interrupted", "running": "interrupted"}  # others: failed


@dataclass
class ReportConfig:
    # a run or sweep directory, any path in it, or last; several, separated by commas, are compared, a sweep stands for
    # its jobs
    run: Optional[str]
    sweep: Optional[str]  # a sweep directory, any path in it, or last: the newest sweep
    all: bool  # list all runs and sweeps in outputs/
    root: Optional[str]  # with all=true: the folder whose runs are listed; null: outputs/
    # HTML file of a comparison or list, null: outputs/compare.html or index.html; or a tracker: swanlab, tensorboard,
    # wandb
    to: Optional[str]
    # serve the page on 127.0.0.1 until Ctrl-C; it is written again at each request and reloads while a run trains
    serve: bool
    port: int  # of serve=true; 0: a free one

    def __post_init__(self) -> None:
        given = [
            f"{name}={value}"
            for name, value in (("run", self.run), ("sweep", self.sweep), ("all", "true" if self.all else None))
            if value
        ]
        if len(given) != 1:
            message = f"report.py {'takes' if given else 'needs'} one of run=, sweep= and all=true"
            raise UserError(message, " ".join(given) or "report.py", "run=last, run=DIR,DIR, sweep=last or all=true")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"port must be from 0 to 65535, got {self.port}", f"port={self.port}", "port=0")
        if self.port and not self.serve:
            raise UserError(
                "port is read with serve=true only", f"port={self.port}", "add serve=true, or leave port out"
            )
        if self.root and not self.all:
            raise UserError("root is read with all=true only", f"root={self.root}", "add all=true, or leave root out")
        if self.to and self.serve:
            raise UserError("serve=true writes no file", f"to={self.to} serve=true", "leave out one of them")
        if self.to and not is_tracker(self.to) and Path(self.to).suffix.lower() not in (".html", ".htm"):
            raise UserError(
                f"to must be a tracker or a file that ends in .html, got {self.to}",
                f"to={self.to}",
                f"to={self.to}.html",
            )
        if is_tracker(self.to) and self.all:
            raise UserError(
                "a list of runs is not written to a tracker", f"all=true to={self.to}", f"run=DIR to={self.to}"
            )


def print_report(cfg: ReportConfig) -> None:
    """Write the page that is asked for and print its numbers, serve it, or write runs to a tracker."""
    if cfg.all:
        return _report_all(_root(cfg.root), cfg)
    folders = [resolve_sweep(cfg.sweep)] if cfg.sweep else resolve_runs(cfg.run or "last")
    if is_tracker(cfg.to):
        for folder in folders:
            replay(folder, str(cfg.to))
        return
    if len(folders) > 1:
        return _report_comparison(folders, cfg)
    if cfg.to:
        raise UserError(
            "the page of one run or sweep is written into its directory",
            f"to={cfg.to}",
            "leave to= out, or name several runs: run=DIR,DIR",
        )
    _report_folder(folders[0], cfg)


def _report_folder(folder: Path, cfg: ReportConfig) -> None:
    page = write_page(folder)
    if is_sweep_dir(folder):
        print_safely(f"{leaderboard_text(folder)}\n\npage: {page}\ntable: {folder / LEADERBOARD_FILE}")
    else:
        print_safely(f"{run_text(folder)}\n\npage: {page}")
    if cfg.serve:
        serve_pages(str(folder), folder_pages(folder), cfg.port)


def _report_comparison(folders: list[Path], cfg: ReportConfig) -> None:
    runs = expand_sweeps(folders)
    comparison = read_comparison(runs)
    if cfg.serve:
        print_safely(compare_text(comparison))
        return serve_pages(
            f"{len(runs)} runs", lambda path, query: None if path else comparison_bytes(folders), cfg.port
        )
    target = output_file(cfg.to, outputs_dir() / COMPARISON_FILE)
    write_text(target, compare_page(comparison))
    print_safely(f"{compare_text(comparison)}\n\npage: {display_path(target)}")


def _report_all(root: Path, cfg: ReportConfig) -> None:
    if cfg.serve:
        return serve_pages(str(root), list_pages(root), cfg.port)
    runs = scan_runs(root)
    target = output_file(cfg.to, root / LIST_FILE)
    write_text(target, list_page(runs, lambda row: file_link(row, target), is_served=False))
    print_safely(f"{list_text(runs)}\n\npage: {display_path(target)}")


def _root(name: str | None) -> Path:
    root = Path(name).expanduser().absolute() if name else outputs_dir()
    if root.is_dir():
        return root
    if name:
        raise UserError(f"{root} is no directory", f"root={name}", did_you_mean_path(name))
    raise UserError(f"there are no runs yet: {root} does not exist", "all=true", "start one: python runner/train.py")


def output_file(name: str | None, default: Path) -> Path:
    """Return the file to write, in a folder that exists.

    Raises UserError for a folder, a link, and a file in a folder that does not exist.
    """
    path = Path(name).expanduser().absolute() if name else default
    if name and not path.parent.is_dir():
        raise UserError(
            f"the folder {path.parent} does not exist", f"to={name}", "make it first, or name a file in another folder"
        )
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is no regular file", f"to={path}", "to=FILE.html with another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def is_tracker(name: str | None) -> bool:
    """Return whether `to=name` names a tracker, and not a file."""
    return name in TRACKERS.names() and name != "none"


def replay(folder: Path, name: str) -> None:
    """Write the run in `folder`, or each job of the sweep, to the tracker `name`, and print where it is.

    What an earlier replay wrote is replaced.

    Raises UserError if the run still trains or has logged nothing, TrainingError if the tracker fails.
    """
    config = compose_config([f"tracker={name}"]).tracker
    if not isinstance(config, ExternalTrackerConfig):
        raise UserError(
            f"the tracker {name} cannot write a run afterwards",
            f"to={name}",
            "its class must extend ExternalTrackerConfig",
        )
    config.check_installed()
    runs = sorted(find_runs(folder)) if is_sweep_dir(folder) else [folder]
    logged = [run for run in runs if any(_log_sizes(run).values())]
    if not logged:
        raise UserError("nothing has been logged there yet", f"run={folder}", "run=last, or sweep=last")
    for run in logged:
        if Run.read(run).is_running:
            raise UserError(
                f"{run} still trains", f"to={name}", f"wait for its end; tracker={name} follows a run while it trains"
            )
    for run in logged:
        replay_run(run, config)
    if len(logged) < len(runs):
        print_safely(f"{len(runs) - len(logged)} jobs have logged nothing and are left out")


def replay_run(run: Path, config: ExternalTrackerConfig) -> None:
    """Write one run to its tracker, with the id that it has there already or the id of the run."""
    fields, saved = Run.read(run).fields, load_saved_config(run)
    status = REPLAYED_STATUS.get(fields["status"], "failed")
    warnings: list[str] = []
    project = as_dict(saved.get("tracker")).get("project")  # that it was logged to while it trained
    project = project if isinstance(project, str) and project else config.project
    settings = dataclasses.asdict(dataclasses.replace(config, mode="offline", project=project))
    tracker = TrackerProcess(config.command() or [], run / config.name, print_safely, warnings.append)
    tracker.start(
        settings=settings,
        id=str(fields.get("tracker_id") or fields["id"] or run.name),
        config={name: value for name, value in saved.items() if name != "hydra"},
        history=_log_sizes(run),
        is_replay=True,
        **describe_experiment(run, saved),
    )
    tracker.finish(status, fields["error"])
    if not tracker.wait(time.monotonic() + REPLAY_SECONDS):
        reason = (
            re.sub(r" \(training continues;.*", "", warnings[0])
            if warnings
            else f"it failed; {run / config.name / 'tracker.log'} has the cause"
        )
        raise TrainingError(f"{run} could not be written: {reason}")


def _log_sizes(run: Path) -> dict[str, int]:
    paths = {name: run / f"{name}.jsonl" for name in ("metrics", "samples")}
    return {name: path.stat().st_size if is_file(path) else 0 for name, path in paths.items()}
