"""The registry of model families, as a plugin uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from tiny_models import Gpt9

from common.errors import UserError
from models.config import MODELS, ModelConfig, register_model
from models.formats.json_files import read_model_config
from models.language_model import create_model


@pytest.fixture
def registered() -> Iterator[type[ModelConfig]]:
    """A family `gpt9` whose model is a small decoder."""

    @register_model("gpt9")
    @dataclass
    class Gpt9Config(ModelConfig):
        model_class = "tiny_models.Gpt9"
        hf_model_types = ("gpt9",)

        @classmethod
        def from_hf_config(cls, raw: dict[str, Any], path: Path) -> Self:
            return cls("gpt9", path.parent.name, raw["vocab_size"], 2, 256, False)

    yield Gpt9Config
    MODELS.remove("gpt9")


def test_model_family_is_found_by_name_and_by_the_type_in_config_json(
    registered: type[ModelConfig], tmp_path: Path
) -> None:
    assert MODELS.get("gpt9") is registered and MODELS.names() == ["decoder", "gpt9", "transformers"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt9", "vocab_size": 7}))
    cfg = read_model_config(tmp_path)
    assert isinstance(cfg, registered) and cfg.vocab_size == 7 and isinstance(create_model(cfg), Gpt9)


def test_model_family_settings_in_yaml_are_those_of_its_class(registered: type[ModelConfig], tmp_path: Path) -> None:
    from runner.config.compose import compose_config

    with pytest.raises(UserError, match=r"model.\w+ is not read by model.family=gpt9"):
        compose_config(["model.family=gpt9"])


def test_model_family_that_is_not_registered_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="model.family must be one of decoder, transformers, got gpt9"):
        MODELS.get("gpt9")
