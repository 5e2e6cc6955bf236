"""Weights of MiniMind (.pth), and the settings of their model: the file holds none."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from models.families.decoder import DecoderConfig

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
SLACK_BYTES = 1 << 20  # by which the tensors of a file, a tied one counted twice, may be larger than the file
HEADS_WITHOUT_NORM = 8  # of MiniMind 2, whose files do not tell the width of a head
AUX_LOSS_COEF = 5e-4  # per layer
FOREIGN_OBJECT = re.compile(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)")  # in torch's message: the name of what unpickling would import
# What torch raises for damaged files, measured by changing bytes of one
DAMAGED = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError),
    *(struct.error, zipfile.BadZipFile, OSError),
)


def read_pth(path: Path) -> dict[str, Tensor]:
    """Return fp32 weights. The file holds half precision under the decoder's parameter names, tied weights twice."""
    return {name: tensor.float() for name, tensor in _load(path).items()}


def read_pth_config(path: Path) -> DecoderConfig:
    """Return the settings of the model in a .pth file: sizes from its tensors, the rest from MiniMind.

    With one expert per token MiniMind divides its routing weight by itself (norm_topk_prob), so that the expert's output counts in full.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _load(path).items()}
    try:
        vocab_size, width = shapes["model.embed_tokens.weight"]
        layers = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
        attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        query_rows, key_rows = shapes[f"{attention}.q_proj.weight"][0], shapes[f"{attention}.k_proj.weight"][0]
        qk_norm, experts = f"{attention}.q_norm.weight" in shapes, shapes.get(f"{mlp}.gate.weight", (0,))[0]
        head_dim = shapes[f"{attention}.q_norm.weight"][0] if qk_norm else query_rows // HEADS_WITHOUT_NORM
        mlp_width = shapes[f"{mlp}.experts.0.gate_proj.weight" if experts else f"{mlp}.gate_proj.weight"][0]
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"not the weights of a MiniMind model: {error} is missing", str(path), "give a .pth file of MiniMind 2 or 3") from error
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


def _load(path: Path) -> dict[str, Tensor]:
    """Raises UserError for a file that holds anything but weights, or whose tensors are larger than the file."""
    try:
        _check_not_compressed(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        # torch's own text advises to switch weights_only off, which would execute the file: neither the message nor the cause has it
        found = FOREIGN_OBJECT.search(str(error))
        reason = f"it holds the object {found[1]}" if found else "it cannot be read as tensors"
        raise UserError(f"not a file of weights: {reason}", str(path), "give a MiniMind .pth file of weights") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError("the file holds more than weights", str(path), "give MiniMind's file of weights, not its resume file")
    is_dense = all(tensor.layout == torch.strided for tensor in state.values())
    if not is_dense or sum(tensor.nbytes for tensor in state.values()) > 2 * path.stat().st_size + SLACK_BYTES:
        raise UserError("not a file of weights: its tensors are sparse, or larger than the file", str(path), "give a MiniMind .pth file of weights")
    return state


def _check_not_compressed(path: Path) -> None:
    """Raise ValueError for an archive whose content is larger than the file: torch writes archives without compression."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("a compressed archive")
