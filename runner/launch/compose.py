"""Words in, a checked Config out: the only place where Hydra's loose tree becomes plain dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from runner.engine.config import Config
from runner.launch import launcher
from runner.launch import words as words_of
from runner.launch.folders import run_id, swept
from runner.launch.words import CONF, ROOT

AS_OF = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # 1.3 warns if it is not said, 1.4 if it is


def register() -> None:
    """What conf/ refers to: the schema, three resolvers, and the launcher and sweeper of ours."""
    if "schema.yaml" not in (store := ConfigStore.instance()).repo:  # 1.4 warns where a name is taken twice
        store.store(name="schema", node=Config)
    # OmegaConf 2.4 renamed it; 2.3 has another one of that name, which cannot replace
    renamed = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    resolver: Any = OmegaConf.register_resolver if renamed else OmegaConf.register_new_resolver
    resolver("repo", lambda: str(ROOT), replace=True)
    resolver("run_id", run_id, replace=True)
    resolver("swept", swept, replace=True)
    launcher.register()


def compose(words: list[str]) -> Config:
    """What `python runner/train.py <words>` would train."""
    return compose_with_folder(words)[0]


def compose_with_folder(words: list[str], conf: Path = CONF) -> tuple[Config, Path]:
    """The config, and the folder the run will have. Raises ValueError(what, where, fix)."""
    tree = compose_tree(words, conf)
    with translated(words):
        folder = Path(tree.hydra.run.dir).absolute()
        return typed(OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])), folder


def compose_tree(words: list[str], conf: Path = CONF) -> DictConfig:
    """Hydra's whole tree, nothing in it looked up yet."""
    words = [words_of.whole(word) for word in words]
    words_of.check(words, conf)
    register()
    with composing_from(conf), translated(words):
        return hydra_compose("config", overrides=words, return_hydra_config=True)


@contextmanager
def composing_from(conf: Path) -> Iterator[None]:
    """Hydra set up on a folder of files, also where it is set up already: within a run, or a sweep."""
    current = GlobalHydra.instance()
    before, current.hydra = current.hydra, None
    try:
        with initialize_config_dir(str(conf), **AS_OF):
            yield
    finally:
        current.hydra = before


def files(words: list[str], conf: Path = CONF) -> list[str]:
    """The files of `conf` that the words are composed from; those that Hydra itself is composed from are not meant."""
    register()
    with composing_from(conf), translated(words):
        found = GlobalHydra.instance().config_loader().compute_defaults_list("config", words, RunMode.RUN).defaults
    names = [f"{part.config_path}.yaml" for part in found if not str(part.config_path).startswith("hydra/")]
    return sorted({name for name in names if (conf / name).is_file()})


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
        # omegaconf 2.3 stumbles over a word inside a section that is null
        section = next((word for word in self.words for name in OPTIONAL if re.match(rf"\+*{name}[.=]", word)), None)
        if isinstance(error, AttributeError | AssertionError) and section:
            raise ValueError(
                "this section is null here, its words cannot be set one by one",
                section,
                "stage.lora: choose stage=lora or stage=dpo_lora; model.rope_scaling: write it into a file of conf/model",
            ) from error

    def refusal(self, error: BaseException) -> ValueError:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key = (getattr(cause, "full_key", None) or "").partition("[")[0]
        what = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(error).__name__)
        said = [word for word in self.words if word.lstrip("+").startswith(f"{key}=")]
        # said twice, the value that is complained of is meant; where none is, the last counts
        word = next((word for word in said if f"'{word.partition('=')[2]}'" in what), (said or [key or " ".join(self.words) or "the command line"])[-1])
        kind = words_of.schema().get(key)
        if isinstance(cause, ConfigKeyError) and key not in words_of.schema():
            return ValueError("no such word", key, words_of.nearest_word(key))
        if what.startswith(("Ambiguous value", "Sweep parameters")):  # 1,2 and range(1,2)
            several = re.search(r"'(.*)'", what)
            return ValueError("several values for one run", several[1] if several else word, "add --multirun to train once with each, or write a list as [1,2]")
        if dataclasses.is_dataclass(kind):
            return ValueError("this is a section, its words are set one by one", word, f"write e.g. {key}.{dataclasses.fields(kind)[0].name}=<value>")
        if isinstance(error, OverrideParseException) or what.startswith(SYNTAX):
            return ValueError(
                f"this cannot be read: {what}",
                getattr(error, "override", word),
                "put quotes around a value with brackets, commas, spaces or = in it: 'word=\"value\"'",
            )
        takes = TAKES.get(getattr(kind, "__name__", ""))
        return ValueError(f"this word takes {takes.partition(',')[0]}", word, f"give {takes}") if takes else ValueError(what, word, SEE)


OPTIONAL = ("model.rope_scaling", "stage.lora")
TAKES = {"int": "a whole number, e.g. 100", "float": "a number, e.g. 5e-4", "bool": "true or false", "list": "a list in brackets, e.g. [0.9,0.95]"}
SYNTAX = ("mismatched input", "extraneous input", "no viable alternative", "token recognition error")  # of one word by itself Hydra says no more
SEE = "python runner/train.py --help shows the words, --hydra-help those of Hydra"
