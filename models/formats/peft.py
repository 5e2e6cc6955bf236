"""Adapter folders of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from common.errors import UserError
from common.guarded_files import DOWNLOAD_HINT, reporting_missing_fields
from models.config import LoraConfig
from models.formats.json_files import check_number_types, read_json_file
from models.formats.tensor_files import check_finite, read_tensors, to_floats
from models.layers.adapter import ADAPTER

PEFT_PREFIX = "base_model.model."  # of every tensor name
BASE_DIR = "base"  # inside an adapter folder: the base model, if PEFT could not open the folder it came from

# Fields of adapter_config.json that are read, or that do not change the meaning of the stored tensors. Any other field
# must be empty: PEFT has variants that
# change the base model or compute something else (PiSSA, LoftQ, activated LoRA, target_parameters, ...), and gets new
# ones.
KNOWN_FIELDS = frozenset(
    """
    peft_type base_model_name_or_path r lora_alpha lora_dropout use_rslora use_dora rank_pattern alpha_pattern
    fan_in_fan_out init_lora_weights
    auto_mapping revision task_type inference_mode peft_version target_modules exclude_modules layers_to_transform
    layers_pattern bias modules_to_save ensure_weight_tying megatron_core qalora_group_size eva_config
    """.split()
)
# init_lora_weights that leave the base model as it is
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
# keys of rank_pattern and alpha_pattern that are matched: names, paths and \d+
NAME_PATTERN = re.compile(r"\^?(?:\w|\\?\.|\\d\+?)+")
DIGITS = r"\d+"  # in such a key
MAX_PATTERN_WORK = 500_000_000  # characters of keys x parts of the paths of layers: seconds
MAX_PATH_LENGTH = 1000  # characters of the path of a layer
MATRICES = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude"}


class StoredAdapter(NamedTuple):
    cfg: LoraConfig
    layers: dict[str, LoraConfig]  # by path of the linear layer: its own rank and alpha
    matrices: dict[tuple[str, str], Tensor]  # by (path of the linear layer, A, B or magnitude)
    # tensors of the base model that the adapter has another version of: biases, modules_to_save
    replaced: dict[str, Tensor]

    def parameters(self) -> dict[str, Tensor]:
        return {f"{path}.lora.{ADAPTER}.{matrix}": tensor for (path, matrix), tensor in self.matrices.items()}


def read_adapter(folder: Path) -> StoredAdapter:
    """Raises UserError, naming the field or the tensor, for an adapter of a kind that is not computed here."""
    path = folder / "adapter_config.json"
    raw = read_json_file(path)
    _check_variant(raw, path)
    file = folder / "adapter_model.safetensors"
    check_finite(stored := to_floats(read_tensors(file), file), file)
    matrices, replaced = _sort_tensors(stored, path)
    layers = sorted({layer for layer, _ in matrices})
    with reporting_missing_fields(path):
        rslora, dora = bool(raw.get("use_rslora")), bool(raw.get("use_dora"))
        cfg = LoraConfig(
            raw["r"], raw["lora_alpha"], raw["lora_dropout"], [], rslora, dora, quantize=None, continue_adapter=False
        )
        check_number_types(cfg)
        ranks = _values_by_layer(raw, "rank_pattern", cfg.rank, layers, path)
        alphas = _values_by_layer(raw, "alpha_pattern", cfg.alpha, layers, path)
        settings = {layer: dataclasses.replace(cfg, rank=ranks[layer], alpha=alphas[layer]) for layer in layers}
        for own in settings.values():
            check_number_types(own)
    _check_matrices(matrices, settings, path)
    return StoredAdapter(cfg, settings, matrices, replaced)


def _check_matrices(matrices: Mapping[tuple[str, str], Tensor], layers: Mapping[str, LoraConfig], path: Path) -> None:
    """Raise UserError if a layer lacks a matrix or has one of another rank."""
    for layer, cfg in layers.items():
        expected = ("A", "B", "magnitude") if cfg.dora else ("A", "B")
        found = {matrix: matrices[layer, matrix] for matrix in MATRICES.values() if (layer, matrix) in matrices}
        if tuple(found) != expected:
            message = (
                f"{layer} has the matrices {', '.join(found)}, expected {', '.join(expected)} with use_dora={cfg.dora}"
            )
            raise UserError(message, path, DOWNLOAD_HINT)
        for matrix, tensor in found.items():
            if tensor.ndim != (1 if matrix == "magnitude" else 2) or (
                matrix != "magnitude" and tensor.shape[matrix == "B"] != cfg.rank
            ):
                message = f"{layer}.lora_{matrix} of shape {tuple(tensor.shape)} is no adapter of rank r={cfg.rank}"
                raise UserError(message, path, DOWNLOAD_HINT)


def _check_variant(raw: Mapping[str, Any], path: Path) -> None:
    if (kind := raw.get("peft_type") or "LORA") != "LORA":
        message = f"peft_type={kind} is not supported, only peft_type=LORA"
        raise UserError(message, path, "choose another model")
    for field, value in raw.items():
        if field not in KNOWN_FIELDS and value:
            raise UserError(
                f"{field}={str(value)[:60]} is not supported",
                path,
                "merge the adapter into its base model with PEFT: merge_and_unload()",
            )
    if raw.get("init_lora_weights") not in PLAIN_INITS:
        message = f"init_lora_weights={str(raw['init_lora_weights'])[:60]} is not supported: the adapter fits a changed base model"
        raise UserError(
            message,
            path,
            "convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _sort_tensors(stored: Mapping[str, Tensor], path: Path) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
    matrices, replaced = {}, {}
    for name, tensor in stored.items():
        own = name.removeprefix(PEFT_PREFIX)
        if len(own) > MAX_PATH_LENGTH:
            raise UserError(
                f"the tensor {own[:60]}... has a name of {len(own):,} characters",
                path,
                DOWNLOAD_HINT,
            )
        suffix = next((suffix for suffix in MATRICES if own.endswith(f".{suffix}")), None)
        if suffix:
            matrices[own.removesuffix(f".{suffix}"), MATRICES[suffix]] = tensor
        elif "lora_" in own or "token_adapter" in own:
            raise UserError(
                f"the tensor {name} is not supported",
                path,
                "merge the adapter into its base model with PEFT: merge_and_unload()",
            )
        else:
            replaced[own.replace(".base_layer.", ".")] = tensor
    return matrices, replaced


def _values_by_layer(raw: Mapping[str, Any], field: str, default: Any, layers: list[str], path: Path) -> dict[str, Any]:
    """Return the value of each layer: of the first key that matches the end of its path, or the whole path if it begins
    with ^.

    Raises UserError for a key, or for as many, whose comparison with `layers` could take long: digits are never matched
    a second time.
    """
    patterns = raw.get(field) or {}
    for key in patterns:
        if not NAME_PATTERN.fullmatch(key):
            raise UserError(
                f"{field} has the regular expression {key[:60]!r}; names and paths of layers are read",
                path,
                "write the names of the layers",
            )
    if sum(map(len, patterns)) * sum(layer.count(".") + 1 for layer in layers) > MAX_PATTERN_WORK:
        raise UserError(
            f"{field} has too many keys, {len(patterns):,} for {len(layers):,} layers",
            path,
            DOWNLOAD_HINT,
        )
    expressions = [
        (re.compile(rf"(?:.*\.)?(?:{key.replace(DIGITS, DIGITS + '+')})"), value) for key, value in patterns.items()
    ]
    return {
        layer: next((value for expression, value in expressions if expression.fullmatch(layer)), default)
        for layer in layers
    }


def adapter_config(
    cfg: LoraConfig, layers: Mapping[str, LoraConfig], targets: list[str], base: str, is_transposed: bool
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    `layers`: rank and alpha of each adapted layer; `targets`: names of exactly these layers.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": targets,
        "use_rslora": cfg.rslora,
        "use_dora": cfg.dora,
        "rank_pattern": {f"^{path}": own.rank for path, own in layers.items() if own.rank != cfg.rank},
        "alpha_pattern": {f"^{path}": own.alpha for path, own in layers.items() if own.alpha != cfg.alpha},
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "modules_to_save": [],
    }
