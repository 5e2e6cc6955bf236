"""The attention of this program as an attention implementation of transformers: `attn_implementation="lm_runner"`.

Shapes: B rows, T tokens, C tokens with the cached ones, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from models.layers.attention import attention

IMPLEMENTATION = "lm_runner"
MARKER = "lm_runner_marker"  # attention that only says that it is called
# arguments of attention that is not computed here: sinks, biases, sparse layers
REFUSED_ARGUMENTS = ("s_aux", "position_bias", "indices", "block_indices")


class UnsupportedAttentionError(RuntimeError):
    """A model asks for something that the kernels of this program do not compute."""


class AttentionCalledError(RuntimeError):
    """A layer calls the attention MARKER."""


def _report_call(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise AttentionCalledError


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query: (B, N, T, H); key, value: (B, K, C, H) -> (B, T, N, H).

    `attention_mask` (B, 1, T, C) is True where attention is allowed, with sliding windows in it; None: causal. Sparse
    layers say by `indices` or `block_indices` which keys a query attends to; only for kernels of transformers they put
    these into the mask.
    """
    if (
        softcap
        or value.shape[-1] != query.shape[-1]
        or any(options.get(name) is not None for name in REFUSED_ARGUMENTS)
    ):
        raise UnsupportedAttentionError(f"softcap, values of another width, {', '.join(REFUSED_ARGUMENTS)}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttentionError("attention that is not causal")
    # Under autocast the rotary embeddings of transformers leave queries and keys in fp32, and values in the dtype of
    # the projection.
    query, key = query.to(value.dtype), key.to(value.dtype)
    default = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - default) > 1e-9:
        query = query * (scaling / default)
    cached = key.shape[2] != query.shape[2] or _has_empty_rows(attention_mask)
    if cached and attention_mask is None:  # one new token, or a prompt after cached tokens, without padding
        T, C = query.shape[2], key.shape[2]
        attention_mask = torch.ones(T, C, dtype=torch.bool, device=query.device).tril(C - T)[None, None]
    out = attention(
        query, key, value, attention_mask, dropout, getattr(module, "attention_kernel", "auto"), cached=cached
    )
    return out.transpose(1, 2).contiguous(), None


def _has_empty_rows(mask: Tensor | None) -> bool:
    """Return whether a query may attend to nothing, as padding on the left of a prompt: only the kernels of torch give
    it a finite output.
    """
    return mask is not None and mask.device.type == "cpu" and not torch.is_grad_enabled() and not mask.any(-1).all()


def register_attention() -> None:
    """Make `attn_implementation="lm_runner"` known to transformers, and keep its progress bars and advice off the
    console.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    AttentionInterface.register(IMPLEMENTATION, own_attention)
    AttentionInterface.register(MARKER, _report_call)
    for name in (IMPLEMENTATION, MARKER):
        AttentionMaskInterface.register(name, sdpa_mask)
