"""Feed-forward layers: gradients against finite differences, and mixtures of experts in 16 bits."""

from __future__ import annotations

import torch
from tiny_models import random_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from models.layers import ops
from models.layers.mlp import SwiGLU
from models.layers.ops import pad_tokens

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def test_swiglu_gradient_equals_finite_differences() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(SwiGLU.apply, (gate, up))


def test_tokens_are_padded_with_zeros_in_16_bits_on_the_cpu_only() -> None:
    x = torch.ones(65, 3)
    assert pad_tokens(x) is x and pad_tokens(x.double()).shape == (65, 3)
    padded = pad_tokens(x.bfloat16())
    assert padded.shape == (128, 3) and bool((padded[:65] == 1).all()) and not padded[65:].any()
    assert len(pad_tokens(x[:64].bfloat16())) == 64 and len(pad_tokens(x[:0].bfloat16())) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert len(pad_tokens(x)) == 128


def test_few_tokens_are_padded_to_a_power_of_two_in_inference() -> None:
    """At most seven numbers below 64: each is a product that oneDNN compiles."""
    x = torch.ones(200, 3, dtype=torch.bfloat16)
    rows = {n: len(pad_tokens(x[:n], is_inference=True)) for n in range(200)}
    assert {n: rows[n] for n in (0, 1, 2, 3, 5, 33, 64, 65)} == {0: 0, 1: 1, 2: 2, 3: 4, 5: 8, 33: 64, 64: 64, 65: 128}
    assert len({*rows.values()}) == 11 and all(n <= m for n, m in rows.items())
    assert len(pad_tokens(x[:3].float(), is_inference=True)) == 3


class ProductRows(TorchDispatchMode):
    """Records the rows of the left operands of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_experts_in_16_bits_have_unpadded_gradients_and_few_shapes(monkeypatch) -> None:
    ids, results = tokens(2, 40), []
    for multiple in (64, 1):
        monkeypatch.setattr(ops, "ROUND_TOKENS_TO", multiple)
        model = random_model(**EXPERTS)
        with ProductRows() as products, torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(ids, ids, reduction="sum").nll
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        experts = products.rows - {80}  # 80: the tokens of the batch
        assert all(rows % 64 == 0 for rows in experts) == (multiple == 64)
    for padded, plain in zip(*results, strict=True):
        assert (padded - plain).norm() <= 0.02 * plain.norm()
