"""Ways to compute the experts of a layer (EXPERT_DISPATCHES) against the default: values, gradients, adapters,
checkpointing, compiled layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_fixtures import require_product
from test_activation_checkpointing import OpCounter, all_equal, backward
from test_mlp import ProductRows
from tiny_models import lora_config, random_model, tokens
from torch import Tensor

from models.layers import mlp
from models.layers.attention import FUSED_KERNEL
from models.layers.mlp import EXPERT_DISPATCHES, MoE
from models.lora import add_lora

EIGHT: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 1e-2,
}
OTHERS = pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES[1:])
OPERATOR = "lm_runner.grouped_experts.default"


def moe_layer(dtype: torch.dtype = torch.float32, **changes: Any) -> MoE:
    layer = random_model(**EIGHT | changes).layers[0].mlp
    assert isinstance(layer, MoE) and layer.dispatch == "index_select"
    return layer.to(dtype)


def run(layer: MoE, dispatch: str, x: Tensor, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the output of the layer, and the gradients of its input and of all parameters."""
    layer.dispatch = dispatch
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x, None)[0]
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    return y.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None and actual.dtype == expected.dtype
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def use_dispatch(model: torch.nn.Module, dispatch: str) -> None:
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatch = dispatch


@OTHERS
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("shape", [(2, 150), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("per_token", [1, 2, 8])
def test_expert_dispatch_has_the_values_and_gradients_of_the_default(
    dispatch: str, dtype: torch.dtype, bound: float, shape: tuple, per_token: int
) -> None:
    layer, x = (
        moe_layer(dtype, num_experts_per_tok=per_token),
        torch.randn(*shape, 48, dtype=dtype, generator=torch.Generator().manual_seed(2)),
    )
    (y, gradients), (expected, expected_gradients) = run(layer, dispatch, x), run(layer, "index_select", x)
    assert relative_error(y, expected) <= bound
    assert {
        name: error
        for name in gradients
        if not (error := relative_error(gradients[name], expected_gradients[name])) <= bound
    } == {}


@pytest.mark.usefixtures("kernels")
@OTHERS
@pytest.mark.parametrize("kernel", ["auto", FUSED_KERNEL])
def test_expert_dispatch_is_as_exact_as_the_default_in_bf16(dispatch: str, kernel: str) -> None:
    if kernel == FUSED_KERNEL:
        require_product(torch.bfloat16)
    layer, x = moe_layer(), torch.randn(2, 150, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, expected_gradients = run(layer.double(), "index_select", x.double())
    layer.float()
    for module in layer.modules():
        vars(module)["attention_kernel"] = kernel
    (y, gradients), (default, default_gradients) = (
        run(layer, dispatch, x, autocast=True),
        run(layer, "index_select", x, autocast=True),
    )
    assert y.dtype == default.dtype and (y.double() - expected).norm() <= 1.05 * (default.double() - expected).norm()
    for name, gradient in gradients.items():
        errors = [(found.double() - expected_gradients[name]).norm() for found in (gradient, default_gradients[name])]  # type: ignore[union-attr, operator]  # None: frozen weights only
        assert errors[0] <= 1.1 * errors[1], name


@pytest.mark.usefixtures("kernels")
@OTHERS
def test_expert_dispatch_has_fp32_weight_gradients_with_the_fused_kernel(dispatch: str) -> None:
    """Those of the default are not rounded to bf16 then."""
    require_product(torch.bfloat16)
    layer, x = moe_layer(), torch.randn(2, 150, 48).bfloat16()
    are_rounded = []
    for kernel in ("auto", FUSED_KERNEL):
        layer.attention_kernel = kernel
        gradients = run(layer, dispatch, x, autocast=True)[1]
        are_rounded.append(
            {
                name.split(".")[2]
                for name, g in gradients.items()
                if "experts" in name and g is not None and torch.equal(g, g.bfloat16().float())
            }
        )
    assert are_rounded == [{"gate_proj", "up_proj", "down_proj"}, set()]


@pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_expert_without_tokens_has_gradients_of_zeros(dispatch: str, autocast: bool) -> None:
    """Other ranks wait for them."""
    gradients = run(moe_layer(), dispatch, torch.randn(1, 3, 48), autocast)[1]
    experts = {name: gradient for name, gradient in gradients.items() if "experts" in name}
    unused = {name.split(".")[1] for name, gradient in experts.items() if gradient is not None and not gradient.any()}
    assert None not in experts.values() and len(experts) == 24 and len(unused) >= 2


@pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_expert_dispatch_is_deterministic(dispatch: str, autocast: bool) -> None:
    layer, x = moe_layer(), torch.randn(2, 150, 48)
    (y, gradients), (again, gradients_again) = run(layer, dispatch, x, autocast), run(layer, dispatch, x, autocast)
    assert torch.equal(y, again) and all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)  # type: ignore[arg-type]  # None: frozen weights only


@OTHERS
def test_expert_dispatch_of_frozen_experts_has_no_weight_gradients(dispatch: str) -> None:
    layer, x = moe_layer(), torch.randn(2, 30, 48)
    expected = run(layer, dispatch, x)[1]["x"]
    layer.experts.requires_grad_(False)
    with OpCounter() as counter:
        gradients = run(layer, dispatch, x)[1]
    products = counter.calls["aten.mm.default"]
    assert {name for name, gradient in gradients.items() if gradient is not None} == {"x", "gate.weight"}
    # The input has a gradient, which mypy cannot know. Three products are those of the router: with gradients of
    # weights there are 24 more.
    assert torch.equal(gradients["x"], expected) and products == 3  # type: ignore[arg-type]  # None: frozen weights only


@OTHERS
def test_expert_dispatch_calls_experts_with_adapters_one_by_one(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "grouped_experts", lambda *inputs: pytest.fail("ignores adapters"))
    model = random_model(**EIGHT)
    add_lora(model, lora_config(targets=["down_proj"]))
    expected = backward(model)
    use_dispatch(model, dispatch)
    assert len(expected) == 1 + 2 * 2 * 8 and all_equal(backward(model), expected)


@OTHERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_expert_dispatch_is_bitwise_equal_with_activation_checkpointing(dispatch: str, dtype: torch.dtype) -> None:
    model = random_model(**EIGHT)
    use_dispatch(model, dispatch)
    results, calls = [], []
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode
        with OpCounter() as counter:
            results.append(backward(model, is_packed=True, dtype=dtype))
        calls.append(counter.calls[OPERATOR])
    assert all_equal(results[1], results[0]) and all_equal(results[2], results[0])
    assert calls == [2, 2, 4]  # two layers; selective: none is recomputed


@pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES)
def test_experts_without_tokens_are_not_called_in_inference(dispatch: str) -> None:
    layer = moe_layer()
    layer.dispatch = dispatch
    with torch.no_grad(), OpCounter() as counter:
        layer(torch.randn(1, 1, 48), None)
    called = counter.calls["lm_runner.joined_projection.default"] + counter.calls[OPERATOR]
    assert called == (2 if dispatch == "index_select" else 1)  # two experts, or the operator for all
    x = torch.randn(2, 30, 48)
    expected = run(layer, "index_select", x)[0]
    layer.dispatch = dispatch
    with torch.no_grad():
        assert relative_error(layer(x, None)[0], expected) < 1e-6


@pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES)
def test_step_of_generation_has_no_product_of_many_rows_in_bf16(dispatch: str) -> None:
    layer = moe_layer().bfloat16()
    layer.dispatch = dispatch
    for tokens_per_step, rows in ((1, {1}), (7, {1, 2, 4, 8})):
        with torch.no_grad(), ProductRows() as products:
            layer(torch.randn(tokens_per_step, 1, 48).bfloat16(), None)
        assert products.rows - {0, tokens_per_step} <= rows


@pytest.mark.parametrize("dispatch", EXPERT_DISPATCHES)
def test_compiled_layers_with_experts_have_one_program_for_any_tokens(dispatch: str) -> None:
    programs: list[Any] = []
    model = random_model(**EIGHT).train()
    use_dispatch(model, dispatch)
    model.compile_layers(single_row=False, backend=lambda graph, inputs: programs.append(graph) or graph)
    counts = []
    for seed in range(6):
        ids, T = tokens(3, 61, seed=seed), 60 - 20 * (seed % 2)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids[:, :T], labels=ids[:, 1 : T + 1], lengths=torch.full((3,), T), reduction="sum")
        (out.nll + out.aux_loss.sum()).backward()
        counts.append(len(programs))
    assert len({*counts}) == 1
