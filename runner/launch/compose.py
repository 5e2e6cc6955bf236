"""Words in, a checked Config out: the only place where Hydra's loose tree becomes plain dataclasses."""
from __future__ import annotations

from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from runner.engine.config import Config

ROOT = Path(__file__).resolve().parents[2]


def register() -> None:
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("repo", lambda: str(ROOT), replace=True)


def typed(cfg: DictConfig) -> Config:
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    return config


def compose(words: list[str]) -> Config:
    """What `python runner/train.py <words>` would train."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return typed(hydra_compose("config", overrides=words))
