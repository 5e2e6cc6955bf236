"""The door of train.py: words are checked, a folder is taken, Hydra is let in, and every end gets its exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from common import errors, exit_codes
from common.errors import UserError
from runner.cli import help, show_config
from runner.config import flags as flags_module
from runner.config import overrides
from runner.config.compose import register_configs
from runner.config.hydra_errors import translating_hydra_errors
from runner.engine.device.cpu import set_passive_omp_wait
from runner.launch import preflight, torchrun
from runner.launch.subprocesses import run_then_hard_exit
from runner.run_dir import config_snapshot, naming, resolve
from runner.run_dir import resume as resume_module
from runner.run_dir.metadata import RunMetadata
from runner.sweep import command
from runner.tracking.progress import ignore_broken_pipe

COMPLETION_FLAGS = {"--shell-completion", "-sc", "--hydra-help", "--version"}
SHOW_FLAGS = {"--cfg", "-c", "--info", "-i"}
MULTIRUN_FLAGS = {"--multirun", "-m"}
RESUME_KEY = "resume="
QUOTED = re.compile(r"\A(['\"])(.*)\1\Z")  # as Hydra wants words with blanks in them; a path needs none
RESUME_IN_COMP_LINE = re.compile(r" resume=(?:\\.|[^\\\s])+(?= )")  # that is no longer being typed

show_tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"  # as the user set it, before we do
opened_records: list[RunMetadata] = []  # the run of this process, its lock held since before Hydra wrote into its folder


def main(app: Callable[[], None]) -> None:
    """Run a Hydra app on sys.argv. A user's mistake is three lines and exit 2, before any folder exists."""
    set_passive_omp_wait()
    ignore_broken_pipe()
    if torchrun.is_multi_process():
        run_then_hard_exit(torchrun.worker_main if torchrun.is_worker() else lambda: _main(app))
    _main(app)


def _main(app: Callable[[], None]) -> None:
    try:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of to Hydra's printer
        with torchrun.releasing_workers():
            _dispatch(app)
    except Exception as error:
        exit_with_code_of(error)
        raise


def _dispatch(app: Callable[[], None]) -> None:
    typed, flags = flags_module.split_argv(sys.argv[1:])
    if {"--help", "-h"} & set(flags):
        return print(help.train_help())
    flags_module.check_no_dashed_settings(flags)
    typed = [overrides.normalize_int(word) for word in typed]
    sys.argv[1:] = [*flags, *typed]
    names = {flag.split("=")[0] for flag in flags}
    if names & COMPLETION_FLAGS:
        register_configs()
        if "COMP_LINE" in os.environ:  # which run is meant changes nothing in what can be said, and its path need not be one that Hydra can read
            os.environ["COMP_LINE"] = RESUME_IN_COMP_LINE.sub("", os.environ["COMP_LINE"])
        with translating_hydra_errors(typed):
            return app()
    resolve.check_resumable_flags(flags)
    if MULTIRUN_FLAGS & names and names & SHOW_FLAGS:
        raise UserError("a sweep is many runs", " ".join(flags), "look at one of them: leave out --multirun, and give each word one value")
    if former := torchrun.previous_run_dir():
        return _resume(former, [], [flag for flag in flags if flag not in MULTIRUN_FLAGS], app)
    resume = [QUOTED.sub(r"\2", word.removeprefix(RESUME_KEY)) for word in typed if word.startswith(RESUME_KEY)]
    typed = overrides.absolutize_paths([word for word in typed if not word.startswith(RESUME_KEY)])
    if resume and resume[-1] != "null":
        return _resume(resolve.resolve_run(resume[-1]), typed, flags, app)
    if names & SHOW_FLAGS:
        overrides.check_overrides(typed)
        sys.argv[1:] = [*flags, *typed]
        register_configs()
        with translating_hydra_errors(typed):
            return app()
    _check_hydra_overrides(typed)
    if MULTIRUN_FLAGS & names:
        return command.start_sweep(typed, flags, app)
    folder = preflight.checked_run_dir(typed)
    if not any(word.startswith("hydra.run.dir=") for word in typed):
        naming.create_unique(sweep=False)
        folder = preflight.checked_run_dir(typed)
    resolve.check_not_inside_run(folder)
    opened_records.append(RunMetadata.open(folder))
    sys.argv[1:] = [*flags, *typed]
    app()


