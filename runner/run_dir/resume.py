"""Continuing a run from what stands in its folder: its own words and values, its own copy of conf/, and the words on top."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from common.errors import UserError, is_user_error
from common.filesystem import read_bounded, write_atomic_file
from common.paths import CONF_DIR
from runner.config import flags as flags_module
from runner.config import overrides, schema
from runner.config.compose import compose_tree, register_configs, to_config
from runner.config.hydra_errors import translating_hydra_errors
from runner.engine.config import Config
from runner.run_dir import config_snapshot, saved_config

PRESERVED_FILES = (saved_config.CONFIG_FILE, saved_config.OVERRIDES_FILE)
FIXED_KEYS = ("stage", "model", "data", "experiment")  # another one makes another run


@dataclass
class ResumePlan:
    """How a run will be continued. Nothing has been written yet."""

    folder: Path
    config: Config
    tree: DictConfig  # the same, as Hydra's tree
    extra: list[str]  # the words on top
    words: list[str]  # all that lead here: the run's own that still count, and those on top
    said: list[str]  # what a person should know
    news: bool  # whether the words on top change anything


def plan_resume(folder: Path, extra: list[str], begun: bool = True) -> ResumePlan:
    """The run's own config with the words on top. Of one that has not `begun` the config may be torn: nothing is filled in there."""
    register_configs()
    given = _parse_overrides(folder, extra)
    own = saved_config.reject_interpolations(saved_config.load_saved_config(folder), "", folder / saved_config.CONFIG_FILE)
    words, said = _effective_overrides(folder, given)
    with translating_hydra_errors(extra):
        tree = _merge_into_schema(own, folder)
    missing = sorted(OmegaConf.missing_keys(tree)) if begun else []
    with translating_hydra_errors(extra), config_snapshot.as_config_dir(folder) if extra or missing else nullcontext(CONF_DIR) as conf:
        overrides.check_overrides(extra, conf)
        fresh = cache(lambda: compose_tree([*words, *extra], conf))  # what a new run with these words would be
        for word in missing:
            _copy_value(tree, word, fresh(), folder)
            said.append(f"{word}={OmegaConf.select(tree, word)} is of conf/: the word is newer than the run")
        before = to_config(tree)
        for override in given:
            if (key := override.key_or_group) in schema.config_groups(conf):
                _copy_value(tree, key, fresh(), folder)
        for override in given:
            if override.key_or_group not in schema.config_groups(conf):
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=isinstance(override.value(), dict))
        config = to_config(tree)
    return ResumePlan(folder, config, tree, extra, [*words, *extra], [*config_snapshot.changed_files(folder), *said], config != before)


def _parse_overrides(folder: Path, extra: list[str]) -> list[Override]:
    overrides.check_overrides([word for word in extra if word.partition("=")[0] not in schema.config_groups()])
    with translating_hydra_errors(extra):
        given = OverridesParser.create().parse_overrides(extra)
    for override in given:
        key, word = override.key_or_group, str(override.input_line)
        if override.is_sweep_override():
            raise UserError("a resumed run takes one value", word, f"give one; to compare several, start new runs with init_from={folder}")
        if key.startswith(("hydra.", "hydra/")):
            raise UserError("a resumed run stays where it is and as it was started", word, "leave the word out")
        if key in FIXED_KEYS:
            raise UserError(f"a run keeps its {key}", word, f"start a new run with init_from={folder}")
    return given


def _effective_overrides(folder: Path, given: list[Override]) -> tuple[list[str], list[str]]:
    """The run's own words that are not said anew; those for a choice that is no longer made are dropped, and that is said."""
    again = {override.key_or_group for override in given}
    swapped = tuple(f"{key}." for key in again if key in schema.config_groups())
    kept, said = [], []
    for word in saved_config.load_overrides(folder):
        key = word.partition("=")[0].lstrip("+")
        if key.startswith(swapped) and swapped and key not in again:
            said.append(f"{word} was said for the former {key.partition('.')[0]}: dropped")
        elif key not in again:
            kept.append(word)
    return kept, said


