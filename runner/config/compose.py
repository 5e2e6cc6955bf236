"""Words in, a checked Config out: the only place where Hydra's loose tree becomes plain dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.paths import CONF_DIR, REPO_ROOT
from runner.config import overrides
from runner.config.hydra_errors import translating_hydra_errors
from runner.engine.config import Config
from runner.run_dir.naming import job_dirname, run_id
from runner.sweep.plugins import local

HYDRA_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # 1.3 warns if it is not said, 1.4 if it is


def register_configs() -> None:
    """What conf/ refers to: the schema, three resolvers, and the launcher and sweeper of ours."""
    if "schema.yaml" not in (store := ConfigStore.instance()).repo:  # 1.4 warns where a name is taken twice
        store.store(name="schema", node=Config)
    # OmegaConf 2.4 renamed it; 2.3 has another one of that name, which cannot replace
    renamed = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    resolver: Any = OmegaConf.register_resolver if renamed else OmegaConf.register_new_resolver
    resolver("repo", lambda: str(REPO_ROOT), replace=True)
    resolver("run_id", run_id, replace=True)
    resolver("swept", job_dirname, replace=True)
    local.register_plugins()


def compose_config(words: list[str]) -> Config:
    """What `python runner/train.py <words>` would train."""
    return compose_with_run_dir(words)[0]


def compose_with_run_dir(words: list[str], conf: Path = CONF_DIR) -> tuple[Config, Path]:
    """The config, and the folder the run will have. Raises ValueError(what, where, fix)."""
    tree = compose_tree(words, conf)
    with translating_hydra_errors(words):
        folder = Path(tree.hydra.run.dir).absolute()
        return to_config(OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])), folder


def compose_tree(words: list[str], conf: Path = CONF_DIR) -> DictConfig:
    """Hydra's whole tree, nothing in it looked up yet."""
    words = [overrides.normalize_int(word) for word in words]
    overrides.check_overrides(words, conf)
    register_configs()
    with composing_from(conf), translating_hydra_errors(words):
        return hydra_compose("config", overrides=words, return_hydra_config=True)


@contextmanager
def composing_from(conf: Path) -> Iterator[None]:
    """Hydra set up on a folder of files, also where it is set up already: within a run, or a sweep."""
    current = GlobalHydra.instance()
    before, current.hydra = current.hydra, None
    try:
        with initialize_config_dir(str(conf), **HYDRA_VERSION_BASE):
            yield
    finally:
        current.hydra = before


def source_files(words: list[str], conf: Path = CONF_DIR) -> list[str]:
    """The files of `conf` that the words are composed from; those that Hydra itself is composed from are not meant."""
    register_configs()
    with composing_from(conf), translating_hydra_errors(words):
        found = GlobalHydra.instance().config_loader().compute_defaults_list("config", words, RunMode.RUN).defaults
    names = [f"{part.config_path}.yaml" for part in found if not str(part.config_path).startswith("hydra/")]
    return sorted({name for name in names if (conf / name).is_file()})


def to_config(tree: DictConfig) -> Config:
    """Hydra's tree as dataclasses, whose own checks run here."""
    if missing := OmegaConf.missing_keys(tree):
        first = min(missing)
        raise UserError("this word has no value yet", first, f"add {first}=<value>")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(tree, resolve=True)))
    assert isinstance(config, Config)
    return config
