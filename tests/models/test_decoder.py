"""The decoder against transformers and against its docstrings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import EXPERTS, LLAMA, TOP_TWO, YARN, V, config, max_difference, random_model, tokens
from torch import Tensor

from models.decoder import Decoder
from models.families.decoder import DecoderConfig
from models.generate import generate
from models.language_model import create_model
from models.layers.attention_block import RMSNorm
from models.layers.chunked_loss import IGNORE_LABEL
from models.layers.mlp import MoE
from runner.config.compose import compose_config

MODELS = Path(__file__).parents[2] / "conf" / "model"
PARAMETERS = {
    "tiny": 1_607_040,
    "minimind_26m": 25_830_912,
    "minimind_64m": 63_912_192,
    "minimind_104m": 104_034_048,
    "minimind_moe": 198_416_640,
}
UNUSUAL = {"rms_norm_eps": 0.1, "rope_scaling": dataclasses.replace(YARN["rope_scaling"], attention_factor=1.5)}


def transformers_model(cfg: DecoderConfig, weights: dict[str, Tensor]) -> torch.nn.Module:
    """Return the transformers model with the same weights; its experts are one tensor per layer."""
    import transformers

    settings = cfg.to_hf_config()
    name = settings["architectures"][0]
    reference = getattr(transformers, name)(getattr(transformers, name.replace("ForCausalLM", "Config"))(**settings))
    fused = dict(weights)
    for layer in range(cfg.num_hidden_layers if cfg.num_experts else 0):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [fused.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(cfg.num_experts)]
            for kind in ("gate", "up", "down")
        )
        fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        fused[f"{prefix}.down_proj"] = torch.stack(down)
    reference.load_state_dict(fused)
    return reference.eval()


@pytest.mark.parametrize("name", [path.stem for path in sorted(MODELS.glob("*.yaml")) if path.stem != "transformers"])
def test_model_option_has_the_parameter_count_of_its_name(name: str) -> None:
    with torch.device("meta"):
        model = create_model(compose_config([f"model={name}"]).model)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    "changes",
    [{}, LLAMA, EXPERTS, TOP_TWO, YARN, YARN | LLAMA, UNUSUAL],
    ids=["qwen3", "llama", "moe", "moe_top_two", "yarn", "yarn_llama", "unusual"],
)
def test_decoder_logits_match_transformers(changes: dict[str, Any]) -> None:
    model, ids = random_model(**changes), tokens(2, 200)
    # Both sum in their own order, and differ from fp64 by up to 2.5e-5.
    assert max_difference(model(ids).logits, transformers_model(model.cfg, model.state_dict())(ids).logits) < 3e-5


def test_yarn_changes_the_logits() -> None:
    ids = tokens(1, 200)
    assert max_difference(random_model()(ids).logits, random_model(**YARN)(ids).logits) > 1e-2


def test_untrained_model_has_the_loss_of_a_uniform_distribution() -> None:
    torch.manual_seed(0)
    ids = tokens(4, 65)
    nll = Decoder(config())(ids[:, :-1], labels=ids[:, 1:]).nll
    assert abs(nll.mean().item() - math.log(V)) < 0.05


def test_decoder_loss_is_nll_of_the_label_and_zero_without_one() -> None:
    model, ids = random_model(), tokens(2, 33)
    labels = ids[:, 1:].clone()
    labels[0, 5:] = IGNORE_LABEL
    nll = model(ids[:, :-1], labels=labels).nll
    expected = -model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert torch.equal(nll[0, 5:], torch.zeros(27))
    torch.testing.assert_close(nll[labels != IGNORE_LABEL], expected[labels != IGNORE_LABEL])


def test_decoder_attention_is_causal() -> None:
    model, ids = random_model(), tokens(1, 32)
    changed = torch.cat([ids[:, :20], tokens(1, 12, seed=2)], dim=1)
    assert torch.equal(model(ids).logits[:, :20], model(changed).logits[:, :20])


@pytest.mark.parametrize("changes", [{}, TOP_TWO], ids=["dense", "moe"])
def test_padding_does_not_affect_tokens_and_balance_loss(changes: dict[str, Any]) -> None:
    model, ids = random_model(**changes), tokens(2, 24)
    unpadded, padded = (
        model(ids[:1, :10]),
        model(torch.cat([ids[:, :10], torch.zeros(2, 14, dtype=torch.int64)], dim=1), lengths=torch.tensor([10, 10])),
    )
    assert max_difference(unpadded.logits, padded.logits[:1, :10]) < 1e-5
    if unpadded.aux_loss is not None:
        torch.testing.assert_close(unpadded.aux_loss, padded.aux_loss[:1])


@pytest.mark.slow
def test_dense_decoder_compiles_without_graph_break() -> None:
    model, ids = random_model(), tokens(2, 17)
    model.train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids[:, :-1], labels=ids[:, 1:]).nll, model(ids[:, :-1], labels=ids[:, 1:]).nll)


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_attention_kernels_give_the_same_logits(kernel: str) -> None:
    ids = tokens(2, 40)
    assert max_difference(random_model()(ids).logits, random_model(attention=kernel)(ids).logits) < 1e-5


def kernels_of(run: Callable[[], object]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {
        event.name.split("_scaled_dot_product_")[1]
        for event in profile.events()
        if "_scaled_dot_product_" in event.name
    }


def test_attention_kernel_setting_selects_the_kernel() -> None:
    ids = tokens(2, 40)
    assert kernels_of(lambda: random_model(attention="math")(ids)) == {"attention_math"}
    assert kernels_of(lambda: random_model(attention="flash")(ids)) == {"flash_attention_for_cpu"}


def test_attention_kernel_setting_does_not_apply_to_generation() -> None:
    """Prompts have a mask, which flash attention on CUDA does not take."""
    settings: dict[str, Any] = {
        "max_new_tokens": 2,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "stop_ids": [],
    }
    chosen, free = (
        kernels_of(lambda kernel=kernel: generate(random_model(attention=kernel), [[1, 2, 3], [4]], **settings))
        for kernel in ("math", "auto")
    )
    assert chosen == free != {"attention_math"}


@pytest.mark.parametrize("changes", [{}, TOP_TWO], ids=["dense", "moe"])
def test_decoder_gradient_is_bitwise_reproducible(changes: dict[str, Any]) -> None:
    model, ids = random_model(**changes), tokens(4, 33)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        output = model(ids[:, :-1], labels=ids[:, 1:])
        (output.nll.sum() + (0 if output.aux_loss is None else output.aux_loss.sum())).backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_rope_angles_are_fp32_under_bf16_autocast() -> None:
    """bf16 rounds 257 and 258 to the same number."""
    with torch.autocast("cpu", torch.bfloat16):
        cos = random_model()._rotation(259, None)[0][..., 0, :]
    assert cos.dtype == torch.float32
    assert not torch.equal(cos[..., 257, :], cos[..., 258, :])


def test_dropout_applies_in_training_only() -> None:
    model, ids = random_model(dropout=0.5), tokens(1, 16)
    assert torch.equal(model(ids).logits, random_model()(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("changes", [EXPERTS, TOP_TWO], ids=["top_one", "top_two"])
def test_router_gets_a_gradient_from_the_language_model_loss(changes: dict[str, Any]) -> None:
    model, ids = random_model(std=0.02, **changes), tokens(4, 33)
    model(ids[:, :-1], labels=ids[:, 1:]).nll.sum().backward()
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().max() > 1e-4


def test_router_with_one_renormalized_expert_is_warned_about() -> None:
    assert (
        "only the load-balancing loss trains the router"
        in config(**EXPERTS | {"norm_topk_prob": True}).training_warnings()[0]
    )
    assert config(**EXPERTS).training_warnings() == config(**TOP_TWO).training_warnings() == []


def test_balance_loss_of_a_row_does_not_depend_on_other_rows() -> None:
    model, ids = random_model(**TOP_TWO), tokens(3, 20)
    lengths = torch.tensor([20, 12, 5])
    together = model(ids, lengths=lengths).aux_loss
    separate = torch.cat([model(ids[row : row + 1], lengths=lengths[row : row + 1]).aux_loss for row in range(3)])
    torch.testing.assert_close(together, separate)


def test_balance_loss_is_minimal_for_uniform_routing() -> None:
    model = random_model(**EXPERTS)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)  # uniform routing: E * sum_e f_e / E = 1
    torch.testing.assert_close(model(tokens(2, 16)).aux_loss, torch.full((2,), 1e-2))
    unbalanced = random_model(std=1.0, **EXPERTS)
    assert (unbalanced(tokens(2, 16)).aux_loss > 1e-2).all()


def test_moe_output_is_the_weighted_sum_of_chosen_experts() -> None:
    layer = random_model(**TOP_TWO).model.layers[0].mlp
    x = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(0))
    y, _ = layer(x, None)
    probs = F.linear(x[0], layer.gate.weight).softmax(-1)
    for t in range(5):
        weights, chosen = probs[t].topk(2)
        expected = sum(w * layer.experts[int(e)](x[0, t]) for w, e in zip(weights / weights.sum(), chosen, strict=True))
        torch.testing.assert_close(y[0, t], expected)


def test_expert_without_tokens_has_a_zero_gradient() -> None:
    model = random_model(**EXPERTS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # equal probabilities: topk takes the first expert for every token
    model(tokens(2, 8), labels=tokens(2, 8)).nll.sum().backward()
    experts = [expert for layer in model.model.layers for expert in layer.mlp.experts]
    assert all(p.grad is not None for expert in experts for p in expert.parameters())
    assert sum(not expert.up_proj.weight.grad.any() for expert in experts) == 6  # three of four in each of two layers


def test_norm_and_routing_are_computed_in_fp32_for_bf16_inputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 64, 48, dtype=torch.bfloat16)
    norm = RMSNorm(48)
    torch.nn.init.uniform_(norm.weight)
    assert norm(x).dtype == torch.float32 and torch.equal(norm(x), norm(x.float()))
    moe = MoE(config(**TOP_TWO)).to(torch.bfloat16)
    _, use = moe(x, None)
    probs = moe.gate(x).float().softmax(-1)
    assert use.dtype == torch.float32 and torch.allclose(use[1], probs.mean(1), atol=1e-6)
