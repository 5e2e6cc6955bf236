"""Experts of a layer: gradients, padding, adapters, compiled layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mlp import ProductRows
from tiny_models import random_model, tokens
from torch import Tensor

from models.layers.mlp import MoE

EIGHT: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 1e-2,
}
PRECISIONS = pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])


def moe_layer() -> MoE:
    layer = random_model(**EIGHT).layers[0].mlp
    assert isinstance(layer, MoE)
    return layer


def run(layer: MoE, x: Tensor, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the output of the layer, and the gradients of its input and of all parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x, None)[0]
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    return y.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@PRECISIONS
def test_expert_without_tokens_has_gradients_of_zeros(autocast: bool) -> None:
    """Other ranks wait for them."""
    gradients = run(moe_layer(), torch.randn(1, 3, 48), autocast)[1]
    experts = {name: gradient for name, gradient in gradients.items() if "experts" in name}
    unused = {name.split(".")[1] for name, gradient in experts.items() if gradient is not None and not gradient.any()}
    assert None not in experts.values() and len(experts) == 24 and len(unused) >= 2


@PRECISIONS
def test_experts_are_deterministic(autocast: bool) -> None:
    layer, x = moe_layer(), torch.randn(2, 150, 48)
    (y, gradients), (again, gradients_again) = run(layer, x, autocast), run(layer, x, autocast)
    assert torch.equal(y, again) and all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)  # type: ignore[arg-type]  # None: frozen weights only


def test_experts_without_tokens_are_not_called_in_inference() -> None:
    layer, called = moe_layer(), []
    for expert in layer.experts:
        expert.register_forward_hook(lambda module, *_: called.append(module))
    with torch.no_grad():
        layer(torch.randn(1, 1, 48), None)
    assert len(called) == layer.cfg.num_experts_per_tok == 2
    x = torch.randn(2, 30, 48)
    expected = run(layer, x)[0]
    with torch.no_grad():
        torch.testing.assert_close(layer(x, None)[0], expected, rtol=1e-5, atol=1e-6)


def test_step_of_generation_has_no_product_of_many_rows_in_bf16() -> None:
    layer = moe_layer().bfloat16()
    for tokens_per_step, rows in ((1, {1}), (7, {1, 2, 4, 8})):
        with torch.no_grad(), ProductRows() as products:
            layer(torch.randn(tokens_per_step, 1, 48).bfloat16(), None)
        assert products.rows - {0, tokens_per_step} <= rows


@pytest.mark.slow
def test_compiled_layers_with_experts_have_one_program_for_any_tokens() -> None:
    programs: list[Any] = []
    model = random_model(**EIGHT).train()
    model.compile_layers(single_row=False, backend=lambda graph, inputs: programs.append(graph) or graph)
    counts = []
    for seed in range(6):
        ids, T = tokens(3, 61, seed=seed), 60 - 20 * (seed % 2)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids[:, :T], labels=ids[:, 1 : T + 1], lengths=torch.full((3,), T), reduction="sum")
        (out.nll + out.aux_loss.sum()).backward()
        counts.append(len(programs))
    assert len({*counts}) == 1
