"""Weights of MiniMind (.pth), and the settings of their model: the file holds none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError
from models.families.decoder import DecoderConfig
from models.formats.tensor_files import read_torch_file, to_floats

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


def read_pth(path: Path) -> dict[str, Tensor]:
    """Return fp32 weights.

    The file holds half precision under the decoder's parameter names, tied weights twice.
    """
    return to_floats(read_torch_file(path, PTH_HINT), str(path))


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
            f"not the weights of a MiniMind model: {error} is missing", str(path), "give a .pth file of MiniMind 2 or 3"
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
