"""Words in, a checked Config out: the only place where Hydra's loose tree becomes plain dataclasses."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.engine.config import Config
from runner.launch import words as words_of
from runner.launch.folders import run_id
from runner.launch.words import CONF, ROOT


def register() -> None:
    """What conf/ refers to: the schema, and two resolvers."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("repo", lambda: str(ROOT), replace=True)
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)


def compose(words: list[str]) -> Config:
    """What `python runner/train.py <words>` would train."""
    return compose_with_folder(words)[0]


def compose_with_folder(words: list[str]) -> tuple[Config, Path]:
    """The config, and the folder the run will have. Raises ValueError(what, where, fix)."""
    words_of.check(words)
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"), translated(words):
        tree = hydra_compose("config", overrides=words, return_hydra_config=True)
        folder = Path(tree.hydra.run.dir).absolute()
        return typed(OmegaConf.masked_copy(tree, [key for key in tree if key != "hydra"])), folder


def typed(tree: DictConfig) -> Config:
    """Hydra's tree as dataclasses, whose own checks run here."""
    if missing := OmegaConf.missing_keys(tree):
        first = min(missing)
        raise ValueError("this word has no value yet", first, f"add {first}=<value>")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(tree, resolve=True)))
    assert isinstance(config, Config)
    return config


class translated:
    """Hydra's and OmegaConf's complaints as refusals: what, where, fix."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, HydraException | OmegaConfBaseException):
            raise self.refusal(error) from error

    def refusal(self, error: BaseException) -> ValueError:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key = getattr(cause, "full_key", None) or ""
        what = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(error).__name__)
        word = next((word for word in self.words if word.lstrip("+").startswith(f"{key}=")), key or " ".join(self.words))
        kind = getattr(words_of.schema().get(key), "__name__", None)
        return ValueError(what, word, EXAMPLES.get(kind or "", "python runner/train.py --help shows how words are written"))


EXAMPLES = {"int": "give a whole number, e.g. 100", "float": "give a number, e.g. 5e-4", "bool": "give true or false", "list": "give a list in brackets, e.g. [0.9,0.95]"}
