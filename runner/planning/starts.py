"""The runs that a command line of train.py would start or continue, with the settings that each would train with.
Nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, print_note
from runner.config import overrides as checks
from runner.config import snapshot
from runner.config.compose import compose_tree, to_config
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.overrides import Flags, to_overrides
from runner.config.resolve import check_is_one_run, resolve_run
from runner.config.unread import check_typed_are_read
from runner.engine.config import Config
from runner.launch import branch, initial_weights, resume, run
from runner.planning.planned_settings import with_batch_size, with_budget
from runner.run_dir.contents import has_started, is_sweep_dir, recorded_precision
from runner.run_dir.metadata import RunMetadata
from runner.sweep import extend, grid, seeds, validation
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepState


@dataclass(frozen=True)
class PlannedRun:
    name: str  # the swept values of a job; the overrides of a single run
    config: Config  # with the weights and the tokenizer that it would start from
    overrides: tuple[str, ...]  # what is typed for it, and what the sweep derives
    done: int = 0  # steps that a resumed run has behind it


@dataclass(frozen=True)
class PlannedStart:
    runs: tuple[PlannedRun, ...]
    is_sweep: bool
    trials: int = 0  # of a study, whose values a sampler draws later: `runs` bound them


def planned_start(typed: list[str], flags: Flags) -> PlannedStart:
    """Return what `train.py <typed> <flags>` would train, `typed` from `prepare_overrides`.

    Raises UserError where train.py refuses it.
    """
    typed, resumed = checks.take_resume(typed)
    is_multirun = "--multirun" in flags
    if resumed is not None:
        folder = resolve_run(resumed)
        if is_sweep_dir(folder):
            return _resumed_sweep(folder, typed)
        check_is_one_run(folder, flags)
        return PlannedStart((_resumed_run(folder, typed),), is_sweep=False)
    checks.check_overrides(typed)
    is_branch = checks.is_branch(typed)
    if not is_branch:
        typed = with_batch_size(typed, is_multirun)
    if is_multirun:
        return _new_sweep(typed, is_branch)
    checks.check_single_run(typed)
    if is_branch:
        return PlannedStart((_branched_run(typed, " ".join(typed)),), is_sweep=False)
    return PlannedStart((_new_run(typed),), is_sweep=False)


def _new_run(typed: list[str]) -> PlannedRun:
    config = initial_weights.compose_with_model(typed)
    check_typed_are_read(typed, [config])
    return PlannedRun(" ".join(typed) or "default settings", _checked(config), tuple(typed))


def _resumed_run(folder: Path, typed: list[str], name: str = "") -> PlannedRun:
    fields = RunMetadata.read(folder)
    plan = resume.plan_resume(folder, typed, has_started=has_started(fields))
    return _continued_run(plan.config, fields, name or f"resume={folder.name}", typed, fields.get("step"))


def _branched_run(typed: list[str], name: str) -> PlannedRun:
    with branch.staged_settings(typed) as (trunk, folder, extra):
        config = resume.plan_resume(folder, extra).config
    return _continued_run(config, trunk.fields, name, typed, trunk.saved["progress"]["step"])


def _continued_run(config: Config, fields: Mapping[str, Any], name: str, typed: list[str], done: object) -> PlannedRun:
    if isinstance(fields.get("init_from"), str) and config.init_from == "auto":
        config = dataclasses.replace(config, init_from=fields["init_from"])
    if recorded := recorded_precision(fields):
        config = dataclasses.replace(config, precision=config.precision.on("cpu", recorded))
    return PlannedRun(name, _checked(config), tuple(typed), done if isinstance(done, int) else 0)


def _checked(config: Config) -> Config:
    """Return the config with its initial weights and its tokenizer.

    Raises UserError as the start of the run would.
    """
    run.check_start(config)
    return initial_weights.resolve_start(config)


def _new_sweep(typed: list[str], is_branch: bool) -> PlannedStart:
    if is_branch:
        typed = branch.with_trunk_settings(typed)
    validation.check_hydra_overrides(typed)
    typed = with_budget(typed, is_multirun=True)
    tree = compose_tree(grid.split_swept(typed, is_grid=False)[0])
    sweeper, _ = validation.hydra_options(tree)
    plan = validation.plan_sweep(tree, typed, sweeper)
    trials = getattr(sweeper, "n_trials", 0)
    if trials:
        print_note(
            f"the sampler draws the values of {', '.join(plan.swept)} later: planned are every choice and both ends of every interval, and {trials} jobs of the largest"
        )
    runs = []
    shared = [override for override in plan.stored if not checks.is_hydra_override(override)]
    for point, derived in zip(plan.points, plan.derived, strict=True):
        swept, job = to_overrides(point), to_overrides(point | derived)
        if is_branch:
            run_of_job = _branched_run(grid.merge_overrides(shared, job), " ".join(swept))
            runs.append(dataclasses.replace(run_of_job, overrides=tuple(job)))
            continue
        with translating_hydra_errors(swept):
            final = to_config(plan.composer.tree(point, derived))
        runs.append(PlannedRun(" ".join(swept), _checked(final), tuple(job)))
    return PlannedStart(tuple(runs), is_sweep=True, trials=trials)


def _resumed_sweep(folder: Path, typed: list[str]) -> PlannedStart:
    """Return the jobs that are not completed, and those that the typed values add; after them those of the next round of
    sweep.seeds.
    """
    state = SweepState.open_readonly(folder)
    runs = []
    with snapshot.as_config_dir(folder) as conf:
        additions = extend.parse_additions(state, typed, conf)
        if additions:
            extend.apply_additions(state, additions, conf)
        rules = compose_tree(state.overrides, conf)
        if rules.sweep.seeds and not any(job.needs_run for job in state.jobs):
            seeds.SeedSearch(grid.Search(state), state, rules.sweep.seeds, rules.sweep.top, rules.seed).add_round()
        session = SweepSession(state, conf)
        for job in state.jobs:
            name = " ".join(to_overrides(job.overrides))
            if not job.needs_run:
                continue
            typed_of_job = session.job_overrides(job)
            if has_started(RunMetadata.read(folder / job.name)):
                runs.append(_resumed_run(folder / job.name, job.pending_overrides, name))
            elif checks.is_branch(typed_of_job):
                runs.append(_branched_run(typed_of_job, name))
            else:
                config = to_config(session.composer.tree(job.overrides, session.derived_overrides(job)))
                runs.append(PlannedRun(name, _checked(config), tuple(typed_of_job)))
    if not runs:
        raise UserError(
            "no job of this sweep has to run",
            f"resume={folder}",
            {
                "grid": "add values of a swept key, or train.max_steps=N, to train on",
                "halving": "add values of a swept key; a larger sweep.budget of train.py adds jobs that are not known before; resume=JOB trains a paused one on",
                "optuna": "train.py with a larger hydra.sweeper.n_trials draws more points, which are not known before",
            }[state.sweeper],
        )
    return PlannedStart(tuple(runs), is_sweep=True)
