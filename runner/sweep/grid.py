"""From the overrides of a sweep to its points, and to the config of each point without a composition for each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf

from common import paths
from common.errors import UserError, print_note
from runner.config.compose import compose_tree, to_config, without_hydra
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.overrides import (
    canonical_value,
    check_overrides,
    config_dirs,
    key_of,
    normalize_values,
    to_overrides,
)
from runner.config.schema import config_groups
from runner.engine.config import Config
from runner.launch import initial_weights, run
from runner.sweep.state import SweepJob, SweepState

MAX_SWEPT_VALUES = 100_000  # of one key
PROGRESS_EVERY = 50  # jobs between two progress lines while configs are checked
ADOPTED_KEYS = {"init_from", "model", "stage"}  # what initial_weights.adopt_model sets
# sections that run.check_start does not read, but for train.supervise
NOT_READ_AT_START = ("optimizer", "schedule", "seed", "run", "sweep", "train")
GridPoint = dict[str, str]  # swept key -> value, as Hydra writes it: 1e-4 and 0.0001 are one value


@dataclass
class SweeperOptions:
    """`hydra/sweeper=grid`: every combination of the swept values."""

    _target_: str = "hydra_plugins.lm_runner.GridSweeper"
    # swept keys and values, for a YAML file; same as overrides typed with --multirun
    params: dict[str, Any] = field(default_factory=dict)
    resume: bool = False  # whether hydra.sweep.dir holds a sweep to continue; `resume=SWEEP` sets it
    is_grid = True
    stops_jobs = False  # by their losses, before their end

    def check_available(self) -> None:
        """Raise UserError if a package is missing."""

    def points(self, swept: Mapping[str, list[str]], zipped: Iterable[str]) -> list[GridPoint]:
        """Return the points whose configs are checked before the first job."""
        return cartesian_points(swept, zipped)

    def check_plan(
        self, points: Sequence[GridPoint], configs: Sequence[Config], derived: Sequence[Mapping[str, str]]
    ) -> None:
        """Refuse jobs that this sweeper cannot run; `derived`: of each point, overrides that the sweep adds."""

    def search(self, state: SweepState) -> Search:
        return Search(state)


class Search:
    """Hands out the jobs of a sweep, one whenever a worker is free: those in sweep.json that need to run."""

    def __init__(self, state: SweepState) -> None:
        self.state = state
        self._due = iter([job for job in state.jobs if job.needs_run])

    def next_job(self) -> SweepJob | None:
        """Return the next job to run, None if there is no further one."""
        return next(self._due, None)

    def is_due(self, job: SweepJob) -> bool:
        """Whether a job that was handed out, and was locked or is tried again, still has to run."""
        return True

    def arguments(self, job: SweepJob) -> list[str]:
        """Return the overrides of this start of a job."""
        return []

    def job_ended(self, job: SweepJob) -> None:
        """Take the result of a job that is not tried again.

        Raises UserError if the search cannot go on: the other jobs save.
        """

    def is_over(self) -> bool:
        """Whether the running jobs are to be stopped, and no other started."""
        return False

    def finish_another(self) -> bool:
        """Let the best job that was stopped early train to its end; return whether there is one."""
        return False

    def close(self) -> None:
        """Write what was found; no job runs any more."""


def split_swept(
    overrides: list[str],
    conf: Path = paths.CONF_DIR,
    is_grid: bool = True,
    known: Mapping[str, list[str]] = MappingProxyType({}),
) -> tuple[list[str], dict[str, list[str]]]:
    """Return (overrides of all jobs, {swept key: values}).

    Unless `is_grid`, what a sampler draws from, a range or an interval, keeps its text as the only value. `known` are
    the swept keys and values of a sweep that exists: of these keys one value is a list of one, in the known spelling.
    """
    with translating_hydra_errors(overrides):
        parsed = OverridesParser.create().parse_overrides(overrides)
    shared, swept = [], {}
    for text, override in zip(overrides, parsed, strict=True):
        key = override.get_key_element()
        if not override.is_sweep_override():
            if key in known:
                swept[key] = canonicalize(key, [override.get_value_element_as_str()], known[key])
            else:
                shared.append(text)
        elif isinstance(pattern := override.value(), Glob):
            swept[key] = pattern.filter(config_groups(*config_dirs(overrides, conf)).get(key, []))
            if not swept[key]:
                raise UserError(
                    f"no option of {key} matches the pattern", text, f"list the values: {key}=<value>,<value>"
                )
        elif override.is_discrete_sweep() and (is_grid or not override.is_range_sweep()):
            values = [str(value) for value in listed_values(override.sweep_string_iterator(), text)]
            swept[key] = canonicalize(key, values, known.get(key, ()))
        elif is_grid:
            fix = "add hydra/sweeper=optuna, or list the values: a,b,c"
            raise UserError(
                "hydra/sweeper=grid needs lists of values, it does not draw from an interval", "hydra/sweeper=grid", fix
            )
        else:
            swept[key] = [override.get_value_string()]
    return shared, swept


def listed_values(values: Iterable[Any], text: str) -> list[Any]:
    """Return the values of the override `text`.

    Raises UserError for more than MAX_SWEPT_VALUES, e.g. of range(0,1e12).
    """
    listed = list(itertools.islice(values, MAX_SWEPT_VALUES + 1))
    if len(listed) > MAX_SWEPT_VALUES:
        raise UserError(
            f"the override has more than {MAX_SWEPT_VALUES:,} values",
            text,
            "list fewer values, or a range with a larger step",
        )
    return listed


def canonicalize(key: str, values: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Return `values`, each in the spelling that is `known` or came first.

    Duplicates stay: sweep.zip pairs them with different values.
    """
    spelling: dict[object, str] = {}
    for value in known:
        spelling.setdefault(canonical_value(key, value), value)
    return [spelling.setdefault(canonical_value(key, value), value) for value in values]


