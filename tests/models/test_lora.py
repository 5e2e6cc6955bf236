"""Adapters: nothing at first, the same merged or not, and never mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, apart, random_model, tokens
from torch import Tensor

from models.config import LoraConfig
from models.decoder import Decoder
from models.lora import LoraLinear, adapter_state_dict, add_lora, disable_adapters, load_adapter, merge_adapters, unmerge_adapters, use_adapter

IDS = tokens(2, 16)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "k_proj", "down_proj"]} | changes)


def adapted(**changes: Any) -> Decoder:
    """A model whose adapters say something."""
    model = random_model(**changes)
    add_lora(model, lora())
    shake(model, 0.1)
    return model


def shake(model: Decoder, std: float, name: str = "default") -> None:
    for path, p in adapter_state_dict(model).items():
        if f".{name}." in path:
            torch.nn.init.normal_(p, std=std)


def weights(model: Decoder) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in model.state_dict().items() if ".lora." not in name}


def test_a_new_adapter_says_nothing() -> None:
    model = random_model()
    before = model(IDS).logits
    add_lora(model, lora())
    assert torch.equal(model(IDS).logits, before)


def test_the_base_keeps_its_names_and_only_the_adapter_learns() -> None:
    model = random_model()
    names = set(model.state_dict())
    add_lora(model, lora())
    assert set(weights(model)) == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(adapter_state_dict(model))
    model(IDS, labels=IDS).nll.sum().backward()
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())


def test_linears_that_are_not_square_are_adapted_too() -> None:
    model = adapted()
    shapes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, LoraLinear)}
    assert shapes == {(48, 64), (48, 32), (80, 48)}
    assert sum(p.numel() for p in adapter_state_dict(model).values()) == 2 * 4 * (48 + 64 + 48 + 32 + 80 + 48)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "moe"])
def test_merged_weights_say_what_the_adapter_said(changes: dict[str, Any]) -> None:
    model = adapted(std=0.05, **changes)
    before, said = weights(model), model(IDS).logits
    merge_adapters(model)
    assert apart(model(IDS).logits, said) < 1e-6
    merge_adapters(model)  # nothing is left to merge
    assert apart(model(IDS).logits, said) < 1e-6
    unmerge_adapters(model)
    assert apart(model(IDS).logits, said) < 1e-6
    assert max(apart(p, before[name]) for name, p in weights(model).items()) < 1e-6


def test_switching_adapters_off_is_the_base_and_comes_back() -> None:
    model = adapted(dropout=0.3)
    said = model(IDS).logits
    model.train()
    with disable_adapters(model):
        assert torch.equal(model(IDS).logits, random_model()(IDS).logits)
    assert model.training
    assert torch.equal(model.eval()(IDS).logits, said)


def test_adapters_come_back_after_a_failure() -> None:
    model = adapted()
    said = model(IDS).logits
    with pytest.raises(RuntimeError), disable_adapters(model):
        raise RuntimeError
    assert torch.equal(model(IDS).logits, said)


def test_two_adapters_are_switched_without_mixing() -> None:
    model = adapted()
    first = model(IDS).logits
    add_lora(model, lora(targets=["o_proj", "k_proj"]), "second")
    shake(model, 0.1, "second")
    second = model(IDS).logits
    assert apart(first, second) > 1e-3
    use_adapter(model, "default")
    assert torch.equal(model(IDS).logits, first)
    use_adapter(model, "second")
    assert torch.equal(model(IDS).logits, second)
    with pytest.raises(ValueError, match="no layer has an adapter of that name") as refusal:
        use_adapter(model, "third")
    assert "default, second" in refusal.value.args[2]


def test_adapter_dropout_is_for_training_alone() -> None:
    model = random_model()
    add_lora(model, lora(dropout=0.5))
    shake(model, 0.1)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("targets", [["c_attn"], ["q_proj", "c_attn"], [], ["lm_head"]], ids=["none", "one_of_two", "empty", "tied_head"])
def test_a_target_that_is_no_layer_is_refused_with_those_that_are(targets: list[str]) -> None:
    model = random_model()
    with pytest.raises(ValueError, match="adapted") as refusal:
        add_lora(model, lora(targets=targets))
    assert refusal.value.args[2] == "choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert all(p.requires_grad for p in model.parameters())


def test_a_saved_adapter_fits_its_like_alone() -> None:
    model, state = adapted(), {name: p.clone() for name, p in adapter_state_dict(adapted()).items()}
    shake(model, 0.5)
    load_adapter(model, state)
    assert torch.equal(model(IDS).logits, adapted()(IDS).logits)
    odd = next(iter(state))
    for wrong in ({name: p for name, p in state.items() if name != odd}, state | {odd: state[odd][:1]}, state | {"more": state[odd]}):
        with pytest.raises(KeyError, match="differ in 1 tensors"):
            load_adapter(model, wrong)
