"""Kernels that a run computes with, as facts that a resume compares: what the program has chosen besides the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.layers import attention_cpu, chunked_loss
from runner.checkpoint.compatibility import compiler_version

if TYPE_CHECKING:
    import torch


def describe_kernels(device: torch.device, compile_mode: str, has_experts: bool) -> dict[str, Any]:
    """Return fact -> value.

    `compile_mode` is that of the run: with train.compile=auto a resumed run may be longer, or have no compiler.
    """
    is_cpu = device.type == "cpu"
    return {
        "compiled": compile_mode,
        "logits_per_chunk": chunked_loss.LOGITS_PER_CHUNK["cuda" if device.type == "cuda" else "cpu"],
        **({"saved_attention_probs": attention_cpu.MAX_SAVED_PROBS} if is_cpu else {}),
        **({"expert_dispatch": "index_select"} if has_experts else {}),
        **({"compiler": compiler_version()} if is_cpu and compile_mode != "off" else {}),
    }
