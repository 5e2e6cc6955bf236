"""The loss in chunks against the loss of complete logits: values and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import lora_config, random_model, tokens
from torch import Tensor, nn

from models.language_model import LanguageModel
from models.layers import chunked_loss
from models.layers.chunked_loss import IGNORE_LABEL, LMHead, linear_cross_entropy
from models.lora import add_lora

B, T, D, V = 3, 20, 16, 50
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "sum"])


@pytest.fixture(
    autouse=True, params=[(7, 1, V), (3, 10, 16), (1000, 1, V)], ids=["chunks", "chunks_in_blocks", "one_chunk"]
)
def tokens_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 tokens; of 10 tokens, computed in blocks of 3 tokens and of 16 rows of the weight; one of all tokens."""
    tokens_per_block, min_tokens, weight_rows = request.param
    monkeypatch.setattr(chunked_loss, "LOGITS_PER_CHUNK", {"cpu": tokens_per_block * V})
    monkeypatch.setattr(chunked_loss, "MIN_TOKENS_PER_CHUNK", {"cpu": min_tokens})
    monkeypatch.setattr(chunked_loss, "WEIGHT_ROWS_PER_BLOCK", weight_rows)


def random_inputs(labelled: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and labels for this fraction of the tokens."""
    torch.manual_seed(0)
    labels = torch.randint(V, (B, T)).where(torch.rand(B, T) < labelled, IGNORE_LABEL)
    return torch.randn(B, T, D).requires_grad_(), torch.randn(V, D).requires_grad_(), labels


def full_logits_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        F.linear(x, weight).float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE_LABEL
    ).view_as(labels)


@pytest.mark.parametrize("labelled", [1.0, 0.4, 0.0])
@REDUCTIONS
def test_chunked_loss_has_the_values_and_gradients_of_full_logits(labelled: float, reduction: str) -> None:
    x, weight, labels = random_inputs(labelled)
    expected = full_logits_loss(x, weight, labels)
    g = torch.full((B, T), 0.3) if reduction == "sum" else torch.randn(B, T)
    actual = linear_cross_entropy(x, weight, labels, reduction)
    torch.testing.assert_close(actual, expected.sum() if reduction == "sum" else expected)
    grads = torch.autograd.grad(actual * 0.3 if reduction == "sum" else (actual * g).sum(), (x, weight))
    for grad, expected_grad in zip(grads, torch.autograd.grad((expected * g).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_summed_loss_refuses_a_second_backward_pass() -> None:
    """The first one scales the gradients in place."""
    x, weight, labels = random_inputs(0.7)
    loss = linear_cross_entropy(x, weight, labels, "sum")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@REDUCTIONS
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
def test_chunked_loss_under_autocast_is_fp32_with_rounded_products(
    dtype: torch.dtype, tolerance: float, reduction: str
) -> None:
    x, weight, labels = random_inputs(0.7)
    with torch.autocast("cpu", dtype):
        actual = linear_cross_entropy(x, weight, labels, reduction)
    assert actual.dtype == torch.float32
    # 1024: a loss scale
    grads, exact_grads = (
        torch.autograd.grad(1024 * loss.sum(), (x, weight)) for loss in (actual, full_logits_loss(x, weight, labels))
    )
    for grad, exact in zip(grads, exact_grads, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - exact).abs().max() < tolerance * exact.abs().max()


@REDUCTIONS
def test_chunked_loss_computes_no_gradient_of_frozen_inputs(reduction: str) -> None:
    x, weight, labels = random_inputs(0.7)
    linear_cross_entropy(x, weight.detach(), labels, reduction).sum().backward()
    assert x.grad is not None and not linear_cross_entropy(x.detach(), weight.detach(), labels, reduction).requires_grad
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels, reduction).requires_grad


@REDUCTIONS
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_chunked_loss_of_an_adapted_head_matches_its_logits(reduction: str, dora: bool) -> None:
    model = LanguageModel()
    model.lm_head = head = LMHead(D, V, bias=False)
    add_lora(model, lora_config(rank=4, alpha=8.0, dropout=0.0, targets=["lm_head"], dora=dora))
    adapter = head.lora["default"]
    nn.init.normal_(adapter.B)
    x, _, labels = random_inputs(0.7)
    expected = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="sum")
    actual = head(x, labels, reduction).sum()
    torch.testing.assert_close(actual, expected)
    inputs = [x, *adapter.parameters()]
    for grad, expected_grad in zip(
        torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad)


def test_chunked_loss_sum_of_a_model_is_the_sum_of_its_tokens() -> None:
    model, ids = random_model(), tokens(2, 33)
    per_token, total = (model(ids[:, :-1], labels=ids[:, 1:], reduction=reduction).nll for reduction in ("none", "sum"))
    assert per_token.shape == (2, 32)
    torch.testing.assert_close(total, per_token.sum())


@REDUCTIONS
def test_logits_of_one_chunk_are_in_memory_at_a_time(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = random_inputs(1.0)
    seen: list[weakref.ref] = []
    alive: list[int] = []  # chunks of logits, at the start of each chunk
    blocks, pad_tokens = chunked_loss._blocks, chunked_loss.pad_tokens

    def watched_blocks(logits: Tensor) -> Iterator[slice]:
        seen.append(weakref.ref(logits))
        return blocks(logits)

    def counting_pad(rows: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        return pad_tokens(rows)

    logits = min(12 * V, chunked_loss.LOGITS_PER_CHUNK["cpu"])
    monkeypatch.setattr(chunked_loss, "LOGITS_PER_CHUNK", {"cpu": logits})
    monkeypatch.setattr(chunked_loss, "MIN_TOKENS_PER_CHUNK", {"cpu": 12})
    monkeypatch.setattr(chunked_loss, "_blocks", watched_blocks)
    monkeypatch.setattr(chunked_loss, "pad_tokens", counting_pad)
    linear_cross_entropy(x, weight, labels, reduction).sum().backward()
    assert len(alive) >= 5 and set(alive) == {0}


def test_evaluation_computes_the_loss_without_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width of its rows would need a program, and after eight torch compiles none, also not for training."""
    choose, used = chunked_loss.block_functions, []

    def spy(x: Tensor, is_training: bool) -> Any:
        used.append(is_training)
        return choose(x, is_training)

    monkeypatch.setattr(chunked_loss, "block_functions", spy)
    x, weight, labels = torch.randn(1, 1, 8), torch.randn(11, 8), torch.ones(1, 1, dtype=torch.long)
    linear_cross_entropy(x, weight, labels, "sum")
    linear_cross_entropy(x, weight.requires_grad_(), labels, "sum")
    assert used == [False, True]
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(chunked_loss, "_COMPILED_BLOCKS", ["compiled"])
    assert choose(on_gpu, True) == ["compiled"] and choose(on_gpu, False) == choose(x, True) != ["compiled"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_a_gpu_have_the_loss_and_gradients_of_autograd(dtype: torch.dtype) -> None:
    """What a compiler fuses on a GPU, here uncompiled: the gradients of the sum, and of weighted tokens."""
    torch.manual_seed(0)
    logits, y, g = (3 * torch.randn(37, 101)).to(dtype), torch.randint(0, 101, (37,)), torch.randn(37)
    y[::5] = IGNORE_LABEL
    reference = logits.float().requires_grad_()
    nll = F.cross_entropy(reference, y, ignore_index=IGNORE_LABEL, reduction="none")
    (of_sum,) = torch.autograd.grad(nll.sum(), reference, retain_graph=True)
    (weighted,) = torch.autograd.grad((nll * g).sum(), reference)
    of_the_sum, of_weights = logits.clone(), logits.clone()
    torch.testing.assert_close(chunked_loss.fused_nll(of_the_sum, y, True), nll.detach(), rtol=0, atol=1e-5)
    chunked_loss.fused_gradient(of_weights, y, logits.float().logsumexp(-1, keepdim=True), g.unsqueeze(-1))
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(of_the_sum.float(), of_sum, rtol=bound, atol=1e-6)
    torch.testing.assert_close(of_weights.float(), weighted, rtol=bound, atol=1e-6)


def test_penalties_of_weights_in_16_bits_are_computed_in_fp32() -> None:
    """As fsdp gathers them."""
    torch.manual_seed(0)
    head = LMHead(16, 40, bias=False).bfloat16().train()
    head.penalties = (0.1, 0.01)
    x, labels = torch.randn(2, 5, 16).bfloat16(), torch.randint(0, 40, (2, 5))
    logits = (x @ head.weight.t()).float().flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    expected = expected + 0.01 * logits.logsumexp(-1).square().sum()
    loss = head(x, labels, "sum")
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0.0)
    loss.backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.bfloat16
