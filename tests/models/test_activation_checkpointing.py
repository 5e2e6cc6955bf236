"""What the backward pass makes again instead of keeping it changes no bit, and selective makes nothing again that is dear."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import BEST_TWO, random_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import LoraConfig
from models.decoder import Decoder
from models.lora import add_lora

CASES: dict[str, dict[str, Any]] = {"dense": {}, "moe": BEST_TWO, "dropout": {"dropout": 0.3}, "flash": {"attention": "flash"}}


def learn(model: Decoder, packed: bool = False, dtype: torch.dtype = torch.float32, reduction: str = "sum") -> list[Tensor]:
    """The loss and all gradients."""
    ids, lines = tokens(4, 73), torch.arange(72).expand(4, 72)
    layout = {"document_ids": lines // 20, "position_ids": lines % 20} if packed else {}
    model.train().zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(ids[:, :-1], labels=ids[:, 1:], reduction=reduction, **layout)
    loss = out.nll.sum() + (0 if out.aux is None else out.aux.sum())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("again", ["selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_making_again_changes_no_bit(case: str, packed: bool, dtype: torch.dtype, again: str) -> None:
    model = random_model(**CASES[case])
    expected = learn(model, packed, dtype)
    model.activation_checkpointing = again
    assert same(learn(model, packed, dtype), expected)


@pytest.mark.parametrize("again", ["selective", "full"])
def test_making_again_changes_no_bit_of_adapters(again: str) -> None:
    model = random_model()
    add_lora(model, LoraConfig(rank=4, alpha=8.0, dropout=0.1, targets=["q_proj", "o_proj", "gate_proj", "down_proj"]))
    expected = learn(model, packed=True, reduction="none")
    model.activation_checkpointing = again
    assert len(expected) == 1 + 2 * 4 * 2 and same(learn(model, packed=True, reduction="none"), expected)


@pytest.mark.slow
def test_making_again_changes_no_bit_of_compiled_layers() -> None:
    model = random_model()
    model.compile_layers(single_row=False, backend="aot_eager_decomp_partition")
    expected = learn(model, packed=True, dtype=torch.bfloat16)
    for again in ("full", "selective"):
        model.activation_checkpointing = again
        assert same(learn(model, packed=True, dtype=torch.bfloat16), expected)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.calls[str(op)] += 1
        return op(*args, **kwargs or {})


def calls(again: str) -> Counter[str]:
    model = random_model()
    model.activation_checkpointing = again
    with Counted() as counted:
        learn(model, packed=True)
    return counted.calls


def test_selective_makes_again_what_is_cheap_and_nothing_that_is_dear() -> None:
    none, selective, whole = (calls(again) for again in ("none", "selective", "full"))
    for dear in ("aten.mm.default", "lm_runner.attention.default"):
        assert none[dear] == selective[dear] < whole[dear]
    assert none["aten.silu.default"] < selective["aten.silu.default"] == whole["aten.silu.default"]


def kept_weights(again: str, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    from models.layers import attention_cpu

    asked, own = set(), attention_cpu.cpu_attention
    monkeypatch.setattr(attention_cpu, "cpu_attention", lambda *inputs: asked.add(inputs[-1]) or own(*inputs))
    model = random_model()
    model.activation_checkpointing = again
    learn(model)
    return asked


def test_selective_keeps_no_attention_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_weights("none", monkeypatch) == {True}
    assert kept_weights("selective", monkeypatch) == {False}
