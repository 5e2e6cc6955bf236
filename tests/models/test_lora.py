"""LoRA adapters: without effect when new, equal merged and unmerged, switched and loaded by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, max_difference, random_model, tokens
from torch import Tensor

from common.errors import UserError
from models.config import LoraConfig
from models.decoder import Decoder
from models.lora import LoraLinear, adapter_state_dict, add_lora, disable_adapters, load_adapter, merge_adapters, unmerge_adapters, use_adapter

IDS = tokens(2, 16)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "k_proj", "down_proj"]} | changes)


def adapted(**changes: Any) -> Decoder:
    """Return a model whose adapters change its output."""
    model = random_model(**changes)
    add_lora(model, lora())
    randomize_adapters(model, 0.1)
    return model


def randomize_adapters(model: Decoder, std: float, name: str = "default") -> None:
    for path, p in adapter_state_dict(model).items():
        if f".{name}." in path:
            torch.nn.init.normal_(p, std=std)


def weights(model: Decoder) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in model.state_dict().items() if ".lora." not in name}


def test_lora_new_adapter_does_not_change_the_logits() -> None:
    model = random_model()
    before = model(IDS).logits
    add_lora(model, lora())
    assert torch.equal(model(IDS).logits, before)


def test_lora_keeps_base_names_and_trains_the_adapter_only() -> None:
    model = random_model()
    names = set(model.state_dict())
    add_lora(model, lora())
    assert set(weights(model)) == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(adapter_state_dict(model))
    model(IDS, labels=IDS).nll.sum().backward()
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())


def test_lora_adapts_layers_that_are_not_square() -> None:
    model = adapted()
    shapes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, LoraLinear)}
    assert shapes == {(48, 64), (48, 32), (80, 48)}
    assert sum(p.numel() for p in adapter_state_dict(model).values()) == 2 * 4 * (48 + 64 + 48 + 32 + 80 + 48)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "moe"])
def test_lora_merged_weights_give_the_logits_of_the_adapter(changes: dict[str, Any]) -> None:
    model = adapted(std=0.05, **changes)
    before, logits = weights(model), model(IDS).logits
    merge_adapters(model)
    assert max_difference(model(IDS).logits, logits) < 1e-6
    merge_adapters(model)  # no adapter is active: no change
    assert max_difference(model(IDS).logits, logits) < 1e-6
    unmerge_adapters(model)
    assert max_difference(model(IDS).logits, logits) < 1e-6
    assert max(max_difference(p, before[name]) for name, p in weights(model).items()) < 1e-6


def test_lora_disabled_adapters_give_the_base_logits() -> None:
    model = adapted(dropout=0.3)
    logits = model(IDS).logits
    model.train()
    with disable_adapters(model):
        assert torch.equal(model(IDS).logits, random_model()(IDS).logits)
    assert model.training
    assert torch.equal(model.eval()(IDS).logits, logits)


def test_lora_adapters_are_enabled_again_after_an_exception() -> None:
    model = adapted()
    logits = model(IDS).logits
    with pytest.raises(RuntimeError), disable_adapters(model):
        raise RuntimeError
    assert torch.equal(model(IDS).logits, logits)


def test_lora_use_adapter_switches_between_adapters() -> None:
    model = adapted()
    first = model(IDS).logits
    add_lora(model, lora(targets=["o_proj", "k_proj"]), "second")
    randomize_adapters(model, 0.1, "second")
    second = model(IDS).logits
    assert max_difference(first, second) > 1e-3
    use_adapter(model, "default")
    assert torch.equal(model(IDS).logits, first)
    use_adapter(model, "second")
    assert torch.equal(model(IDS).logits, second)
    with pytest.raises(UserError, match="no layer has an adapter named third") as error:
        use_adapter(model, "third")
    assert error.value.fix == "adapters: default, second"


def test_lora_dropout_applies_in_training_only() -> None:
    model = random_model()
    add_lora(model, lora(dropout=0.5))
    randomize_adapters(model, 0.1)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("targets", [["c_attn"], ["q_proj", "c_attn"], [], ["lm_head"]], ids=["none", "one_of_two", "empty", "tied_head"])
def test_lora_refuses_an_unknown_target_and_lists_the_layers(targets: list[str]) -> None:
    model = random_model()
    with pytest.raises(UserError, match="adapters can be added to down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        add_lora(model, lora(targets=targets))
    assert all(p.requires_grad for p in model.parameters())


def test_lora_load_adapter_refuses_other_names_and_shapes() -> None:
    model, state = adapted(), {name: p.clone() for name, p in adapter_state_dict(adapted()).items()}
    randomize_adapters(model, 0.5)
    load_adapter(model, state)
    assert torch.equal(model(IDS).logits, adapted()(IDS).logits)
    name = next(iter(state))
    for wrong in ({key: p for key, p in state.items() if key != name}, state | {name: state[name][:1]}, state | {"more": state[name]}):
        with pytest.raises(KeyError, match="differ in 1 tensors"):
            load_adapter(model, wrong)
