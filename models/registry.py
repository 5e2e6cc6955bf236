"""Model families: which settings, model class and config.json format belong together. Imports no torch until a model is created."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig

if TYPE_CHECKING:
    from models.language_model import LanguageModel


@dataclass(frozen=True)
class ModelFamily:
    config: type[ModelConfig]  # settings `model.*`
    model: str  # module and class of the LanguageModel
    hf_format: str  # module with to_hf_config(cfg) and from_hf_config(raw, path)
    hf_model_types: tuple[str, ...]  # values of model_type in config.json

    def load_hf_format(self) -> Any:
        return import_module(self.hf_format)


FAMILIES = (ModelFamily(ModelConfig, "models.decoder.Decoder", "models.formats.decoder", ("qwen3", "qwen3_moe", "llama")),)


def family_of(cfg: ModelConfig) -> ModelFamily:
    return next(family for family in FAMILIES if type(cfg) is family.config)


def create_model(cfg: ModelConfig) -> LanguageModel:
    """Return a model with random weights from torch's global generator, on the current default device."""
    module, _, name = family_of(cfg).model.rpartition(".")
    model: LanguageModel = getattr(import_module(module), name)(cfg)
    return model
