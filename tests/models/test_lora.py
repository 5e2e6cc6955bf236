"""LoRA adapters: without effect when new, equal merged and unmerged, switched and loaded by name."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, lora_config, max_difference, random_model, tokens
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from common import limits
from common.errors import UserError
from models.config import LoraConfig
from models.decoder import Decoder
from models.formats.load import add_stored_adapter
from models.formats.peft import StoredAdapter
from models.language_model import LanguageModel
from models.layers.adapter import ADAPTER, LoraLayer
from models.lora import (
    adapter_state_dict,
    add_lora,
    disable_adapters,
    linear_layers_of,
    lora_layers,
    lora_warnings,
    merge_adapters,
    select_layers,
)

IDS = tokens(2, 16)


def lora(**changes: Any) -> LoraConfig:
    return lora_config(
        **{"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "k_proj", "down_proj"]} | changes
    )


def adapted(**changes: Any) -> Decoder:
    """Return a model whose adapters change its output."""
    model = random_model(**changes)
    add_lora(model, lora())
    randomize_adapters(model, 0.1)
    return model


def randomize_adapters(model: Decoder, std: float) -> None:
    for p in adapter_state_dict(model).values():
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
    shapes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, LoraLayer)}
    assert shapes == {(48, 64), (48, 32), (80, 48)}
    assert sum(p.numel() for p in adapter_state_dict(model).values()) == 2 * 4 * (48 + 64 + 48 + 32 + 80 + 48)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "moe"])
def test_lora_merged_weights_give_the_logits_of_the_adapter(changes: dict[str, Any]) -> None:
    model = adapted(std=0.05, **changes)
    before, logits = weights(model), model(IDS).logits
    merge_adapters(model)
    assert max_difference(model(IDS).logits, logits) < 1e-6
    assert max(max_difference(p, before[name]) for name, p in weights(model).items()) > 1e-3
    merge_adapters(model)  # there is no adapter any more: no change
    assert max_difference(model(IDS).logits, logits) < 1e-6


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


def test_lora_dropout_applies_in_training_only() -> None:
    model = random_model()
    add_lora(model, lora(dropout=0.5))
    randomize_adapters(model, 0.1)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "targets", [["c_attn"], ["q_proj", "c_attn"], [], ["lm_head"]], ids=["none", "one_of_two", "empty", "tied_head"]
)
def test_lora_refuses_an_unknown_target_and_lists_the_layers(targets: list[str]) -> None:
    model = random_model()
    with pytest.raises(
        UserError, match="adapters can be added to down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    ):
        add_lora(model, lora(targets=targets))
    assert all(p.requires_grad for p in model.parameters())


def test_lora_targets_name_layers_as_in_peft() -> None:
    model = random_model(tie_word_embeddings=False)
    layers = linear_layers_of(model)

    def adapted_paths(*targets: str) -> set[str]:
        return {path.removeprefix("model.layers.") for path in select_layers(layers, list(targets))}

    q, up = "self_attn.q_proj", "mlp.up_proj"
    assert adapted_paths("q_proj") == {f"0.{q}", f"1.{q}"}
    assert adapted_paths(f"1.{q}", "model.layers.0.mlp.up_proj") == {f"1.{q}", f"0.{up}"}
    assert adapted_paths(r"re:.*\.0\..*(q|up)_proj", "lm_head") == {f"0.{q}", f"0.{up}", "lm_head"}
    assert len(adapted_paths("all-linear")) == 14 and "lm_head" not in adapted_paths("all-linear")
    for wrong in ("proj", "re:q_proj", "re:(", "layers.7.self_attn.q_proj"):
        with pytest.raises(UserError):
            adapted_paths(wrong)
    with pytest.raises(UserError, match="all-linear stands alone"):
        adapted_paths("all-linear", "lm_head")


@pytest.mark.slow
@torch.no_grad()
def test_lora_adapts_the_linear_class_of_falcon() -> None:
    model = LanguageModel()
    model.dense = layer = FalconLinear(6, 4)
    add_lora(model, lora(targets=["all-linear"], dora=True))
    x = torch.randn(3, 6)
    before = layer(x)
    assert isinstance(layer, LoraLayer) and layer.adapter is not None
    layer.adapter.B.normal_()
    expected = layer(x)
    merge_adapters(model)
    assert max_difference(layer(x), expected) < 1e-5 < max_difference(before, expected)


def test_lora_pattern_that_takes_forever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run, or an adapter that is continued, of others has such a pattern."""
    monkeypatch.setattr(limits, "OWN_LIMIT", 300)  # processor time comes late on a busy machine
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(UserError, match="takes more than 3 seconds"):
        add_lora(random_model(), lora(targets=[r"re:((\w|\.)+)+!"]))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < before + 10
    with pytest.raises(UserError, match="at most 1,000 are allowed"):
        add_lora(random_model(), lora(targets=["re:" + "a" * 1001]))


def test_lora_refuses_weights_of_stacked_experts_by_name() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 8))

    model = LanguageModel()
    model.experts = Experts()
    with pytest.raises(UserError, match="has gate_up_proj, but experts.gate_up_proj has three dimensions"):
        add_lora(model, lora(targets=["gate_up_proj"]))
    assert lora_warnings(model, lora(targets=["gate"])) == []
    assert "leaves out gate_up_proj" in lora_warnings(model, lora(targets=["all-linear"]))[0]


def test_lora_dora_and_rslora_change_the_update() -> None:
    logits = {}
    for kind, changes in {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}.items():
        model = random_model(dropout=0.0)
        add_lora(model, lora(**changes))
        torch.manual_seed(0)
        for path, p in adapter_state_dict(model).items():
            if not path.endswith("magnitude"):
                torch.nn.init.normal_(p, std=0.1)
        logits[kind] = model(IDS).logits
        merge_adapters(model)
        assert max_difference(model(IDS).logits, logits[kind]) < 1e-5
    assert (
        max_difference(logits["lora"], logits["rslora"]) > 1e-3
        and max_difference(logits["lora"], logits["dora"]) > 1e-3
    )


def test_lora_stored_adapter_of_other_names_and_shapes_is_refused() -> None:
    saved, folder = adapted(), Path("adapter")
    matrices = {
        (path, matrix): p.detach()
        for path, layer in lora_layers(saved).items()
        for matrix, p in layer.lora[ADAPTER].named_parameters()
    }
    stored = StoredAdapter(lora(), dict.fromkeys(lora_layers(saved), lora()), matrices, {})
    model = random_model()
    add_stored_adapter(model, stored, folder)
    assert torch.equal(model(IDS).logits, saved(IDS).logits)
    name = next(iter(matrices))
    for wrong in (matrices | {name: matrices[name][:, :1]}, matrices | {("more", "A"): matrices[name]}):
        with pytest.raises(UserError, match="does not fit its base model"):
            add_stored_adapter(random_model(), stored._replace(matrices=wrong), folder)