def cartesian_points(swept: Mapping[str, list[str]], zipped: Iterable[str] = ()) -> list[GridPoint]:
    """Return every combination of the swept values; the values of the `zipped` keys are paired: first with first,
    second with second.
    """
    pairs = list(zipped)
    if unknown := next((key for key in pairs if key not in swept), None):
        raise UserError(
            f"sweep.zip names {unknown}, which has one value",
            f"sweep.zip: {unknown}",
            f"give it several: {unknown}=<value>,<value>",
        )
    if len({len(swept[key]) for key in pairs}) > 1:
        values = " ".join(f"{key}={','.join(swept[key])}" for key in pairs)
        raise UserError(
            "the keys of sweep.zip must have equally many values",
            values,
            "give each the same number of values, or leave out sweep.zip",
        )
    axes = [[{key: value} for value in values] for key, values in swept.items() if key not in pairs]
    if pairs:
        axes.append(
            [dict(zip(pairs, values, strict=True)) for values in zip(*(swept[key] for key in pairs), strict=True)]
        )
    points = [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*axes)]
    return [point for index, point in enumerate(points) if point not in points[:index]]


def merge_overrides(overrides: list[str], more: Iterable[str]) -> list[str]:
    """Return `overrides` followed by `more`, without those whose key `more` sets again."""
    more = list(more)
    keys = set(map(key_of, more))
    return [*(override for override in overrides if key_of(override) not in keys), *more]


class PointComposer:
    """Composes the configs of the points of one sweep: Hydra runs once per combination of group options, plain values
    are set on its result.
    """

    def __init__(self, shared: list[str], conf: Path = paths.CONF_DIR, tree: DictConfig | None = None) -> None:
        """`tree`: Hydra's config of `shared`, where it is composed already."""
        self.shared, self.conf = shared, conf
        # by the group overrides of a point
        self._trees: dict[tuple[str, ...], DictConfig] = {} if tree is None else {(): without_hydra(tree)}
        self._configs: dict[tuple[str, ...], Config] = {}  # by all its overrides

    @property
    def group_choices(self) -> list[tuple[str, ...]]:
        """The combinations of group overrides composed so far."""
        return list(self._trees)

    def config(self, point: Mapping[str, str]) -> Config:
        """Return the config of the job of `point`. Raises UserError."""
        overrides = tuple(to_overrides(point))
        if overrides not in self._configs:
            with translating_hydra_errors([*self.shared, *overrides]):
                self._configs[overrides] = to_config(self.tree(point))
        return self._configs[overrides]

    def checked_configs(self, points: list[GridPoint]) -> list[Config]:
        """Return the config of every point; the inputs of each are checked too, so that no typo is found after the
        first job has trained.
        """
        configs = []
        for number, point in enumerate(points, start=1):
            configs.append(self.config(point))
            if number % PROGRESS_EVERY == 0:
                print_note(f"{number} of {len(points)} jobs checked")
        distinct: dict[str, Config] = {}
        for config in configs:
            read = vars(config) | dict.fromkeys(NOT_READ_AT_START)
            distinct.setdefault(repr([read, config.train.supervise]), config)
        for config in distinct.values():
            run.check_start(config)
        return configs

    def tree(self, point: Mapping[str, str], derived: Mapping[str, str] | None = None) -> DictConfig:
        """Return the composed config of the job of `point` with the values that the sweep has `derived`, interpolations
        unresolved.
        """
        overrides = to_overrides(point)
        known_groups = config_groups(*config_dirs(self.shared, self.conf))
        groups = tuple(override for override in overrides if key_of(override) in known_groups)
        values = normalize_values(override for override in overrides if override not in groups)
        check_overrides(values, self.conf)
        if groups not in self._trees:
            self._trees[groups] = without_hydra(compose_tree([*self.shared, *groups], self.conf))
        changed = {key.split(".")[0] for key in (*map(key_of, values), *(derived or ()))} | ADOPTED_KEYS
        tree = _copy_tree(self._trees[groups], changed)
        with translating_hydra_errors([*self.shared, *overrides]):
            _set_values(tree, values)
            initial_weights.adopt_model(tree, [*self.shared, *overrides], self.conf)
            _set_values(tree, to_overrides(derived or {}))
        return tree


def _copy_tree(tree: DictConfig, changed: Collection[str]) -> DictConfig:
    """Return a copy of the config, whose sections that are not `changed` and do not interpolate are those of `tree`."""
    nodes = {str(key): tree._get_node(key) for key in tree}
    texts = {key: str(node) for key, node in nodes.items() if key not in changed}
    return copy.deepcopy(tree, {id(nodes[key]): nodes[key] for key, text in texts.items() if "${" not in text})


def _set_values(tree: DictConfig, overrides: list[str]) -> None:
    for override in map(_parse_override, overrides):
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)


@lru_cache(maxsize=10_000)
def _parse_override(override: str) -> Override:
    return OverridesParser.create().parse_override(override)
