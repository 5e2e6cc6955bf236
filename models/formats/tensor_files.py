"""Files of weights in a model folder, and the names and shapes of the tensors in them.

Files are safetensors, and files of torch, which are read without executing anything.

Mixtral and Phi-3 differ from the decoder in names: `mlp.experts.<e>.gate_proj` is `block_sparse_moe.experts.<e>.w1` of
Mixtral; q_proj, k_proj and v_proj are qkv_proj of Phi-3, gate_proj and up_proj are its gate_up_proj.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError
from common.guarded_files import DOWNLOAD_HINT, check_source_file
from models.config import ModelConfig
from models.families.decoder import DecoderConfig

DERIVED_TENSORS = ".rotary_emb.inv_freq"  # in old Llama files; computed from the settings
# (part of a name in a Mixtral folder, in the decoder)
MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.weight", ".gate_proj.weight"),
    (".w2.weight", ".down_proj.weight"),
    (".w3.weight", ".up_proj.weight"),
)
# weights of Phi-3, as rows of one
PHI3_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def to_decoder_names(state: dict[str, Tensor], model_type: str, cfg: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a folder with config.json's `model_type` under the decoder's names."""
    state = {name: tensor for name, tensor in state.items() if not name.endswith(DERIVED_TENSORS)}
    if model_type == "mixtral":
        return {_replaced(name, MIXTRAL_NAMES): tensor for name, tensor in state.items()}
    if model_type == "phi3":
        assert isinstance(cfg, DecoderConfig)
        return {name: tensor for fused, weight in state.items() for name, tensor in _split(fused, weight, cfg).items()}
    return state


