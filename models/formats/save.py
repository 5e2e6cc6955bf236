"""FIXME models.formats.save."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor

from models.config import LoraConfig, ModelConfig
from models.decoder import Decoder
from models.formats.hf_config import to_hf_config
from models.formats.load import _model_folder
from models.formats.peft import BASE_KEY, REQUIRED_ADAPTER_VALUES, is_adapter_dir
from models.formats.tensors import HEAD_KEY, PEFT_PREFIX, write_json_file, write_tensors
from models.lora import LoraLinear

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


def save_model(folder: Path, model: Decoder, cfg: ModelConfig, tokenizer_folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; a tied tensor once, adapters left out (merge them first)."""
    folder.mkdir(parents=True, exist_ok=True)
    control = _copy_tokenizer(tokenizer_folder, folder)
    write_json_file(folder / "config.json", to_hf_config(cfg, control))
    write_json_file(folder / "generation_config.json", control)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora." not in name}
    if cfg.tie_word_embeddings:
        del state[HEAD_KEY]
    write_tensors(folder / "model.safetensors", state)


def save_adapter(folder: Path, model: Decoder, cfg: LoraConfig, base: str, tokenizer_folder: Path, name: str = "default") -> None:
    """Write adapter `name` as a PEFT folder. `base`: where the model under it came from.

    A base that PEFT could not open (random weights, a .pth file, an adapter) is written into the folder too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(tokenizer_folder, folder)
    source = _model_folder(Path(base))
    if not (source / "config.json").exists() or is_adapter_dir(source):
        save_model(folder / BASE_KEY, model, model.cfg, tokenizer_folder)
    adapter = {
        "base_model_name_or_path": BASE_KEY if (folder / BASE_KEY).exists() else str(source.absolute()),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": list(cfg.targets),
    }
    write_json_file(folder / "adapter_config.json", REQUIRED_ADAPTER_VALUES | adapter)
    state: dict[str, Tensor] = {}
    for path, linear in model.named_modules():
        if isinstance(linear, LoraLinear) and name in linear.lora:
            for matrix, weight in linear.lora[name].named_parameters():
                state[f"{PEFT_PREFIX}{path}.lora_{matrix}.weight"] = weight
    write_tensors(folder / "adapter_model.safetensors", state)


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, int]:
    """Copy the tokenizer, and return the ids of its control tokens by the names transformers gives them."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    control = {}
    for role in ("bos", "eos", "pad"):
        token = settings.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token in ids:
            control[f"{role}_token_id"] = ids[token]
    return control
