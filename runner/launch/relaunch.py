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

from runner.engine.config import Config
from runner.engine.disk import read_file, replace
from runner.launch import snapshot, stored
from runner.launch import words as words_of
from runner.launch.compose import compose_tree, register, translated, typed
from runner.launch.refusal import is_refusal
from runner.launch.words import CONF

KEPT = (stored.CONFIG, stored.WORDS)
FIXED = ("stage", "model", "data", "experiment")  # another one makes another run


@dataclass
class Plan:
    """How a run will be continued. Nothing has been written yet."""

    folder: Path
    config: Config
    tree: DictConfig  # the same, as Hydra's tree
    extra: list[str]  # the words on top
    words: list[str]  # all that lead here: the run's own that still count, and those on top
    said: list[str]  # what a person should know
    news: bool  # whether the words on top change anything


def planned(folder: Path, extra: list[str], begun: bool = True) -> Plan:
    """The run's own config with the words on top. Of one that has not `begun` the config may be torn: nothing is filled in there."""
    register()
    given = _parsed(folder, extra)
    own = stored.plain(stored.config(folder), "", folder / stored.CONFIG)
    words, said = _still_counting(folder, given)
    with translated(extra):
        tree = _on_schema(own, folder)
    missing = sorted(OmegaConf.missing_keys(tree)) if begun else []
    with translated(extra), snapshot.laid_out(folder) if extra or missing else nullcontext(CONF) as conf:
        words_of.check(extra, conf)
        fresh = cache(lambda: compose_tree([*words, *extra], conf))  # what a new run with these words would be
        for word in missing:
            _take(tree, word, fresh(), folder)
            said.append(f"{word}={OmegaConf.select(tree, word)} is of conf/: the word is newer than the run")
        before = typed(tree)
        for override in given:
            if (key := override.key_or_group) in words_of.groups(conf):
                _take(tree, key, fresh(), folder)
        for override in given:
            if override.key_or_group not in words_of.groups(conf):
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=isinstance(override.value(), dict))
        config = typed(tree)
    return Plan(folder, config, tree, extra, [*words, *extra], [*snapshot.differences(folder), *said], config != before)


def _parsed(folder: Path, extra: list[str]) -> list[Override]:
    words_of.check([word for word in extra if word.partition("=")[0] not in words_of.groups()])
    with translated(extra):
        given = OverridesParser.create().parse_overrides(extra)
    for override in given:
        key, word = override.key_or_group, str(override.input_line)
        if override.is_sweep_override():
            raise ValueError("a resumed run takes one value", word, f"give one; to compare several, start new runs with init_from={folder}")
        if key.startswith(("hydra.", "hydra/")):
            raise ValueError("a resumed run stays where it is and as it was started", word, "leave the word out")
        if key in FIXED:
            raise ValueError(f"a run keeps its {key}", word, f"start a new run with init_from={folder}")
    return given


def _still_counting(folder: Path, given: list[Override]) -> tuple[list[str], list[str]]:
    """The run's own words that are not said anew; those for a choice that is no longer made are dropped, and that is said."""
    again = {override.key_or_group for override in given}
    swapped = tuple(f"{key}." for key in again if key in words_of.groups())
    kept, said = [], []
    for word in stored.words(folder):
        key = word.partition("=")[0].lstrip("+")
        if key.startswith(swapped) and swapped and key not in again:
            said.append(f"{word} was said for the former {key.partition('.')[0]}: dropped")
        elif key not in again:
            kept.append(word)
    return kept, said


def _on_schema(own: dict[str, Any], folder: Path) -> DictConfig:
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), own)
    except ConfigKeyError as error:
        commit = _commit(folder)
        fix = f"continue it with the program it was started with{f': git checkout {commit}' if commit else ''}"
        raise ValueError("this program no longer knows a word of the run", f"{folder / stored.CONFIG}: {error.full_key}", fix) from error
    assert isinstance(tree, DictConfig)
    return tree


def _commit(folder: Path) -> str | None:
    try:
        commit = json.loads(read_file(folder / "run.json", stored.LIMIT))["code"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and commit.isalnum() else None


def _take(tree: DictConfig, word: str, fresh: DictConfig, folder: Path) -> None:
    """Put what `fresh` has under `word` into `tree`. It comes from files of the run's folder: values only."""
    found = OmegaConf.select(fresh, word)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    found = stored.plain(found, word, folder / snapshot.PLACE)
    if isinstance(found, dict):  # a whole section: what the former choice had and this one has not must not stay
        found = OmegaConf.merge(OmegaConf.structured(words_of.schema()[word]), found)
    OmegaConf.update(tree, word, found, merge=False)


def keep_values(folder: Path, tree: DictConfig) -> None:
    """Write down the values of a run that begins: one that is looked up, in the environment say, could be another tomorrow."""
    raw = OmegaConf.to_container(tree)
    config = stored.lasting(OmegaConf.to_container(tree, resolve=True), raw)
    if config != raw:
        _write(folder / stored.CONFIG, config)


def _write(path: Path, content: Any) -> None:
    replace(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def say(plan: Plan) -> None:
    for line in plan.said:
        print(f"resume: {line}", file=sys.stderr)


@contextmanager
def kept(plan: Plan) -> Iterator[Config]:
    """Around the training: words on top stay in the run's folder, the former ones under `.hydra/history/`,
    unless the run refuses them inside: then its folder is as it was."""
    if not plan.extra:
        yield plan.config
        return
    former = _keep(plan)
    with snapshot.laid_out(plan.folder) as conf:
        added = snapshot.add(plan.folder, plan.words, conf)
    try:
        yield plan.config
    except ValueError as error:
        if is_refusal(error):
            _take_back(plan.folder, former, added)
        raise


def _keep(plan: Plan) -> Path:
    """Put config and words of this launch in the place of the former ones; returns where those are now."""
    history = plan.folder / ".hydra" / "history"
    former = history / f"{len(list(history.glob('*'))):03d}"
    former.mkdir(parents=True)
    for path in KEPT:
        shutil.copy2(plan.folder / path, former / path.name)
    config = stored.lasting(OmegaConf.to_container(plan.tree, resolve=True), stored.config(plan.folder))
    _write(plan.folder / stored.CONFIG, config)
    _write(plan.folder / stored.WORDS, plan.words)
    return former


def _take_back(folder: Path, former: Path, added: list[Path]) -> None:
    for path in KEPT:
        replace(folder / path, (former / path.name).read_bytes())
    for file in added:
        file.unlink()
    shutil.rmtree(former)


def looked_at(plan: Plan, flags: list[str], app: Callable[[], None]) -> None:
    """`--cfg job` and `--info` of the run as it would be continued. Nothing is written."""
    if about := words_of.value_of(flags, "--cfg", "-c"):
        if about != "job":
            raise ValueError("a run is continued without Hydra, it has no settings of its own", f"--cfg {about}", "--cfg job shows the words of the run")
        package = words_of.value_of(flags, "--package", "-p")
        shown = OmegaConf.select(plan.tree, package) if package else plan.tree
        return print(OmegaConf.to_yaml(shown, resolve=True) if OmegaConf.is_config(shown) else shown, end="")
    with snapshot.laid_out(plan.folder) as conf:
        sys.argv[1:] = [*flags, "--config-path", str(conf), *plan.words, f"hydra.run.dir={words_of.quoted(str(plan.folder))}"]
        app()
