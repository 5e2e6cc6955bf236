"""Attention by matrix products against the kernel that looks at everything; and what compiling the layers costs: one program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import random_model, tokens
from torch import Tensor

from models.layers.attention import document_mask
from models.layers.attention_cpu import cpu_attention


def packed_lines(T: int) -> Tensor:
    """Two lines of several sequences each, the second with padding."""
    return torch.stack([torch.arange(T) // 50, torch.where(torch.arange(T) < T - T // 5, torch.arange(T) // 90, -1)])


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made_again"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("T", [1, 8, 64, 72, 200])
def test_blocks_give_what_the_whole_gives_forwards_and_backwards(T: int, packed: bool, keep: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, 16, requires_grad=True) for heads in (4, 2, 2))
    mask = document_mask(packed_lines(T), dropout=0.0) if packed else None
    found = cpu_attention(q, k, v, mask, keep)[0]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    weigh = torch.randn_like(expected)
    for mine, theirs in zip(torch.autograd.grad(found, (q, k, v), weigh), torch.autograd.grad(expected, (q, k, v), weigh), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_score_that_overflows_spoils_no_other_sequence() -> None:
    q, k = torch.full((1, 2, 8, 16), 60.0).half(), torch.ones(1, 2, 8, 16).half()
    k[:, :, :4] = 20_000.0
    mask = document_mask((torch.arange(8) // 4).unsqueeze(0), dropout=0.0)
    found = cpu_attention(q, k, k, mask, False)[0]
    assert not found[:, :, :4].isfinite().all() and found[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("lone", [False, True], ids=["lines", "one_line"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_all_layers_and_all_shapes_are_one_compiled_program(packed: bool, lone: bool, dropout: float) -> None:
    programs = []
    model = random_model(dropout=dropout).train()
    model.compile_layers(single_row=lone, backend=lambda graph, inputs: programs.append(graph) or graph)
    for B, T in ((1, 64), (1, 56)) if lone else ((4, 64), (4, 56), (1, 64), (3, 128), (2, 200)):
        ids, lines = tokens(B, T + 1), torch.arange(T).expand(B, T)
        layout = {"document_ids": lines // 20, "position_ids": lines % 20} if packed else {}
        model(ids[:, :-1], labels=ids[:, 1:], reduction="sum", **layout).nll.backward()
    assert len(programs) == 1


def test_compiled_layers_are_for_training_alone() -> None:
    model, ids = random_model(), tokens(2, 16)
    model.compile_layers(single_row=False, backend=lambda graph, inputs: pytest.fail("compiled"))
    model(ids)
