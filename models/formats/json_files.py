"""Read and write the JSON files of a model folder, and the settings of the model in config.json.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.guarded_files import (
    MAX_MODEL_JSON_BYTES,
    check_own_files,
    parse_object,
    read_source_file,
    reporting_missing_fields,
)
from common.hub import find_base_model
from models.config import MODELS, ModelConfig, UnsupportedVariantError

NUMBER_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}  # by annotation
# model_type of folders whose layers PEFT finds under other names than the decoder's
RENAMED_TYPES = ("mixtral", "phi3")
MAX_BASE_MODELS = 8  # adapters of adapters that are followed to their base model


# file of another tool's model -> its name, and what writes a Hugging Face folder NEW of it
OTHER_TOOLS = {
    "*.gguf": ("a GGUF file", "choose the folder of the original weights"),
    "lit_model.pth": (
        "a checkpoint of litgpt",
        "litgpt convert_from_litgpt {0} NEW && mv NEW/model.pth NEW/pytorch_model.bin && cp {0}/*.json NEW",
    ),
    "model_[0-9]*.pt": (
        "a checkpoint of nanochat",
        "python src/transformers/models/nanochat/convert_nanochat_checkpoints.py --input_dir {0} --output_dir NEW, in a checkout of transformers",
    ),
}


def check_other_tools(source: Path) -> None:
    """Raise UserError, with the conversion to type, if a folder or file is a model that another tool has written."""
    folder, name = (source.parent, source.name) if source.is_file() else (source, "*")
    for pattern, (what, fix) in OTHER_TOOLS.items():
        if any(fnmatch(file.name, name) for file in folder.glob(pattern)):
            raise UserError(f"this is {what}, no Hugging Face folder", source, fix.format(shlex.quote(str(folder))))


def read_json_file(path: Path) -> dict[str, Any]:
    """Raises UserError if the file is not a JSON object."""
    return parse_object(read_source_file(path, MAX_MODEL_JSON_BYTES), path)


def write_json_file(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_model_config(folder: Path, family: str | None = None) -> ModelConfig:
    """Return the settings in config.json, of `family` or of the first model family that computes this model:
    transformers is the last.

    Raises UserError if the folder has no config.json, or one of a model that no family computes.
    """
    path = folder / "config.json"
    if not path.exists():
        check_other_tools(folder)
        raise UserError(
            "config.json is missing: this is no model folder",
            path,
            "give the folder of a finished run, a Hugging Face or a PEFT folder, or a .pth file of MiniMind",
        )
    raw = read_json_file(path)
    with reporting_missing_fields(path):
        cfg = _config_of(raw, path, family)
        check_number_types(cfg)
        return cfg


def _config_of(raw: dict[str, Any], path: Path, family: str | None) -> ModelConfig:
    if family is not None:
        if (types := MODELS.get(family).hf_model_types) and raw["model_type"] not in types:
            message = f"model.family={family} does not compute model_type {raw['model_type']}"
            raise UserError(
                message, path, f"leave model.family={family} out; the types that it computes: {', '.join(types)}"
            )
        return MODELS.get(family).from_hf_config(raw, path)
    found = _find_config(raw, path)
    return MODELS.get("transformers").from_hf_config(raw, path) if isinstance(found, str) else found


def _find_config(raw: dict[str, Any], path: Path) -> ModelConfig | str:
    """Return the settings of the first family but transformers that computes the model, or why none does."""
    reason = f"model_type {raw['model_type']}"
    for candidate in MODELS.entries().values():
        if raw["model_type"] in candidate.hf_model_types:
            try:
                return candidate.from_hf_config(raw, path)
            except UnsupportedVariantError as error:
                reason = error.message
    return reason


def why_transformers(source: Path) -> str:
    """Return why no other family than transformers computes the model of a folder or adapter: the variant that they
    lack, or its model_type.
    """
    path = base_model_dir(source) / "config.json"
    raw = read_json_file(path)
    found = _find_config(raw, path)
    return found if isinstance(found, str) else f"model_type {raw['model_type']}"


def check_number_types(cfg: Any) -> None:
    """Raise TypeError if a field of a config class that is declared as int, float or bool has a value of another type."""
    for field in dataclasses.fields(cfg):
        value, allowed = getattr(cfg, field.name), NUMBER_TYPES.get(str(field.type), ())
        if allowed and type(value) not in allowed:
            raise TypeError(f"{field.name} must be of type {field.type}, got {str(value)[:60]!r}")


def read_config_of_weights(source: Path, family: str | None = None) -> ModelConfig:
    """Return the settings of the model that weights belong to: of a Hugging Face folder, the base model of a PEFT
    folder, or a MiniMind .pth file.
    """
    if source.is_file():
        check_other_tools(source)
        if source.suffix == ".safetensors":
            raise UserError("this file has no settings of its model", source, f"name its folder: {source.parent}")
        from models.formats.tensor_files import read_pth_config

        return read_pth_config(source)
    if is_adapter_dir(folder := model_dir(source)):
        family = family_of_base(folder, family)
    return read_model_config(base_model_dir(source), family)


def family_of_base(adapter: Path, family: str | None) -> str | None:
    """Return the family of the base model of an adapter folder: `family`, or transformers if only there its layers have
    the names that PEFT knows.
    """
    return "transformers" if family is None and model_type_of(adapter) in RENAMED_TYPES else family


def model_type_of(source: Path) -> str | None:
    """Return model_type of the config.json of a model folder, of an adapter that of its base model; None: there is
    none.
    """
    path = base_model_dir(source) / "config.json"
    return read_json_file(path).get("model_type") if path.exists() else None


def read_adapter_settings(source: Path) -> dict[str, Any]:
    """Return the settings of the adapter of a run or of a PEFT folder under the names of stage.lora.

    Raises UserError if it is no adapter.
    """
    folder = model_dir(source)
    if not is_adapter_dir(folder):
        fix = "stage.lora.continue_adapter=false trains a new adapter; of the checkpoint of one: python runner/export.py run=CHECKPOINT to=NEW format=peft, then init_from=NEW"
        raise UserError("init_from is no adapter that could be continued: adapter_config.json is missing", source, fix)
    path = folder / "adapter_config.json"
    raw = read_json_file(path)
    with reporting_missing_fields(path):
        targets = raw["target_modules"]
        names = [f"re:{targets}"] if isinstance(targets, str) else sorted(targets)
        return {
            "rank": int(raw["r"]),
            "alpha": float(raw["lora_alpha"]),
            "targets": names,
            "rslora": bool(raw.get("use_rslora")),
            "dora": bool(raw.get("use_dora")),
        }


def is_adapter_dir(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def base_model_of(folder: Path) -> Path:
    """Return the folder of the adapter's base model. Raises UserError if it does not exist."""
    path = folder / "adapter_config.json"
    with reporting_missing_fields(path):
        settings = read_json_file(path)
        base, of_hub = find_base_model(folder, settings)
    if base is not None:
        return base
    download = f"hf download {of_hub.repo}; or " if of_hub else ""  # a file starts no download
    raise UserError(
        "the adapter's base model does not exist",
        settings["base_model_name_or_path"],
        f"{download}restore it, or correct base_model_name_or_path in {path}",
    )


def base_model_dir(source: Path) -> Path:
    """Return the model folder of a run or a model folder, of an adapter the folder of its base model.

    Raises UserError if that is an adapter of an adapter and so on.
    """
    folder, seen = model_dir(source), set()
    for _ in range(MAX_BASE_MODELS):
        if not is_adapter_dir(folder):
            return folder
        seen.add(folder.resolve())
        if (base := model_dir(base_model_of(folder))).resolve() in seen:
            fix = f"correct base_model_name_or_path in {folder / 'adapter_config.json'}"
            raise UserError("the adapter is its own base model", source, fix)
        folder = base
    raise UserError(
        f"the adapter has more than {MAX_BASE_MODELS} adapters as base models",
        source,
        "merge some of them into their base model",
    )


def model_dir(source: Path) -> Path:
    """Return `source/model` if `source` is a finished run, else `source`.

    Raises UserError if `model` is a link.
    """
    check_own_files(source, (), shallow=("model",))
    return source / "model" if (source / "model").is_dir() else source
