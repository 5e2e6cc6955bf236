"""The loss in chunks against the loss of whole logits, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import random_model, tokens
from torch import Tensor, nn

from models.config import LoraConfig
from models.layers import chunked_loss
from models.layers.chunked_loss import IGNORE_LABEL, LMHead, linear_cross_entropy
from models.lora import add_lora

B, T, D, V = 3, 20, 16, 50


@pytest.fixture(autouse=True, params=[7, 1000], ids=["chunks", "one_chunk"])
def rows_at_once(request, monkeypatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_PER_CHUNK", {"cpu": request.param * V})


def made(labelled: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(V, (B, T)).where(torch.rand(B, T) < labelled, IGNORE_LABEL)
    return torch.randn(B, T, D).requires_grad_(), torch.randn(V, D).requires_grad_(), labels


def whole(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE_LABEL).view_as(labels)


@pytest.mark.parametrize("labelled", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_chunks_change_no_loss_and_no_gradient(labelled: float, reduction: str) -> None:
    x, weight, labels = made(labelled)
    weigh = torch.full((B, T), 0.3) if reduction == "sum" else torch.randn(B, T)
    expected = whole(x, weight, labels)
    found = linear_cross_entropy(x, weight, labels, reduction)
    torch.testing.assert_close(found, expected.sum() if reduction == "sum" else expected)
    ours = torch.autograd.grad(found * 0.3 if reduction == "sum" else (found * weigh).sum(), (x, weight))
    for mine, theirs in zip(ours, torch.autograd.grad((expected * weigh).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
def test_in_half_precision_only_the_products_are_rounded(dtype: torch.dtype, tolerance: float, reduction: str) -> None:
    x, weight, labels = made(0.7)
    with torch.autocast("cpu", dtype):
        found = linear_cross_entropy(x, weight, labels, reduction)
    exact = whole(x, weight, labels)
    assert found.dtype == torch.float32
    ours, theirs = (torch.autograd.grad(1024 * loss.sum(), (x, weight)) for loss in (found, exact))  # as a loss scaler does
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - true).abs().max() < tolerance * true.abs().max()


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_what_is_frozen_gets_no_gradient(reduction: str) -> None:
    x, weight, labels = made(0.7)
    linear_cross_entropy(x, weight.detach(), labels, reduction).sum().backward()
    assert x.grad is not None and not linear_cross_entropy(x.detach(), weight.detach(), labels, reduction).requires_grad
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels, reduction).requires_grad


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_head_with_an_adapter_loses_what_its_logits_say(reduction: str) -> None:
    model = nn.ModuleDict({"lm_head": LMHead(D, V, bias=False)})
    add_lora(model, LoraConfig(rank=4, alpha=8.0, dropout=0.0, targets=["lm_head"]))
    adapter = model["lm_head"].lora["default"]
    nn.init.normal_(adapter.B)
    x, _, labels = made(0.7)
    expected = F.cross_entropy(model["lm_head"](x).flatten(0, 1), labels.flatten(), reduction="sum")
    found = model["lm_head"](x, labels, reduction).sum()
    torch.testing.assert_close(found, expected)
    wanted = [x, adapter.A, adapter.B]
    for mine, theirs in zip(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_sum_of_a_model_is_that_of_its_positions() -> None:
    model, ids = random_model(), tokens(2, 33)
    each, summed = (model(ids[:, :-1], labels=ids[:, 1:], reduction=reduction).nll for reduction in ("none", "sum"))
    assert each.shape == (2, 32)
    torch.testing.assert_close(summed, each.sum())