def to_folder_names(state: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Return the decoder's tensors under the names of `model_type`."""
    if model_type == "phi3":
        return _fused(state)
    if model_type != "mixtral":
        return state
    return {_replaced(name, [(own, stored) for stored, own in MIXTRAL_NAMES]): state[name] for name in state}


def _replaced(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for old, new in parts:
        name = name.replace(old, new)
    return name


def _fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the fused weights of Phi-3, each at the place of its first part."""
    parts = {part: (fused, fused_parts) for fused, fused_parts in PHI3_FUSED.items() for part in fused_parts}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part = next((part for part in parts if f".{part}." in name), None)
        if part is None:
            tensors[name] = tensor
            continue
        fused, fused_parts = parts[part]
        if part == fused_parts[0]:
            tensors[name.replace(part, fused)] = torch.cat([state[name.replace(part, other)] for other in fused_parts])
    return tensors


def _split(name: str, weight: Tensor, cfg: DecoderConfig) -> dict[str, Tensor]:
    """Split a fused weight of Phi-3; return {name: weight} of any other."""
    queries, keys = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    sizes = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (cfg.intermediate_size, cfg.intermediate_size)}
    for fused, parts in PHI3_FUSED.items():
        if f".{fused}." in name:
            rows = dict(zip(parts, sizes[fused], strict=True))
            if len(weight) != sum(rows.values()):
                raise UserError(
                    f"the weights do not fit config.json: {name} has {len(weight)} rows, expected {sum(rows.values())}",
                    name,
                    "correct config.json",
                )
            return {
                name.replace(fused, part): piece
                for part, piece in zip(rows, weight.split(list(rows.values())), strict=True)
            }
    return {name: weight}


OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")  # in the messages of safetensors
SLACK_BYTES = 1 << 20  # by which the tensors of a file of torch, a tied one counted twice, may be larger than the file
# in torch's message: the name of what unpickling would import
FOREIGN_OBJECT = re.compile(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)")


def read_tensors(path: Path) -> dict[str, Tensor]:
    check_source_file(path)
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"the file of weights is missing or damaged: {error}", path, DOWNLOAD_HINT) from error


def read_torch_file(path: Path, fix: str) -> dict[str, Tensor]:
    """Return the tensors of a file of torch.save.

    Raises UserError for a file that holds anything but weights, or whose tensors are larger than the file.
    """
    try:
        _check_not_compressed(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file fails in any way
        # torch's own text advises to switch weights_only off, which would execute the file: neither the message nor the
        # cause has it
        found = FOREIGN_OBJECT.search(str(error))
        reason = f"it holds the object {found[1]}" if found else "it cannot be read as tensors"
        raise UserError(f"not a file of weights: {reason}", path, fix) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise UserError("the file holds more than weights", path, fix)
    is_dense = all(tensor.layout == torch.strided for tensor in state.values())
    if not is_dense or sum(tensor.nbytes for tensor in state.values()) > 2 * path.stat().st_size + SLACK_BYTES:
        raise UserError("not a file of weights: its tensors are sparse, or larger than the file", path, fix)
    return state


def _check_not_compressed(path: Path) -> None:
    """Raise ValueError for an archive whose content is larger than the file: torch writes archives without compression."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("a compressed archive")


def to_floats(stored: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """Return fp32 weights.

    Raises UserError, naming `source`, for the first tensor by name that is of an integer type: no weight of a model is.
    """
    for name in sorted(stored):
        if not stored[name].is_floating_point():
            raise UserError(
                f"{name} is stored as {str(stored[name].dtype)[6:]}: weights are floating-point numbers",
                source,
                DOWNLOAD_HINT,
            )
    return {name: tensor.float() for name, tensor in stored.items()}


def check_finite(tensors: Mapping[str, Tensor], source: str | Path, fix: str = DOWNLOAD_HINT) -> None:
    """Raise UserError, naming `source`, for the first tensor by name that has a NaN or an infinite value."""
    for name in sorted(tensors):
        if not all_finite(name, tensors[name]):
            raise UserError(
                f"the weights are damaged: {name} has values that are not finite (NaN or infinite)", source, fix
            )


def all_finite(name: str, tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite.

    An infinite `*_min` or `*_max` of one number is no fault: Gemma 4's layers clip at these limits.
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    low, high = (
        tensor.float() if tensor.itemsize == 1 else tensor
    ).aminmax()  # both are NaN if any value is; 0.6 ns per value, isfinite() takes 35, and a sum may overflow
    is_limit = tensor.numel() == 1 and name.endswith(("_min", "_max")) and math.isinf(low.item())
    return is_limit or (math.isfinite(low.item()) and math.isfinite(high.item()))


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    """Write a new file with the permissions of any other: safetensors creates files that only their owner can read.

    Raises OSError, e.g. on a full disk.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()},
            path,
            metadata={"format": "pt"},
        )
    except SafetensorError as error:
        if number := OS_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    path.chmod(mode)


# What MiniMind's own scripts never change, and the file does not tell
MINIMIND_SETTINGS: dict[str, Any] = {
    "family": "decoder",
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dropout": 0.0,
    "attention": "auto",
    "num_experts_per_tok": 1,
}
HEADS_WITHOUT_NORM = 8  # of MiniMind 2, whose files do not tell the width of a head
AUX_LOSS_COEF = 5e-4  # per layer
PTH_HINT = "give a MiniMind .pth file of weights"


def read_pth_config(path: Path) -> DecoderConfig:
    """Return the settings of the model in a .pth file: sizes from its tensors, the rest from MiniMind.

    With one expert per token MiniMind divides its routing weight by itself (norm_topk_prob), so that the expert's
    output counts in full.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in read_torch_file(path, PTH_HINT).items()}
    try:
        vocab_size, width = shapes["model.embed_tokens.weight"]
        layers = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
        attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        query_rows, key_rows = shapes[f"{attention}.q_proj.weight"][0], shapes[f"{attention}.k_proj.weight"][0]
        qk_norm, experts = f"{attention}.q_norm.weight" in shapes, shapes.get(f"{mlp}.gate.weight", (0,))[0]
        head_dim = shapes[f"{attention}.q_norm.weight"][0] if qk_norm else query_rows // HEADS_WITHOUT_NORM
        mlp_width = shapes[f"{mlp}.experts.0.gate_proj.weight" if experts else f"{mlp}.gate_proj.weight"][0]
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"not the weights of a MiniMind model: {error} is missing", path, "give a .pth file of MiniMind 2 or 3"
        ) from error
    return DecoderConfig(
        **MINIMIND_SETTINGS,
        name=path.stem,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=query_rows // head_dim,
        num_key_value_heads=key_rows // head_dim,
        head_dim=head_dim,
        intermediate_size=mlp_width,
        rms_norm_eps=1e-6 if qk_norm else 1e-5,
        qk_norm=qk_norm,
        num_experts=experts,
        moe_intermediate_size=mlp_width if experts else 0,
        norm_topk_prob=experts > 0,
        router_aux_loss_coef=AUX_LOSS_COEF * layers if experts else 0.0,
    )
