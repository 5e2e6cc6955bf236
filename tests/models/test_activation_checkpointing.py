"""Activation checkpointing changes no bit of a step; selective recomputes nothing expensive."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import pairwise
from tiny_models import DENSE, TOP_TWO, lora_config, packed, random_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoder import Decoder
from models.families.transformers import TransformersConfig
from models.language_model import LanguageModel, create_model
from models.lora import add_lora

CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": TOP_TWO,
    "dropout": {"dropout": 0.3},
    "flash": {"attention": "flash"},
}
MODES = pytest.mark.parametrize("mode", ["selective", "full"])


def backward(
    model: Decoder, is_packed: bool = False, dtype: torch.dtype = torch.float32, reduction: str = "sum"
) -> list[Tensor]:
    """Return the loss and all gradients."""
    ids = tokens(4, 73)
    model.train().zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(ids[:, :-1], labels=ids[:, 1:], reduction=reduction, **packed(4, 72) if is_packed else {})
    loss = out.nll.sum() + (0 if out.aux_loss is None else out.aux_loss.sum())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(
    ("dtype", "is_packed", "case"), pairwise([torch.float32, torch.bfloat16], [False, True], [*CASES])
)
def test_activation_checkpointing_is_bitwise_equal(case: str, is_packed: bool, dtype: torch.dtype, mode: str) -> None:
    model = random_model(**CASES[case])
    expected = backward(model, is_packed, dtype)
    model.activation_checkpointing = mode
    assert all_equal(backward(model, is_packed, dtype), expected)


@MODES
def test_activation_checkpointing_of_adapters_is_bitwise_equal(mode: str) -> None:
    model = random_model()
    add_lora(model, lora_config(rank=4, alpha=8.0, dropout=0.1, targets=["q_proj", "o_proj", "gate_proj", "down_proj"]))
    expected = backward(model, is_packed=True, reduction="none")
    model.activation_checkpointing = mode
    assert len(expected) == 1 + 2 * 4 * 2 and all_equal(backward(model, is_packed=True, reduction="none"), expected)


@pytest.mark.slow
def test_activation_checkpointing_of_compiled_layers_is_bitwise_equal() -> None:
    model = random_model()
    model.compile_layers(single_row=False, backend="aot_eager_decomp_partition")
    expected = backward(model, is_packed=True, dtype=torch.bfloat16)
    for mode in ("full", "selective"):
        model.activation_checkpointing = mode
        assert all_equal(backward(model, is_packed=True, dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("family", ["decoder", "transformers"])
def test_compiled_layers_save_no_inputs_that_are_cheap_to_recompute(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise saved activations are a quarter larger."""
    from torch._functorch import config

    model: LanguageModel = random_model()
    if family == "transformers":
        model = create_model(TransformersConfig.from_hf_config(DENSE.to_hf_config(), Path("config.json")))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with config.patch(ban_recompute_materialized_backward=True):
        model.compile_layers(single_row=False)
        assert not config.ban_recompute_materialized_backward


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.calls[str(op)] += 1
        return op(*args, **kwargs or {})


def count_calls(mode: str) -> Counter[str]:
    model = random_model()
    model.activation_checkpointing = mode
    with OpCounter() as counter:
        backward(model, is_packed=True)
    return counter.calls


def test_selective_checkpointing_recomputes_no_matmul_and_no_attention() -> None:
    none, selective, full = (count_calls(mode) for mode in ("none", "selective", "full"))
    for expensive in ("aten.mm.default", "lm_runner.attention.default"):
        assert none[expensive] == selective[expensive] < full[expensive]
    assert none["aten.silu.default"] < selective["aten.silu.default"] == full["aten.silu.default"]


@pytest.mark.parametrize(("mode", "saved"), [("none", True), ("selective", False)])
def test_selective_checkpointing_saves_no_attention_probabilities(
    mode: str, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.layers import attention

    save_probs, cpu_attention = set(), attention.cpu_attention
    monkeypatch.setattr(attention, "cpu_attention", lambda *inputs: save_probs.add(inputs[4]) or cpu_attention(*inputs))
    model = random_model()
    model.activation_checkpointing = mode
    backward(model)
    assert save_probs == {saved}
