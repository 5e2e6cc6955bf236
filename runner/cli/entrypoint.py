"""Entry point of train.py: checks the command line, then trains, resumes, sweeps or prints.

Every end has its exit code.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from common.errors import UserError, exiting_with_code, ignore_broken_pipe, run_then_hard_exit
from common.registry import import_plugins
from runner.config import overrides
from runner.config.overrides import RERUN_FLAGS, Flags, parse_argv, spell_flags
from runner.engine.device.spinning import set_wait_policy
from runner.launch import torchrun

RESUME_IN_COMP_LINE = re.compile(r" resume=(?:\\.|[^\\\s])+(?= )")


def train_command(argv: list[str] | None = None) -> None:
    """Execute the command line `argv` (default: of this process). Exits with the code of common/errors.py."""
    set_wait_policy()
    ignore_broken_pipe()
    argv = sys.argv[1:] if argv is None else argv
    if torchrun.is_multi_process():
        run_then_hard_exit(lambda: _rank_zero_main(argv) if torchrun.is_rank_zero() else _worker_main(argv))
    with exiting_with_code():
        _dispatch(argv)


def _rank_zero_main(argv: list[str]) -> None:
    with exiting_with_code(), torchrun.releasing_workers():
        _dispatch(argv)


def _worker_main(argv: list[str]) -> int:
    with exiting_with_code():
        import_plugins(overrides.plugins_of(parse_argv(argv)[0]))
        return torchrun.worker_main()


def _dispatch(argv: list[str]) -> None:
    """Execute one command line.

    What a branch alone needs is imported in it: `--help` imports neither sweeps nor the engine.
    """
    typed, flags = parse_argv(argv)
    if flags.keys() & {"--shell-completion", "--hydra-help"}:
        if "COMP_LINE" in os.environ:  # Hydra's parser refuses some paths, and resume= changes no completion
            os.environ["COMP_LINE"] = RESUME_IN_COMP_LINE.sub("", os.environ["COMP_LINE"])
        from runner.cli.hydra_app import run_hydra

        return run_hydra(typed, flags)
    typed = overrides.prepare_overrides(typed, flags.get("--config-dir"))
    config_dirs = overrides.config_dirs(typed)
    if "--help" in flags:
        from runner.cli import help

        return print(help.train_help(config_dirs))
    from runner.cli.hydra_app import run_hydra
    from runner.config import resolve

    resolve.check_not_rerun(flags, config_dirs[1:])
    flags = {name: value for name, value in flags.items() if name not in (*RERUN_FLAGS, "--config-dir")}
    is_show, is_multirun = bool(flags.keys() & {"--cfg", "--info"}), "--multirun" in flags
    if is_multirun and is_show:
        raise UserError(
            "a sweep is many runs, --cfg and --info print one",
            " ".join(spell_flags(flags)),
            "leave out --multirun, and give each setting one value",
        )
    typed, resume_from = overrides.take_resume(typed)
    if torchrun.under_torchrun() and (folder := torchrun.previous_run_dir()):
        return _resume(folder, [], {name: flags[name] for name in flags if name != "--multirun"})
    if resume_from is not None:
        return _resume(resolve.resolve_run(resume_from), typed, flags)
    overrides.check_overrides(typed)
    if overrides.is_branch(typed):
        from runner.launch import branch

        typed = resolve.resolve_model_overrides(typed)
        if is_show:
            from runner.cli.show_config import show_run_config

            with branch.staged_settings(typed) as (_, folder, extra):
                return show_run_config(folder, extra, flags)
        if not is_multirun:
            overrides.check_single_run(typed)
            return branch.start_branch(typed)
        typed = branch.with_trunk_settings(typed)
    if is_show:
        return run_hydra(typed, flags)
    if any(each.startswith(("train.batch_size=auto", "sweep.budget=")) for each in typed):
        from runner.planning.planned_settings import with_batch_size, with_budget

        typed = with_budget(with_batch_size(typed, is_multirun), is_multirun)
    if not is_multirun:
        overrides.check_single_run(typed)
    typed = resolve.resolve_model_overrides(typed)
    if is_multirun:
        from runner.sweep.command import start_sweep

        return start_sweep(typed, flags, run_hydra)
    run_hydra(typed, flags)


def _resume(folder: Path, extra: list[str], flags: Flags) -> None:
    """Continue a run or a sweep, or print its config."""
    from runner.run_dir.contents import is_sweep_dir

    is_sweep = is_sweep_dir(folder)
    if flags.keys() & {"--cfg", "--info"}:
        from runner.cli import show_config

        return (show_config.show_sweep_config if is_sweep else show_config.show_run_config)(folder, extra, flags)
    from runner.config import resolve

    if is_sweep:
        from runner.cli.hydra_app import run_hydra
        from runner.sweep.command import resume_sweep

        return resume_sweep(folder, resolve.resolve_model_overrides(extra), flags, run_hydra)
    resolve.check_is_one_run(folder, flags)
    from runner.launch.resume import resume_run

    resume_run(folder, extra)
