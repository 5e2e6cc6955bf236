"""Models in the formats of others: Hugging Face and PEFT folders, MiniMind's .pth files; and the `model/` of our own runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from models.config import LoraConfig, ModelConfig
from models.decoder import Decoder
from models.hub_config import check, complete, config_json, read_config, read_json
from models.lora import AdaptedLinear, add_lora, load_adapter, merge

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PEFT_PREFIX = "base_model.model."
BASE = "base"  # inside an adapter's folder: the base, where no Hugging Face folder outside holds it
TABLE_ROWS = 6  # of each fault

# What a PEFT folder must say, or leave out, to mean what LoraConfig can
ADAPTER_MUST = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
}


def save_model(folder: Path, model: Decoder, cfg: ModelConfig, tokenizer_folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; a tied tensor once, adapters left out (merge them first)."""
    folder.mkdir(parents=True, exist_ok=True)
    control = _copy_tokenizer(tokenizer_folder, folder)
    _write_json(folder / "config.json", config_json(cfg, control))
    _write_json(folder / "generation_config.json", control)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora." not in name}
    if cfg.tie_word_embeddings:
        del state[HEAD]
    _write_tensors(folder / "model.safetensors", state)


def save_adapter(folder: Path, model: Decoder, cfg: LoraConfig, base: str, tokenizer_folder: Path, name: str = "default") -> None:
    """Write adapter `name` as a PEFT folder. `base`: where the model under it came from.

    A base that PEFT could not open (random weights, a .pth file, an adapter) is written into the folder too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(tokenizer_folder, folder)
    source = _model_folder(Path(base))
    if not (source / "config.json").exists() or _is_adapter(source):
        save_model(folder / BASE, model, model.cfg, tokenizer_folder)
    adapter = {
        "base_model_name_or_path": BASE if (folder / BASE).exists() else str(source.absolute()),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": list(cfg.targets),
    }
    _write_json(folder / "adapter_config.json", ADAPTER_MUST | adapter)
    state: dict[str, Tensor] = {}
    for path, linear in model.named_modules():
        if isinstance(linear, AdaptedLinear) and name in linear.lora:
            for matrix, weight in linear.lora[name].named_parameters():
                state[f"{PEFT_PREFIX}{path}.lora_{matrix}.weight"] = weight
    _write_tensors(folder / "adapter_model.safetensors", state)


def load_model(folder: Path) -> Decoder:
    """The model of a run's, a Hugging Face or a PEFT folder in fp32, for inference; an adapter stays switchable beside its base."""
    folder = _model_folder(folder)
    if _is_adapter(folder):
        model = load_model(_base_of(folder))
        merge(model)  # a base that is itself an adapter over another base
        cfg, state = _read_adapter(folder)
        add_lora(model, cfg)
        try:
            load_adapter(model, {f"{path}.lora.default.{matrix}": tensor for (path, matrix), tensor in state.items()})
        except KeyError as error:
            raise ValueError("this adapter was not made for its base", str(folder), str(error.args[0])) from error
    else:
        model = Decoder(read_config(folder))
        load_into(model, load_weights(folder), str(folder))
    return model.eval()


def load_weights(source: Path) -> dict[str, Tensor]:
    """fp32 weights by name from a run, a Hugging Face folder, a PEFT folder (merged into its base) or a MiniMind .pth file."""
    if source.is_file():
        return _read_pth(source)
    folder = _model_folder(source)
    if _is_adapter(folder):
        return _merged(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(
            "there are no weights here", str(source), "give the folder of a finished run, a Hugging Face folder with model.safetensors, or a .pth file"
        )
    return {name: tensor.float() for file in files for name, tensor in _read_tensors(file).items()}


def load_into(model: Decoder, state: dict[str, Tensor], source: str) -> None:
    """Fill every tensor of `model` from `state`; ValueError(what, where, fix) with a table if a name or a shape differs."""
    own = model.state_dict()
    if model.cfg.tie_word_embeddings and EMBEDDING in state:
        # Files hold a tied tensor once or twice; where two differ, one of them would be lost without a word.
        state = {HEAD: state[EMBEDDING]} | state
        if not torch.equal(state[HEAD], state[EMBEDDING]):
            raise ValueError(f"{HEAD} is not {EMBEDDING}: these weights are not tied", source, "set model.tie_word_embeddings=false")
    faults = {
        "missing": [f"{name} {tuple(own[name].shape)}" for name in own if name not in state],
        "not of this model": [f"{name} {tuple(state[name].shape)}" for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, not {tuple(own[name].shape)}" for name in own if name in state and own[name].shape != state[name].shape
        ],
    }
    if any(faults.values()):
        raise ValueError(_table(faults), source, "choose the model=... these weights were made with, or other weights")
    model.load_state_dict(state)


def _table(faults: dict[str, list[str]]) -> str:
    lines = ["the weights are not those of this model:"]
    for fault, names in faults.items():
        lines += [f"  {len(names)} {fault}"] if names else []
        lines += [f"    {name}" for name in names[:TABLE_ROWS]]
        lines += ["    ..."] if len(names) > TABLE_ROWS else []
    return "\n".join(lines)


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[tuple[str, str], Tensor]]:
    """The adapter's settings, and its matrices by (path of the Linear, A or B)."""
    path = folder / "adapter_config.json"
    raw = read_json(path)
    check(raw, ADAPTER_MUST, path)
    state = {}
    for name, tensor in _read_tensors(folder / "adapter_model.safetensors").items():
        linear, _, matrix = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        state[linear, matrix] = tensor.float()
    targets = sorted({linear.rsplit(".", 1)[-1] for linear, _ in state})
    with complete(path):
        return LoraConfig(raw["r"], raw["lora_alpha"], raw["lora_dropout"], targets), state


def _merged(folder: Path) -> dict[str, Tensor]:
    weights, (cfg, state) = load_weights(_base_of(folder)), _read_adapter(folder)
    for linear in {linear for linear, _ in state}:
        weight, delta = weights.get(f"{linear}.weight"), cfg.alpha / cfg.rank * state[linear, "B"] @ state[linear, "A"]
        if weight is None or weight.shape != delta.shape:
            raise ValueError("this adapter was not made for its base", str(folder), f"{linear}.weight of {_base_of(folder)} is not {tuple(delta.shape)}")
        weight += delta
    return weights


def _read_pth(path: Path) -> dict[str, Tensor]:
    """A MiniMind weights file: names as ours, half precision, the tied tensor twice."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError("this is no file of weights", str(path), f"give a MiniMind .pth file ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError("this file holds more than weights", str(path), "give the weights file, not the one MiniMind resumes from")
    return {name: tensor.float() for name, tensor in state.items()}


def _model_folder(source: Path) -> Path:
    """`source`, or the finished model inside it where it is a run."""
    return source / "model" if (source / "model").is_dir() else source


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _base_of(folder: Path) -> Path:
    path = folder / "adapter_config.json"
    with complete(path):
        name = read_json(path)["base_model_name_or_path"]
    for base in (folder / name, Path(name)):
        if base.is_dir():
            return base
    raise ValueError("the model under this adapter is gone", name, f"put it back, or correct base_model_name_or_path in {path}")


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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError("this file of weights is missing or damaged", str(path), f"write or download it again ({error})") from error


def _write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
