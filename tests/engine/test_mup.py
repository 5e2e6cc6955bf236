"""Factors of muP by formula, nothing changed at the base width, and activations that keep their size over widths."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from common.settings import resume_rules
from models.decoder import Decoder
from models.language_model import create_model
from runner.config.compose import compose_config
from runner.engine.build import build_model
from runner.engine.config import Config
from runner.engine.optim.config import OptimizerConfig, check_mup
from runner.engine.optim.groups import OptimizerGroup, build_optimizer
from runner.engine.optim.mup import mup_warnings, scale_initial_weights

MOE = ["model.num_experts=2", "model.moe_intermediate_size=32", "model.norm_topk_prob=true"]


def config(width: int, *overrides: str, base: int = 64, heads: int = 32) -> Config:
    sizes = [f"model.hidden_size={width}", f"model.num_attention_heads={width // heads}", "model.num_key_value_heads=1"]
    sizes += [f"model.intermediate_size={2 * width}", "model.num_hidden_layers=2", "model.vocab_size=64"]
    return compose_config([*sizes, f"optimizer.mup_base_width={base}", "init_from=scratch", *overrides])


def build(cfg: Config) -> tuple[Decoder, OptimizerGroup]:
    torch.manual_seed(0)
    model = create_model(cfg.model)
    assert isinstance(model, Decoder)
    if cfg.optimizer.mup_base_width:
        scale_initial_weights(cfg.optimizer, model)
    return model, build_optimizer(cfg.optimizer, model, 2)


def groups(optimizers: OptimizerGroup) -> dict[str, tuple[float, float]]:
    """Return (factor of the lr, weight decay) by parameter name."""
    found = [group for part in optimizers.parts for group in part.param_groups]
    return {optimizers.names[p]: (each["lr_scale"], each["weight_decay"]) for each in found for p in each["params"]}


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw", 1 / 4), ("muon", 1 / 2)])
def test_mup_scales_the_lr_and_keeps_lr_times_decay(optimizer: str, factor: float) -> None:
    cfg = config(256, f"optimizer={optimizer}", "optimizer.weight_decay=0.1", *MOE)
    found = groups(build(cfg)[1])
    assert found["model.layers.0.self_attn.q_proj.weight"] == pytest.approx((factor, 0.1 / factor))
    assert found["model.layers.1.mlp.experts.0.down_proj.weight"] == pytest.approx((factor, 0.1 / factor))
    assert found["model.layers.0.mlp.gate.weight"] == pytest.approx((1 / 4, 0.4))
    assert found["model.norm.weight"] == (1 / 4, 0)  # the output multiplier of a tied embedding
    assert found["model.embed_tokens.weight"] == found["model.layers.0.input_layernorm.weight"] == (1, 0)


def test_mup_of_an_untied_output_layer_scales_the_head() -> None:
    model, optimizers = build(config(256, "model.tie_word_embeddings=false"))
    found = groups(optimizers)
    assert found["lm_head.weight"] == (1 / 4, 0) and found["model.norm.weight"] == (1, 0)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())


def test_mup_scales_the_initial_weights() -> None:
    plain, scaled = (dict(build(config(256, base=base))[0].named_parameters()) for base in (0, 64))
    expected = {"model.layers.0.mlp.up_proj.weight": 1 / 2, "model.norm.weight": 1 / 4, "model.embed_tokens.weight": 1}
    for name, factor in expected.items():
        assert torch.equal(scaled[name], plain[name] * factor)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_mup_at_its_base_width_changes_no_bit(optimizer: str) -> None:
    trained = []
    for base in (0, 64):
        cfg = config(64, f"optimizer={optimizer}", base=base)
        torch.manual_seed(cfg.seed)
        model = build_model(cfg, load_initial_weights=True)
        optimizers = build_optimizer(cfg.optimizer, model, 2)
        change(model, optimizers, 1e-2)
        trained.append((groups(optimizers), model.state_dict()))
    assert trained[0][0] == trained[1][0]
    assert all(torch.equal(value, trained[1][1][name]) for name, value in trained[0][1].items())


def change(model: Any, optimizers: OptimizerGroup, lr: float) -> dict[str, Tensor]:
    """Return how two steps change the residual stream after the last layer, and the logits."""
    tokens = (torch.arange(33) * 5 % 64 + torch.arange(4)[:, None] * 7) % 64
    inputs, labels, found = tokens[:, :-1], tokens[:, 1:].contiguous(), []
    model.layers[-1].register_forward_hook(lambda _, __, output: found.append(output[0].detach()))
    logits = [model(inputs).logits.detach()]
    optimizers.set_lr(lr)
    for part in optimizers.parts:
        part.dtype = torch.float32  # of Muon: bf16 takes two minutes without AVX-512
    for _ in range(2):
        (model(inputs, labels, reduction="sum").nll / labels.numel()).backward()
        optimizers.step(torch.zeros(()))
        optimizers.zero_grad()
    logits.append(model(inputs).logits.detach())
    return {"residual": found[-1] - found[0], "logits": logits[1] - logits[0]}


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 4e-3), pytest.param("muon", 2e-2, marks=pytest.mark.slow)])
def test_mup_changes_of_activations_do_not_grow_with_the_width(optimizer: str, lr: float) -> None:
    slopes = {}
    for base in (0, 64):
        small, large = (
            {
                name: values.square().mean().sqrt().item()
                for name, values in change(*build(config(width, f"optimizer={optimizer}", base=base)), lr).items()
            }
            for width in (64, 512)
        )
        slopes[base] = {name: math.log(large[name] / small[name]) / math.log(8) for name in small}
    assert abs(slopes[64]["logits"]) < 0.25 < slopes[0]["logits"]  # two widths and one seed: a wider limit than 0.1
    assert abs(slopes[64]["residual"]) < 0.25


def test_mup_refuses_models_whose_factors_are_not_known() -> None:
    cfg = config(64)
    other = OptimizerConfig("lion", lr=1e-3, weight_decay=0, grad_clip=1, layer_decay=1, mup_base_width=64)
    family: Any = SimpleNamespace(family="transformers")
    for arguments, message in (
        ((cfg.optimizer, cfg.model, True), "training without adapters"),
        ((cfg.optimizer, family, False), "of model.family=decoder, got transformers"),
        ((other, cfg.model, False), "of adamw and muon, got lion"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            check_mup(*arguments)
        assert raised.value.fix == "optimizer.mup_base_width=0"
    with pytest.raises(UserError, match="training without adapters"):
        compose_config(["stage=lora", "optimizer.mup_base_width=64"])


def test_mup_base_width_cannot_change_at_a_resume() -> None:
    assert resume_rules(config(64))["optimizer.mup_base_width"] == "incompatible"


def test_mup_of_given_weights_warns_that_they_stay() -> None:
    optimizer = config(64).optimizer
    assert mup_warnings(optimizer, "scratch") == []
    assert mup_warnings(optimizer, "runs/one")[0].endswith("the weights of runs/one stay as they are")
