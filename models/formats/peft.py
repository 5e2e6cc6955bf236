"""FIXME models.formats.peft."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from common.errors import UserError
from models.config import LoraConfig
from models.formats.hf_config import check_required, complete_config, read_json_file
from models.formats.tensors import PEFT_PREFIX, read_tensors

BASE_KEY = "base"  # inside an adapter's folder: the base, where no Hugging Face folder outside holds it

# What a PEFT folder must say, or leave out, to mean what LoraConfig can
REQUIRED_ADAPTER_VALUES = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
}


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[tuple[str, str], Tensor]]:
    """The adapter's settings, and its matrices by (path of the Linear, A or B)."""
    path = folder / "adapter_config.json"
    raw = read_json_file(path)
    check_required(raw, REQUIRED_ADAPTER_VALUES, path)
    state = {}
    for name, tensor in read_tensors(folder / "adapter_model.safetensors").items():
        linear, _, matrix = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        state[linear, matrix] = tensor.float()
    targets = sorted({linear.rsplit(".", 1)[-1] for linear, _ in state})
    with complete_config(path):
        return LoraConfig(raw["r"], raw["lora_alpha"], raw["lora_dropout"], targets), state


def merge_adapter_into(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Add the adapter in `folder` to the base weights, in place: W + alpha / rank * B @ A."""
    cfg, state = read_adapter(folder)
    for linear in {linear for linear, _ in state}:
        weight, delta = weights.get(f"{linear}.weight"), cfg.alpha / cfg.rank * state[linear, "B"] @ state[linear, "A"]
        if weight is None or weight.shape != delta.shape:
            raise UserError("this adapter was not made for its base", str(folder), f"{linear}.weight of {base_model_of(folder)} is not {tuple(delta.shape)}")
        weight += delta
    return weights


def is_adapter_dir(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def base_model_of(folder: Path) -> Path:
    path = folder / "adapter_config.json"
    with complete_config(path):
        name = read_json_file(path)["base_model_name_or_path"]
    for base in (folder / name, Path(name)):
        if base.is_dir():
            return base
    raise UserError("the model under this adapter is gone", name, f"put it back, or correct base_model_name_or_path in {path}")
