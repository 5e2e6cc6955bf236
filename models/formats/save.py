"""Write Hugging Face and PEFT folders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import print_note
from common.guarded_files import GENERATION_CONFIG, MAX_TOKENIZER_BYTES, copy_unchanged_tokenizer, read_source_file
from common.hub import hub_name_of
from common.limits import parse_json
from models.config import LoraConfig, ModelConfig
from models.families.decoder import DecoderConfig
from models.families.transformers import TransformersConfig
from models.formats.json_files import (
    MAX_BASE_MODELS,
    RENAMED_TYPES,
    base_model_of,
    is_adapter_dir,
    model_dir,
    model_type_of,
    read_json_file,
    write_json_file,
)
from models.formats.load import HEAD_KEY, model_with_weights
from models.formats.peft import BASE_DIR, MATRICES, PEFT_PREFIX, adapter_config
from models.formats.tensor_files import to_folder_names, write_tensors
from models.language_model import LanguageModel
from models.layers.adapter import is_quantized, is_transposed
from models.lora import linear_layers_of, lora_layers, short_names

TOKENIZER_CLASSES_OF_5 = ("TokenizersBackend", "PythonBackend")  # transformers 4 does not know them
GENERIC_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # reads tokenizer.json as it is, in both versions
MAX_LEFT_OUT = 200  # characters of names
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def save_model(
    folder: Path,
    model: LanguageModel,
    cfg: ModelConfig,
    tokenizer_dir: Path,
    stop_ids: Sequence[int] = (),
    dtype: str = "float32",
    shard_size: str = "1000TB",
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load: tied weights once, without adapters (merge
    them before).

    `stop_ids`: tokens that end a generated text, where they are more than the eos_token of the tokenizer; `dtype` of
    the files: float32, bfloat16 or float16; `shard_size`: the largest file of weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token_ids = write_tokenizer(tokenizer_dir, folder, stop_ids)
    hf_config = cfg.to_hf_config() | {"dtype": dtype, "torch_dtype": dtype}
    write_json_file(folder / "config.json", hf_config | token_ids)
    state = {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if ".lora." not in name
    }
    if isinstance(cfg, TransformersConfig):
        from models.transformers_adapter.model import save_transformers_weights

        save_transformers_weights(folder, model, state, shard_size)
        return
    if cfg.tie_word_embeddings:
        del state[HEAD_KEY]
    tensors = to_folder_names(state, hf_config["model_type"])
    largest = float(shard_size[:-2]) * SIZE_UNITS[shard_size[-2:]]  # 5GB, as huggingface_hub reads it
    if sum(tensor.nbytes for tensor in tensors.values()) <= largest:
        write_tensors(folder / "model.safetensors", tensors)
    else:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(tensors, folder, max_shard_size=shard_size, metadata={"format": "pt"})


def save_adapter(
    folder: Path,
    model: LanguageModel,
    cfg: LoraConfig,
    base: str,
    tokenizer_dir: Path,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write the adapter of `model` as a PEFT folder. `base`: where the base model came from (init_from).

    A base model that PEFT could not open under the decoder's names (random weights, a .pth file, an adapter, Mixtral,
    Phi-3) is written to the folder too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer_dir, folder, stop_ids)
    source = model_dir(Path(base))
    is_readable = _is_readable_by_peft(source, model)
    if not is_readable:
        cfg_of_base = model.cfg
        if isinstance(cfg_of_base, DecoderConfig) and cfg_of_base.model_type in RENAMED_TYPES:
            # the adapter has the names of the decoder's layers
            cfg_of_base = dataclasses.replace(cfg_of_base, model_type=None)
        unquantized = model_with_weights(model.cfg, source) if is_quantized(model) else model
        save_model(folder / BASE_DIR, unquantized, cfg_of_base, tokenizer_dir, stop_ids)
    adapters = {path: layer.adapter for path, layer in lora_layers(model).items() if layer.adapter is not None}
    modules = [path for path, _ in model.named_modules()]  # PEFT refuses a module of a class that it does not adapt
    targets = short_names([*modules, *linear_layers_of(model).refused], set(adapters))
    transposed = any(is_transposed(model.get_submodule(path)) for path in adapters)
    layers = {path: adapter.cfg for path, adapter in adapters.items()}
    state: dict[str, Tensor] = {}
    for path, adapter in adapters.items():
        own = dict(adapter.named_parameters())
        state |= {f"{PEFT_PREFIX}{path}.{suffix}": own[matrix] for suffix, matrix in MATRICES.items() if matrix in own}
    of_hub = hub_name_of(source.absolute()) if is_readable else None
    location = of_hub.repo if of_hub else str(source.absolute()) if is_readable else BASE_DIR
    settings = adapter_config(cfg, layers, targets, location, transposed)
    write_json_file(folder / "adapter_config.json", settings | ({"revision": of_hub.revision} if of_hub else {}))
    write_tensors(folder / "adapter_model.safetensors", state)


def _is_readable_by_peft(source: Path, model: LanguageModel) -> bool:
    if is_adapter_dir(source) or not (source / "config.json").exists():
        return False
    return isinstance(model.cfg, TransformersConfig) or model_type_of(source) not in RENAMED_TYPES


def write_tokenizer(source: Path, folder: Path, stop_ids: Sequence[int]) -> dict[str, int]:
    """Write the tokenizer of the folder `source`, and generation_config.json; return what `copy_tokenizer_files` does.

    The settings of generation are those of `source`, or of the base model of an adapter, with the ids of this
    tokenizer.
    """
    token_ids = copy_tokenizer_files(source, folder)
    for _ in range(MAX_BASE_MODELS):
        if os.path.lexists(source / GENERATION_CONFIG) or not is_adapter_dir(source):
            break
        source = base_model_of(source)
    path = source / GENERATION_CONFIG
    settings = generation_settings(path) if os.path.lexists(path) else {}
    eos = {"eos_token_id": list(stop_ids)} if len(stop_ids) > 1 else {}
    write_json_file(folder / GENERATION_CONFIG, settings | token_ids | eos)
    return token_ids


def generation_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a generation_config.json that transformers knows and accepts, without ids of tokens and
    objects; note which are left out.
    """
    found = {
        name: value
        for name, value in read_json_file(path).items()
        if not (name.endswith("token_id") or name.startswith(("_", "transformers_")))
    }
    if not found:
        return {}
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    settings: dict[str, Any] = {}
    for name, value in found.items():
        if name not in known or not _is_plain(value):
            continue
        try:
            GenerationConfig(**settings, **{name: value})
        except Exception:  # a value of another type fails in any way
            continue
        settings[name] = value
    if left_out := [name for name in found if name not in settings]:
        print_note(
            f"{path}: left out of the model's generation_config.json: {', '.join(left_out)[:MAX_LEFT_OUT]}, which transformers does not know or refuses"
        )
    return settings


