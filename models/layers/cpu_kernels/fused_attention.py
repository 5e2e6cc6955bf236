"""Attention within documents on x86 CPUs by the C++ kernel: FlashAttention (https://arxiv.org/abs/2205.14135), forward
and backward, document by document.

A mask of another kind, e.g. with sliding windows, is refused: `LanguageModel.attention_sizes` is None for such models.

Scores are products of the input's precision summed in fp32; softmax is computed in fp32; probabilities are rounded to
the input's precision for the next product, unless products in bf16 are computed in fp32 (`upcast_products`). Results do
not depend on the number of threads.

Shapes: B rows, T tokens, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.cpu_kernels.library import call_kernel
from models.layers.cpu_kernels.upcast_products import are_products_upcast
from models.layers.ops import custom_op, empty_gradients, empty_heads

LANES = 16  # the width is a multiple


def supports(dtype: torch.dtype, width: int) -> bool:
    """Return whether the kernels compute heads or SwiGLU networks of this width, where oneDNN has the matrix product."""
    return dtype in (torch.float32, torch.bfloat16) and width % LANES == 0


def check_product(dtype: torch.dtype, head_width: int) -> None:
    """Raise KernelsUnavailableError where oneDNN has no matrix product of `dtype` for this processor.

    Call `load_kernels` first.
    """
    x = torch.zeros(1, 1, LANES, head_width, dtype=dtype)
    fused_attention(x, x, x, None)


@custom_op("lm_runner::fused_attention", is_saved=True)
def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q: (B, N, T, H); k, v: (B, K, T, H); mask: (B, 1, T, T), None: causal -> (B, N, T, H) and the log-sum-exp of the
    scores (B, N, T).
    """
    out, lse = empty_heads(q), _new_lse(q)
    _call("lm_runner_attention_forward", q, k, [q, k, v, out], mask, lse)
    return out, lse


@torch.library.register_fake("lm_runner::fused_attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_heads(q), _new_lse(q)


@custom_op("lm_runner::fused_attention_backward")
def fused_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g: (B, N, T, H), gradient of the output -> gradients of q, k and v."""
    gradients = empty_gradients(g, q, k, v)
    _call("lm_runner_attention_backward", q, k, [g, q, k, v, *gradients], mask, lse)
    return gradients


torch.library.register_fake("lm_runner::fused_attention_backward", empty_gradients)


def _call(name: str, q: Tensor, k: Tensor, tensors: list[Tensor], mask: Tensor | None, lse: Tensor) -> None:
    """Call the kernel with the address and the strides of each tensor; an input whose heads are not contiguous is
    copied.
    """
    (B, N, T, H), K = q.shape, k.shape[1]
    if not all(tensor.dtype == q.dtype for tensor in tensors):
        raise TypeError(
            f"attention needs tensors of one type, got {', '.join(str(tensor.dtype) for tensor in tensors)}"
        )
    if N % K:
        raise ValueError(f"{N} query heads are no multiple of {K} key/value heads")
    tensors = [tensor if tensor.stride(-1) == 1 or H == 1 else tensor.contiguous() for tensor in tensors]
    mask = None if mask is None else mask.expand(B, 1, T, T).contiguous()
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    kind = 0 if q.dtype == torch.float32 else 2 if are_products_upcast() else 1  # `Type` of attention.cpp
    call_kernel(name, [B, N, K, T, H], strides, tensors, mask, lse, H**-0.5, kind)


def _new_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    return *fused_attention_backward(g, *ctx.saved_tensors), None


torch.library.register_autograd("lm_runner::fused_attention", _backward, setup_context=_save_for_backward)
