"""Attention by blocks of matrix products against PyTorch's kernel, and the number of programs that compiled layers
need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import packed, random_model, tokens
from torch import Tensor

from models.layers import attention as attention_module
from models.layers.attention import attention, cpu_attention, document_blocks, document_mask


def packed_rows(T: int) -> Tensor:
    """Document ids of two rows with several documents each, the second one with padding."""
    return torch.stack([torch.arange(T) // 50, torch.where(torch.arange(T) < T - T // 5, torch.arange(T) // 90, -1)])


def test_flex_attention_has_smaller_tiles_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch need more shared memory than most cards have: tests/cuda/test_shared_memory.py."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(attention_module, "_compiled_flex", lambda: lambda *_, **given: options.append(given))
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.zeros(1, 2, 256, 96, dtype=dtype)
        attention(q, q, q, document_blocks(torch.zeros(1, 256, dtype=torch.long)), 0.0, "auto")
    fp32, bf16 = (given["kernel_options"] for given in options)
    assert fp32 == {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2} and bf16 is None


@pytest.mark.parametrize("save_probs", [True, False], ids=["saved", "recomputed"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("T", [1, 8, 64, 72, 200])
def test_cpu_attention_matches_scaled_dot_product_attention(T: int, is_packed: bool, save_probs: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, 16, requires_grad=True) for heads in (4, 2, 2))
    mask = document_mask(packed_rows(T), dropout=0.0) if is_packed else None
    actual = cpu_attention(q, k, v, mask, save_probs)[0]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    g = torch.randn_like(expected)
    for grad, expected_grad in zip(
        torch.autograd.grad(actual, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-5)


def test_cpu_attention_overflow_in_one_document_does_not_reach_another() -> None:
    q, k = torch.full((1, 2, 8, 16), 60.0).half(), torch.ones(1, 2, 8, 16).half()
    k[:, :, :4] = 20_000.0
    mask = document_mask((torch.arange(8) // 4).unsqueeze(0), dropout=0.0)
    out = cpu_attention(q, k, k, mask, False)[0]
    assert not out[:, :, :4].isfinite().all() and out[:, :, 4:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(  # every pair of values
    ("is_packed", "single_row", "dropout"),
    [(True, False, 0.0), (True, True, 0.1), (False, False, 0.1), (False, True, 0.0)],
)
def test_compiled_layers_share_one_program_for_all_shapes(is_packed: bool, single_row: bool, dropout: float) -> None:
    programs = []
    model = random_model(dropout=dropout).train()
    model.compile_layers(single_row=single_row, backend=lambda graph, inputs: programs.append(graph) or graph)
    for B, T in ((1, 64), (1, 56)) if single_row else ((4, 64), (4, 56), (1, 64), (3, 128), (2, 200)):
        ids = tokens(B, T + 1)
        model(ids[:, :-1], labels=ids[:, 1:], reduction="sum", **packed(B, T) if is_packed else {}).nll.backward()
    assert len(programs) == 1


@pytest.mark.slow
def test_compiled_layers_are_not_used_in_evaluation() -> None:
    model = random_model()
    model.compile_layers(single_row=False, backend=lambda graph, inputs: pytest.fail("compiled"))
    model(tokens(2, 16))


@pytest.mark.slow
def test_compiled_layers_recompute_rotated_queries() -> None:
    """By the partition of torch's compiler alone, without its C++ programs: `aot_eager_decomp_partition` runs what the
    compiler would compile.
    """
    model = random_model(num_hidden_layers=1).train()
    model.compile_layers(single_row=False, backend="aot_eager_decomp_partition")
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        model(tokens(2, 24), labels=tokens(2, 24), reduction="sum")
    cfg = model.cfg
    assert (2, cfg.num_key_value_heads, 24, cfg.head_dim) in saved  # values, as they are projected
    assert (2, cfg.num_attention_heads, 24, cfg.head_dim) not in saved
