"""Checks of a sweep before anything is written: options of Hydra's plugins, what sweep.json may store, the config of
every job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError, did_you_mean, print_note
from runner.config.hydra_errors import ineffective_override, translating_hydra_errors
from runner.config.overrides import config_dirs, is_hydra_override, key_of, to_overrides
from runner.config.unread import check_typed_are_read
from runner.launch import torchrun
from runner.sweep import budget, comparability
from runner.sweep.backends import LAUNCHERS, Backend
from runner.sweep.grid import GridPoint, PointComposer, SweeperOptions, merge_overrides, split_swept
from runner.sweep.halving import HalvingOptions
from runner.sweep.optuna_search import SWEEPERS
from runner.sweep.state import STORED_HYDRA_PREFIX, storable_overrides

SWEEP_DIR_KEY = "hydra.sweep.dir="
LAUNCH_KEYS = (SWEEP_DIR_KEY, "hydra.sweeper.resume=", "hydra.mode=")  # of one launch, never stored


def check_hydra_overrides(overrides: Sequence[str]) -> None:
    """Refuse plugins that are not of this program, unknown options of its launchers, and Hydra settings with several
    values.
    """
    chosen = {
        key_of(override): override.partition("=")[2]
        for override in ["hydra/launcher=local", "hydra/sweeper=grid", *overrides]
    }
    for key, known in (("hydra/launcher", LAUNCHERS), ("hydra/sweeper", SWEEPERS)):
        name = chosen[key]
        if name not in known and not any(
            (folder / key / f"{name}.yaml").is_file() for folder in config_dirs(list(overrides))
        ):
            raise UserError(
                f"{key} must be one of {', '.join(known)}, got {name}",
                f"{key}={name}",
                did_you_mean(name, known, "leave the override out"),
            )
    launcher = LAUNCHERS.get(chosen["hydra/launcher"])
    options = [f"hydra.launcher.{field.name}" for field in dataclasses.fields(launcher)] if launcher else []
    for override in filter(is_hydra_override, overrides):
        key, value = key_of(override), override.partition("=")[2]
        if options and key.startswith("hydra.launcher.") and ".".join(key.split(".")[:3]) not in options:
            hint = did_you_mean(key, options, f"its options are {', '.join(options)}")
            raise UserError(
                f"hydra/launcher={chosen['hydra/launcher']} has no option {key.removeprefix('hydra.launcher.')}",
                override,
                hint,
            )
        with translating_hydra_errors([override]):
            parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override() and not key.startswith(STORED_HYDRA_PREFIX):
            fix = f"'{key}=[{value}]'" if key == "hydra.launcher.devices" else f"give {key} one value"
            raise UserError(f"{key} takes one value: only training settings can be swept", override, fix)
        if key == "hydra.sweep.subdir":
            fix = "hydra.sweep.dir=DIR sets the directory of the sweep"
            raise UserError(
                "hydra.sweep.subdir cannot be set: job directories are named by the swept overrides", override, fix
            )


def hydra_options(config: DictConfig) -> tuple[SweeperOptions, Backend]:
    """Return the options of the composed sweeper and launcher.

    Raises UserError for values that are not allowed and for packages that are missing.
    """
    _check_are_own(config)
    sweeper, launcher = OmegaConf.to_object(config.hydra.sweeper), OmegaConf.to_object(config.hydra.launcher)
    assert isinstance(sweeper, SweeperOptions) and isinstance(launcher, Backend)
    if config.sweep.budget:
        check_budget(config.sweep, sweeper)
    launcher.check_available()
    sweeper.check_available()
    torchrun.check_sweep_launcher(plugin_name(launcher), vars(launcher))
    return sweeper, launcher


def _check_are_own(config: DictConfig) -> None:
    """Raise UserError for a sweeper or launcher of another package, which would train in other directories, or in vain."""
    for kind, known in (("sweeper", SWEEPERS), ("launcher", LAUNCHERS)):
        options, target = OmegaConf.get_type(config.hydra[kind]), config.hydra[kind].get("_target_")
        if options not in known.values() or target != getattr(options, "_target_", None):
            raise UserError(
                f"hydra/{kind} must be one of {', '.join(known)}, got {target}",
                f"hydra.{kind}._target_={target}",
                f"leave it out; hydra/{kind}=NAME selects one",
            )


def check_budget(rules: DictConfig, sweeper: SweeperOptions) -> None:
    """Raise UserError where the section `sweep`, whose budget is set, has no meaning."""
    budget_text = f"sweep.budget={rules.budget}"
    if not isinstance(sweeper, HalvingOptions):
        raise UserError(
            "sweep.budget is shared out by a search that stops the worse points early",
            f"{budget_text} hydra/sweeper={plugin_name(sweeper)}",
            "hydra/sweeper=halving, in a new sweep",
        )
    if rules.seeds:
        raise UserError(
            "sweep.budget adds seeds for as long as something is left",
            f"{budget_text} sweep.seeds={rules.seeds}",
            "leave out one of them",
        )
    if str(rules.budget).endswith("flops"):
        raise UserError(
            "FLOPs become tokens when a sweep is started with --multirun sweep.budget=, not in a file or at a resume",
            budget_text,
            "e.g. sweep.budget=2e9tokens",
        )


class SweepPlan(NamedTuple):
    """A new sweep whose jobs are checked. Nothing is written yet."""

    stored: list[str]  # overrides of all jobs that sweep.json stores
    swept: dict[str, list[str]]  # key -> values
    composer: PointComposer
    points: list[GridPoint]  # the jobs; of a sampler the ends of what it draws from
    derived: list[dict[str, str]]  # of each point: overrides that the sweep adds
    base: budget.StepSize


def plan_sweep(tree: DictConfig, typed: list[str], sweeper: SweeperOptions) -> SweepPlan:
    """Return the plan of the sweep with the composed config `tree` and the overrides `typed`.

    Raises UserError for a job that could not start, and for budgets that cannot be matched.
    """
    if tree.sweep.budget and not any(override.startswith("sweep.budget=") for override in typed):
        fix = f"type it: --multirun sweep.budget={tree.sweep.budget}"
        raise UserError("sweep.budget in a file sets no length of the jobs", f"sweep.budget={tree.sweep.budget}", fix)
    typed = merge_overrides(to_overrides(sweeper.params), typed)
    own = [override for override in typed if not override.startswith(LAUNCH_KEYS)]
    shared, swept = split_swept(sorted(own, key=is_hydra_override, reverse=True), is_grid=sweeper.is_grid)
    composer = PointComposer(shared, tree=tree)
    points = sweeper.points(swept, tree.sweep.zip)
    configs = composer.checked_configs(points)
    if split := comparability.wider_split(configs):
        print_note(f"{split} in all jobs: the default split holds out too few rows to rank them")
        shared.append(split)
        composer = PointComposer(shared)
        configs = composer.checked_configs(points)
    comparability.print_unranked(configs, is_refused=sweeper.stops_jobs)
    check_typed_are_read([*shared, *swept], configs)
    base = budget.smallest_step(configs)
    budget.check_countable(configs, tree.sweep.match_budget, swept)
    derived = [budget.derived_overrides(each, base, swept) for each in configs]
    if sweeper.is_grid:
        budget.warn_if_unequal(configs, base, swept)
    sweeper.check_plan(points, configs, derived)
    if any(map(budget.evaluation_overrides, configs)):
        print_note(
            f"jobs without evaluation are judged at their end, without validation data on the same {budget.FINAL_EVAL_ROWS} training rows"
        )
    return SweepPlan(storable_overrides(shared), swept, composer, points, derived, base)


def check_plugins(config: DictConfig, typed: Sequence[str]) -> None:
    """Raise UserError for a sweeper or launcher of another package, or one that a YAML file selects in vain."""
    _check_are_own(config)
    for group in ("hydra/sweeper", "hydra/launcher") if config_dirs(list(typed))[1:] else ():
        chosen = config.hydra.runtime.choices[group]
        if ignored := ineffective_override(group, chosen, typed):
            option, position = ignored
            raise UserError(f"{group} cannot be selected in a file, it is {chosen}", position, f"type {group}={option}")


def plugin_name(options: SweeperOptions | Backend) -> str:
    return next(name for name, kind in {**LAUNCHERS, **SWEEPERS}.items() if type(options) is kind)