def _is_plain(value: Any) -> bool:
    """Return whether a JSON value is a scalar, or a list of scalars or of lists of scalars."""
    items = (
        [item for each in value for item in (each if isinstance(each, list) else [each])]
        if isinstance(value, list)
        else [value]
    )
    return not any(isinstance(item, dict | list) for item in items)


def tokenizer_config_of_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json that versions 4 and 5 of transformers read."""
    config = dict(config)
    if config.get("tokenizer_class") in (None, *TOKENIZER_CLASSES_OF_5):
        config["tokenizer_class"] = GENERIC_TOKENIZER_CLASS
    # returns token_type_ids otherwise, which `generate` refuses
    if config["tokenizer_class"] == GENERIC_TOKENIZER_CLASS:
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    # a dictionary in version 4, which had this name for lists
    if isinstance(config.get("extra_special_tokens"), list):
        config.setdefault("additional_special_tokens", config.pop("extra_special_tokens"))
    return config


def copy_tokenizer_files(source: Path, folder: Path) -> dict[str, int]:
    """Copy the tokenizer files, without BPE dropout and classes that transformers 4 lacks; return the ids of its control tokens as transformers names them:
    bos_token_id, eos_token_id, pad_token_id.
    """
    copy_unchanged_tokenizer(source, folder)
    config = parse_json(read_source_file(source / "tokenizer_config.json", MAX_TOKENIZER_BYTES))
    stored = parse_json(read_source_file(source / "tokenizer.json", MAX_TOKENIZER_BYTES))
    if stored["model"].get("dropout"):  # off in training and here, so that other programs get the same ids
        stored["model"]["dropout"] = None
        write_json_file(folder / "tokenizer.json", stored)
    if config.get("tokenizer_class") in TOKENIZER_CLASSES_OF_5:
        write_json_file(folder / "tokenizer_config.json", tokenizer_config_of_4(config))
    ids = {token["content"]: token["id"] for token in stored["added_tokens"]}
    token_ids = {}
    for role in ("bos", "eos", "pad"):
        token = config.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token in ids:
            token_ids[f"{role}_token_id"] = ids[token]
    return token_ids