def _merge_into_schema(own: dict[str, Any], folder: Path) -> DictConfig:
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), own)
    except ConfigKeyError as error:
        commit = _recorded_commit(folder)
        fix = f"continue it with the program it was started with{f': git checkout {commit}' if commit else ''}"
        raise UserError("this program no longer knows a word of the run", f"{folder / saved_config.CONFIG_FILE}: {error.full_key}", fix) from error
    assert isinstance(tree, DictConfig)
    return tree


def _recorded_commit(folder: Path) -> str | None:
    try:
        commit = json.loads(read_bounded(folder / "run.json", saved_config.MAX_YAML_BYTES))["code"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and commit.isalnum() else None


def _copy_value(tree: DictConfig, word: str, fresh: DictConfig, folder: Path) -> None:
    """Put what `fresh` has under `word` into `tree`. It comes from files of the run's folder: values only."""
    found = OmegaConf.select(fresh, word)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    found = saved_config.reject_interpolations(found, word, folder / config_snapshot.SNAPSHOT_DIR)
    if isinstance(found, dict):  # a whole section: what the former choice had and this one has not must not stay
        found = OmegaConf.merge(OmegaConf.structured(schema.config_schema()[word]), found)
    OmegaConf.update(tree, word, found, merge=False)


def freeze_saved_config(folder: Path, tree: DictConfig) -> None:
    """Write down the values of a run that begins: one that is looked up, in the environment say, could be another tomorrow."""
    raw = OmegaConf.to_container(tree)
    config = saved_config.freeze_values(OmegaConf.to_container(tree, resolve=True), raw)
    if config != raw:
        _write(folder / saved_config.CONFIG_FILE, config)


def _write(path: Path, content: Any) -> None:
    write_atomic_file(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def print_notes(plan: ResumePlan) -> None:
    for line in plan.said:
        print(f"resume: {line}", file=sys.stderr)


@contextmanager
def persisting_overrides(plan: ResumePlan) -> Iterator[Config]:
    """Around the training: words on top stay in the run's folder, the former ones under `.hydra/history/`,
    unless the run refuses them inside: then its folder is as it was."""
    if not plan.extra:
        yield plan.config
        return
    former = _persist(plan)
    with config_snapshot.as_config_dir(plan.folder) as conf:
        added = config_snapshot.extend_snapshot(plan.folder, plan.words, conf)
    try:
        yield plan.config
    except ValueError as error:
        if is_user_error(error):
            _restore(plan.folder, former, added)
        raise


def _persist(plan: ResumePlan) -> Path:
    """Put config and words of this launch in the place of the former ones; returns where those are now."""
    history = plan.folder / ".hydra" / "history"
    former = history / f"{len(list(history.glob('*'))):03d}"
    former.mkdir(parents=True)
    for path in PRESERVED_FILES:
        shutil.copy2(plan.folder / path, former / path.name)
    config = saved_config.freeze_values(OmegaConf.to_container(plan.tree, resolve=True), saved_config.load_saved_config(plan.folder))
    _write(plan.folder / saved_config.CONFIG_FILE, config)
    _write(plan.folder / saved_config.OVERRIDES_FILE, plan.words)
    return former


def _restore(folder: Path, former: Path, added: list[Path]) -> None:
    for path in PRESERVED_FILES:
        write_atomic_file(folder / path, (former / path.name).read_bytes())
    for file in added:
        file.unlink()
    shutil.rmtree(former)


def show_resumed_config(plan: ResumePlan, flags: list[str], app: Callable[[], None]) -> None:
    """`--cfg job` and `--info` of the run as it would be continued. Nothing is written."""
    if about := flags_module.flag_value(flags, "--cfg", "-c"):
        if about != "job":
            raise UserError("a run is continued without Hydra, it has no settings of its own", f"--cfg {about}", "--cfg job shows the words of the run")
        package = flags_module.flag_value(flags, "--package", "-p")
        shown = OmegaConf.select(plan.tree, package) if package else plan.tree
        return print(OmegaConf.to_yaml(shown, resolve=True) if OmegaConf.is_config(shown) else shown, end="")
    with config_snapshot.as_config_dir(plan.folder) as conf:
        sys.argv[1:] = [*flags, "--config-path", str(conf), *plan.words, f"hydra.run.dir={overrides.hydra_quote(str(plan.folder))}"]
        app()
