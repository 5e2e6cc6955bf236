"""Adapter folders of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from common.errors import UserError
from models.config import LoraConfig, check_required_values
from models.formats.json_files import base_model_of, check_number_types, read_json_file, reporting_missing_fields
from models.formats.tensor_files import read_tensors

PEFT_PREFIX = "base_model.model."  # of every tensor name
BASE_DIR = "base"  # inside an adapter folder: the base model, if PEFT could not open the folder it came from

# Fields of adapter_config.json that must have this value or be absent: LoraConfig has no other variant.
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
    """Return the adapter's settings, and its matrices by (path of the linear layer, A or B)."""
    path = folder / "adapter_config.json"
    raw = read_json_file(path)
    check_required_values(raw, REQUIRED_ADAPTER_VALUES, path)
    state = {}
    for name, tensor in read_tensors(folder / "adapter_model.safetensors").items():
        linear, _, matrix = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        state[linear, matrix] = tensor.float()
    targets = sorted({linear.rsplit(".", 1)[-1] for linear, _ in state})
    with reporting_missing_fields(path):
        cfg = LoraConfig(raw["r"], raw["lora_alpha"], raw["lora_dropout"], targets)
        check_number_types(cfg)
    for (linear, matrix), tensor in state.items():
        if tensor.ndim != 2 or tensor.shape[matrix == "B"] != cfg.rank or (linear, "B" if matrix == "A" else "A") not in state:
            message = f"{linear}.lora_{matrix} of shape {tuple(tensor.shape)} is no adapter of rank r={cfg.rank}"
            raise UserError(message, str(path), "write or download the folder again")
    return cfg, state


def merge_adapter_into(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Add the adapter in `folder` to the base weights in place: W + alpha / rank * B A."""
    cfg, state = read_adapter(folder)
    for linear in {linear for linear, _ in state}:
        weight, A, B = weights.get(f"{linear}.weight"), state[linear, "A"], state[linear, "B"]
        if weight is None or weight.shape != (len(B), A.shape[1]):
            raise UserError(
                f"the adapter does not fit its base model: {linear}.weight is not {(len(B), A.shape[1])}",
                str(folder),
                f"correct base_model_name_or_path, now {base_model_of(folder)}",
            )
        weight += cfg.alpha / cfg.rank * B @ A
    return weights
