"""Entry point of train.py: checks the command line, then trains, resumes, sweeps or prints. Every end has its exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from common.errors import UserError, print_safely, strip_control
from common.plugins import import_plugins
from runner.cli import help, hydra_app, show_config
from runner.cli.exit_code import exiting_with_code
from runner.config import hydra_runtime, overrides
from runner.config.flags import RERUN_FLAGS, flag_value, has_flag, parse_argv
from runner.config.schema import config_groups, config_schema
from runner.config.unread import check_typed_are_read
from runner.engine.device.cpu.spinning import set_wait_policy
from runner.launch import preflight, torchrun
from runner.launch.subprocesses import run_then_hard_exit
from runner.recovery.recover import recover_run
from runner.run_dir import resolve, resume
from runner.run_dir.metadata import RunMetadata
from runner.sweep.command import RunHydra, resume_sweep, start_sweep
from runner.tracking.console.modes import open_console
from runner.tracking.progress import ignore_broken_pipe

EXTENDING_KEYS = ("train.max_steps=", "train.epochs=", "train.patience=")  # settings that let a completed run train on
LABEL_PREFIX = "run."  # name, tags and note
QUOTED = re.compile(r"\A(['\"])(.*)\1\Z")
RESUME_IN_COMP_LINE = re.compile(r" resume=(?:\\.|[^\\\s])+(?= )")

Task = Callable[[DictConfig], float]


def train_command(task: Task, argv: list[str] | None = None) -> None:
    """Execute the command line `argv` (default: of this process); Hydra calls `task` for a new run. Exits with the code of common/exit_codes.py."""
    set_wait_policy()
    ignore_broken_pipe()
    argv = sys.argv[1:] if argv is None else argv
    if torchrun.is_multi_process():
        run_then_hard_exit(lambda: _worker_main(argv) if torchrun.is_worker() else _main(task, argv))
    _main(task, argv)


def _main(task: Task, argv: list[str]) -> None:
    with exiting_with_code(), torchrun.releasing_workers():
        try:
            _dispatch(argv, partial(hydra_app.run_hydra, getattr(task, "__wrapped__", task)))
        finally:
            RunMetadata.discard_opened()  # Hydra refused a setting of its own after it had created the run directory


def _worker_main(argv: list[str]) -> int:
    with exiting_with_code():
        import_plugins(overrides.plugins_of(_parse(argv)[0]))
        return torchrun.worker_main()


def _dispatch(argv: list[str], run_hydra: RunHydra) -> None:
    typed, flags = _parse(argv)
    if has_flag(flags, "--shell-completion", "--hydra-help"):
        if "COMP_LINE" in os.environ:  # Hydra's parser refuses some paths, and resume= changes no completion
            os.environ["COMP_LINE"] = RESUME_IN_COMP_LINE.sub("", os.environ["COMP_LINE"])
        return run_hydra(typed, flags)
    typed = overrides.add_config_dir(typed, flag_value(flags, "--config-dir"))
    config_dirs = overrides.config_dirs(typed)
    if has_flag(flags, "--help"):
        import_plugins(overrides.plugins_of([overrides.absolutize_path(override) for override in typed]))
        return print(help.train_help(config_dirs))
    resolve.check_not_rerun(flags, config_dirs[1:])
    flags = [flag for flag in flags if flag.partition("=")[0] not in (*RERUN_FLAGS, "--config-dir")]
    is_show, is_multirun = has_flag(flags, "--cfg", "--info"), has_flag(flags, "--multirun")
    if is_multirun and is_show:
        raise UserError("a sweep is many runs, --cfg and --info print one", " ".join(flags), "leave out --multirun, and give each setting one value")
    resume_from = [QUOTED.sub(r"\2", override.removeprefix(overrides.RESUME_KEY)) for override in typed if override.startswith(overrides.RESUME_KEY)]
    typed = [overrides.absolutize_path(override) for override in typed if not override.startswith(overrides.RESUME_KEY)]
    import_plugins(overrides.plugins_of(typed))
    typed = [overrides.normalize_int(override) for override in typed]
    if folder := torchrun.previous_run_dir():
        return _resume(folder, [], [flag for flag in flags if flag != "--multirun"], run_hydra)
    if resume_from and resume_from[-1] != "null":
        return _resume(resolve.resolve_run(resume_from[-1]), typed, flags, run_hydra)
    overrides.check_overrides(typed)
    if is_show:
        return run_hydra(typed, flags)
    if not is_multirun:
        overrides.check_single_run(typed)
    typed = [resolve.resolve_model_override(override) for override in typed]
    if is_multirun:
        return start_sweep(typed, flags, run_hydra)
    run_hydra(typed, flags)


def _parse(argv: list[str]) -> tuple[list[str], list[str]]:
    return parse_argv(argv, [*config_schema(), *config_groups()])


def _resume(folder: Path, extra: list[str], flags: list[str], run_hydra: RunHydra) -> None:
    is_sweep = resolve.is_sweep_dir(folder)
    if has_flag(flags, "--cfg", "--info"):
        return (show_config.show_sweep_config if is_sweep else show_config.show_run_config)(folder, extra, flags, run_hydra)
    if is_sweep:
        return resume_sweep(folder, extra, flags, run_hydra)
    if has_flag(flags, "--multirun"):
        raise UserError("--multirun resumes a sweep, and this directory holds one run", f"--multirun resume={folder}", "leave out --multirun")
    resume_run(folder, extra)


def _label_run(metadata: RunMetadata, plan: resume.ResumePlan) -> None:
    """Record another name, tags or note of a completed run; nothing is trained."""
    with resume.persisting_overrides(plan) as config:
        metadata.update(**vars(config.run))
    print_safely(f"{metadata.folder}: {' '.join(plan.extra)} is recorded; the run stays complete at step {metadata.fields['step']}")


def resume_run(folder: Path, extra: list[str]) -> None:
    """Train on in `folder` with the overrides `extra`, unless the run is completed and they change nothing."""
    from runner.launch.run import run

    extra, runtime = hydra_runtime.typed_settings(extra)
    with RunMetadata.open(folder, resume=True, recover=recover_run) as metadata:
        plan = resume.plan_resume(folder, extra, has_started=metadata.attempt > 0)
        if metadata.attempt:  # for a job of a sweep that has not begun, nothing can have changed
            resume.print_notes(plan)
        if metadata.status == "completed" and not plan.is_changed:
            return open_console(plan.config.tracker.console).print(strip_control(f"{folder}: already complete at step {metadata.fields['step']}"))
        if metadata.status == "completed" and all(override.startswith(LABEL_PREFIX) for override in extra):
            return _label_run(metadata, plan)
        if metadata.status == "completed" and not any(override.startswith(EXTENDING_KEYS) for override in extra):
            step = metadata.fields["step"]
            message = f"the run is completed at step {step}, and the overrides add no step"
            raise UserError(message, " ".join(extra), f"add train.max_steps=N with N > {step}, or start a new run with init_from={folder}")
        preflight.check_inputs(plan.config)
        check_typed_are_read(extra, [plan.config])
        with metadata.reopened(), resume.persisting_overrides(plan) as config:
            hydra_runtime.run_resumed(lambda: run(config, metadata), folder, plan.tree, plan.overrides, runtime)