def _check_hydra_overrides(typed: list[str]) -> None:
    """Words to Hydra that would make a run which cannot be continued, or another one than was meant."""
    for word in typed:
        name, _, value = word.lstrip("+").partition("=")
        if name in ("hydra.run.dir", "hydra.sweep.dir") and not value:
            raise UserError("a run needs a folder", word, "give one, or leave the word out")
        if name == "hydra.output_subdir":
            raise UserError("a run keeps its words in .hydra, it is continued from there", word, "leave the word out")
        if name == "hydra.mode":
            raise UserError("whether this is a sweep is said by a flag", word, "leave the word out; --multirun trains every combination")


def _resume(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    looking = {flag.split("=")[0] for flag in flags} & SHOW_FLAGS
    if resolve.is_sweep_dir(folder) and not looking:
        return command.resume_sweep(folder, extra, flags, app)
    if resolve.is_sweep_dir(folder):
        return show_config.show_sweep_config(folder, extra, flags, app)
    if looking:
        plan = resume_module.plan_resume(folder, extra)
        resume_module.print_notes(plan)
        return resume_module.show_resumed_config(plan, flags, app)
    if MULTIRUN_FLAGS & set(flags):
        raise UserError("this folder holds one run", f"--multirun resume={folder}", "leave the flag out; it goes with the folder of a sweep")
    with RunMetadata.open(folder, resume=True) as record:
        plan = resume_module.plan_resume(folder, extra, begun=record.attempt > 0)
        resume_module.print_notes(plan)
        if record.status == "completed" and not plan.news:
            return print(f"{folder}: already complete at step {record.fields['step']}")
        preflight.check_inputs(plan.config)
        with resume_module.persisting_overrides(plan) as config:
            from runner.launch.run import run

            loss = run(config, record)
    print(f"{folder}: completed, loss {loss:.4f}")


def open_run_metadata(tree: DictConfig) -> RunMetadata:
    """The record of the run that Hydra has just placed. A job of a sweep comes through the door by itself, whatever has launched it.

    What Hydra has written of its words is made to last: what was looked up stays what it was, and the YAML files are copied.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record = opened_records.pop()
    try:
        resume_module.freeze_saved_config(folder, tree)
        config_snapshot.save_snapshot(folder, list(hydra.overrides.task))
    except OSError as error:
        record.close()
        raise UserError(f"a run cannot live here: {error.strerror or error}", str(folder), "place it elsewhere with hydra.run.dir=DIR") from error
    return record


@contextmanager
def exiting_with_code() -> Iterator[None]:
    """Around a run: an end that has an exit code leaves with it."""
    try:
        yield
    except Exception as error:
        exit_with_code_of(error)
        raise


def exit_with_code_of(error: Exception) -> None:
    """Exit with the code of `error`; a bug, and any error where the user wants tracebacks, comes back."""
    if not show_tracebacks and (code := exit_code_of(error)) is not None:
        sys.exit(code)


def exit_code_of(error: Exception) -> int | None:
    """The exit code of an end that has been explained; None for a bug, which shows its traceback."""
    from common.errors import Interrupted, TrainingError

    if isinstance(error, HydraException):
        error = translating_hydra_errors([]).refusal(error)
    if errors.is_user_error(error):
        return errors.report_user_error(error)
    if isinstance(error, Interrupted):
        print(f"{error}; continue with: {errors.resume_command(error.folder)}", file=sys.stderr)
        return exit_codes.INTERRUPTED
    if isinstance(error, TrainingError):
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.FAILED
    return None
