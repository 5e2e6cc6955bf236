"""Continuing a run from what stands in its folder. The stored config is read as data: nothing in it is ever run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from runner.engine.config import Config
from runner.engine.disk import replace
from runner.engine.durable import verify
from runner.launch import words as words_of
from runner.launch.compose import register, translated, typed
from runner.launch.folders import finished_runs
from runner.launch.refusal import is_refusal, nearest_path
from runner.launch.words import CONF, ROOT

STORED = Path(".hydra") / "config.yaml"
SWEEP = "sweep.json"
KEPT = ("config.yaml", "overrides.yaml")
REPO = "${repo:}"


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def find(name: str) -> Path:
    """The run or sweep that `resume=` names: its folder, anything inside it, or `last`. A file of a sweep that is in no job means the sweep."""
    if name == "last":
        runs = finished_runs(ROOT / "outputs")
        if not runs:
            raise ValueError("there is no run yet", "resume=last", "start one: python runner/train.py")
        return max(runs, key=lambda run: (run / "run.json").stat().st_mtime)
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise ValueError("there is no such file or folder", f"resume={name}", nearest_path(name))
    for place in (path, *path.parents):
        if (place / "run.json").is_file():
            _check_checkpoint(place, path)
            return place
        if is_sweep(place):
            return place
    raise ValueError("there is no run here", f"resume={name}", "give the folder of a run: it holds a run.json")


def _check_checkpoint(run: Path, path: Path) -> None:
    """A run continues from its newest checkpoint: one that is named must be that one, and whole."""
    inside = path.relative_to(run).parts
    if len(inside) < 2 or inside[0] != "checkpoints":
        return
    named = run / "checkpoints" / inside[1]
    if reason := verify(named):
        raise ValueError(f"this checkpoint is not whole: {reason}", str(named), f"resume={run} continues from the newest that is")
    newer = [other.name for other in named.parent.glob("step-*") if other.name > named.name]
    if newer:
        raise ValueError(f"there are newer checkpoints: {', '.join(sorted(newer))}", str(named), f"resume={run}, or start a new run from these weights")


@contextmanager
def continued(folder: Path, extra: list[str]) -> Iterator[Config]:
    """The run's own config with the extra words on top. They stay in its folder, the former ones under `.hydra/history/`,
    unless the run refuses them inside: then its folder is as it was."""
    config, tree = _with(folder, extra)
    former = _keep(folder, tree, extra) if extra else None
    try:
        yield config
    except ValueError as error:
        if former and is_refusal(error):
            _take_back(folder, former)
        raise


def _with(folder: Path, extra: list[str]) -> tuple[Config, DictConfig]:
    words_of.check(extra)
    register()
    stored = _stored(folder / STORED)
    with translated(extra):
        tree = OmegaConf.merge(OmegaConf.structured(Config), stored)
        for override in OverridesParser.create().parse_overrides(extra):
            key = override.key_or_group
            if override.is_sweep_override():
                raise ValueError(
                    "a resumed run takes one value", str(override.input_line), f"give one; to compare several, start new runs with init_from={folder}"
                )
            if key in ("stage", "model", "data", "experiment"):
                raise ValueError(f"a run keeps its {key}", f"{key}={override.value()}", "start a new run with init_from=" + str(folder))
            value = yaml.safe_load((CONF / key / f"{override.value()}.yaml").read_text()) if key in words_of.groups() else override.value()
            OmegaConf.update(tree, key, value, merge=isinstance(value, dict))
        assert isinstance(tree, DictConfig)
        return typed(tree), tree


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"the run's config cannot be read: {error}", str(path), f"give its first words again, with hydra.run.dir={path.parents[1]}") from error
    if not isinstance(stored, dict):  # killed before its words were written
        raise ValueError("the run has no config yet", str(path), f"give its first words again, with hydra.run.dir={path.parents[1]}")
    return {key: _plain(value, key, path) for key, value in stored.items()}


def _plain(value: Any, word: str, path: Path) -> Any:
    """Values only: an interpolation could read the environment, `_target_` could name code."""
    if isinstance(value, dict):
        if bad := next((key for key in value if str(key).startswith("_") and str(key).endswith("_")), None):
            raise ValueError("a run's config names code", f"{path}: {word}.{bad}", "do not resume this folder; nothing in it was run")
        return {key: _plain(part, f"{word}.{key}", path) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, word, path) for part in value]
    if isinstance(value, str) and value.startswith(REPO):
        value = str(ROOT) + value.removeprefix(REPO)
    if isinstance(value, str) and "${" in value:
        raise ValueError("a run's config reaches outside", f"{path}: {word}={value}", "write the value itself there")
    return value


def _keep(folder: Path, tree: DictConfig, extra: list[str]) -> Path:
    """Put config and words of this launch in the place of the former ones; returns where those are now."""
    hydra = folder / ".hydra"
    former = hydra / "history" / f"{len(list((hydra / 'history').glob('*'))):03d}"
    former.mkdir(parents=True)
    for name in KEPT:
        shutil.copy2(hydra / name, former / name)
    words = yaml.safe_load((former / "overrides.yaml").read_text())
    replace(hydra / "config.yaml", OmegaConf.to_yaml(tree, resolve=True).encode())
    replace(hydra / "overrides.yaml", yaml.safe_dump([*words, *extra]).encode())
    return former


def _take_back(folder: Path, former: Path) -> None:
    for name in KEPT:
        replace(folder / ".hydra" / name, (former / name).read_bytes())
    shutil.rmtree(former)
