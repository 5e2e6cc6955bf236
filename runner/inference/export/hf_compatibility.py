"""Rewrite a folder of transformers so that versions 4 and 5 read the same model and tokenizer from it, and no file in
it names code.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.guarded_files import read_source_file
from models.formats.json_files import read_json_file, write_json_file
from models.formats.save import tokenizer_config_of_4
from runner.inference.load import LoadedModel

JINJA_FILE, MAX_TEMPLATE_BYTES = "chat_template.jinja", 4 << 20
CODE_FIELDS = ("auto_map", "custom_pipelines")  # name files of Python


def model_class_of(source: LoadedModel) -> str | None:
    """Return the name of the class of transformers that a model is one of; None: config.json of the decoder names it."""
    from models.families.transformers import TransformersConfig

    return type(source.model.hf).__name__ if isinstance(source.model.cfg, TransformersConfig) else None


def make_readable_by_transformers_4(folder: Path, model_class: str | None = None) -> list[str]:
    """Change config.json and tokenizer_config.json in `folder` in place; return why version 4 cannot read the model, if
    so.

    model_class: for a config.json without `architectures`, which vLLM needs.
    """
    config = _read_without_code(folder / "config.json")
    if model_class and not config.get("architectures"):
        config["architectures"] = [model_class]
    fields = _rope_fields_of_4(config)
    is_same_in_5 = not fields or model_class is None or _rope_of_5(config) == _rope_of_5(config | fields)
    write_json_file(folder / "config.json", config | fields if is_same_in_5 else config)
    tokenizer = tokenizer_config_of_4(_read_without_code(folder / "tokenizer_config.json"))
    if (folder / JINJA_FILE).exists():  # read from this file since 4.43, from the field before
        tokenizer["chat_template"] = read_source_file(folder / JINJA_FILE, MAX_TEMPLATE_BYTES).decode("utf-8")
    write_json_file(folder / "tokenizer_config.json", tokenizer)
    problems = []
    if not is_same_in_5:
        problems.append(
            "its rotary position embeddings of several kinds of layers have no form that both versions read"
        )
    if '"__float__"' in json.dumps(config):
        problems.append("config.json has a number that only version 5 reads (infinity or NaN)")
    return problems


def _read_without_code(path: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json_file(path).items() if name not in CODE_FIELDS}


def _rope_of_5(config: dict[str, Any]) -> Any:
    from models.families.transformers import create_hf_config

    with suppress(UserError):  # version 5 may not read what version 4 would
        return create_hf_config(config, "config.json").to_dict().get("rope_parameters")


def _rope_fields_of_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in which version 4 has what version 5 writes as `rope_parameters`; without them it takes a
    default, silently.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return {}
    by_layer_type = any(isinstance(value, dict) for value in parameters.values())
    rope = parameters.get("full_attention") if by_layer_type else parameters
    if not isinstance(rope, dict):
        return {}
    fields: dict[str, Any] = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in fields}
    fields["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if config.get("model_type") in ("gpt_neox", "gpt_neox_japanese"):
        fields |= {
            new: fields[old]
            for new, old in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"))
            if old in fields
        }
    if by_layer_type and isinstance(sliding := parameters.get("sliding_attention"), dict) and "rope_theta" in sliding:
        fields["rope_local_base_freq"] = sliding["rope_theta"]
    return fields
