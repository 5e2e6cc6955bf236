"""Products in fp8: near enough to exact ones, in all three places, and out of the way where nothing is trained.

The CPU computes the same products as a GPU, only slowly; so what is tested here is what a GPU is given to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import random_model, tokens
from torch import Tensor, nn

from models.decoder import Decoder
from models.layers.fp8 import GRADIENTS, WEIGHTS, Fp8Linear, product, rounded, use_fp8

# Half a last digit of three (e4m3) or two (e5m2) is at most 6.25 and 12.5 %, on average less than half of that; products of two roundings add up.
FORWARD, BACKWARD = 0.05, 0.08


def off(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def products(multiply, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """A result, and its gradients for x and weight."""
    x, weight, g = drawn(positions, 64).requires_grad_(), drawn(48, 64, seed=1).requires_grad_(), drawn(positions, 48, seed=2)
    y = multiply(x, weight)
    return (y, *torch.autograd.grad(y, (x, weight), g))


@pytest.mark.parametrize("positions", [32, 5, 1])
def test_the_three_products_are_the_exact_ones_within_the_digits_that_fp8_has(positions: int) -> None:
    exact, found = products(lambda x, w: F.linear(x.float(), w.float()), positions), products(product, positions)
    for mine, theirs, most in zip(found, exact, (FORWARD, BACKWARD, BACKWARD), strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == theirs.shape
        assert 0.005 < off(mine, theirs) < most  # and it was fp8: bf16 would be off by less


def test_a_product_is_that_of_its_rounded_factors() -> None:
    x, weight = drawn(32, 64), drawn(48, 64, seed=1)
    (x8, x_scale), (w8, w_scale) = rounded(x, WEIGHTS), rounded(weight, WEIGHTS)
    assert off(product(x, weight), (x8.float() * x_scale) @ (w8.float() * w_scale).t()) < 0.004  # bf16's digits


@pytest.mark.parametrize("kind", [WEIGHTS, GRADIENTS])
@pytest.mark.parametrize("size", [1e-25, 1e-4, 1.0, 1e30])
def test_one_scale_brings_a_tensor_of_any_size_into_range(kind: torch.dtype, size: float) -> None:
    x = drawn(16, 16).float() * size
    x8, scale = rounded(x, kind)
    assert x8.dtype == kind and scale.shape == () and scale.dtype == torch.float32
    assert off(x8.float() * scale, x) < BACKWARD


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    weight = drawn(16, 16)
    assert product(torch.zeros(16, 16, dtype=torch.bfloat16), weight).eq(0).all()
    for odd in (torch.inf, -torch.inf, torch.nan):
        x = drawn(16, 16)
        x[3, 5] = odd
        assert not product(x, weight).isfinite().any()


def fp8(**changes) -> Decoder:
    model = random_model(**changes)
    use_fp8(model.model.layers)
    return model


def test_layers_whose_sides_are_no_multiple_of_16_stay_as_they_are() -> None:
    model = fp8(intermediate_size=72)
    kinds = {name.rpartition(".")[2]: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is Fp8Linear} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds["gate_proj"] is kinds["down_proj"] is nn.Linear


def gradients(model: Decoder, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, Tensor]:
    ids = tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = model.train()(ids[:, :-1], ids[:, 1:], summed=True).nll
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_model_in_fp8_has_nearly_the_gradients_of_one_in_bf16_and_in_fp32() -> None:
    mine, theirs, exact = gradients(fp8(std=0.05)), gradients(random_model(std=0.05)), gradients(random_model(std=0.05), None)
    assert mine.keys() == exact.keys() and all(g.dtype == torch.float32 for g in mine.values())
    assert off(mine["loss"], exact["loss"]) < 1e-3
    for name in exact:
        assert off(mine[name], exact[name]) < 0.3 and off(mine[name], theirs[name]) < 0.3, name
    matrices = [name for name in exact if name.endswith("_proj.weight")]
    assert all(off(mine[name], exact[name]) > 2 * off(theirs[name], exact[name]) for name in matrices)  # all of them were in fp8


def test_what_is_not_trained_is_computed_as_if_there_were_no_fp8() -> None:
    plain, model, ids = random_model().eval(), fp8().eval(), tokens(2, 24)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_a_compiler_takes_a_whole_layer_and_has_one_program_for_windows_of_any_number() -> None:
    programs = []
    model = fp8().train()
    model.compile_layers(lone=False, backend=lambda graph, inputs: programs.append(graph) or graph)
    for lines, width in ((2, 32), (4, 64), (3, 48), (2, 40)):
        ids = tokens(lines, width)
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, ids, summed=True).nll.backward()
    assert len(programs) == 1


@pytest.mark.slow
def test_compiled_layers_compute_what_plain_ones_do() -> None:
    compiled, plain = fp8(std=0.05).train(), fp8(std=0.05).train()
    compiled.compile_layers(lone=False)
    for lines, width in ((2, 32), (3, 40)):  # the second is padded to a multiple of 16
        ids = tokens(lines, width)
        with torch.autocast("cpu", torch.bfloat16):
            mine, theirs = (model(ids, ids, summed=True).nll for model in (compiled, plain))
        mine.backward()
        theirs.backward()
        assert off(mine, theirs) < 1e-3
    for (name, p), q in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and off(p.grad, q.grad) < 0.25, name  # a sum in another order is rounded to another fp8 number


def trained(model: Decoder, steps: int) -> float:
    """The loss after a few steps on rows that repeat."""
    optimizer, ids = torch.optim.AdamW(model.train().parameters(), lr=3e-3), tokens(4, 33) % 64
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:], summed=True).nll / 128
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_training_in_fp8_goes_the_way_of_bf16() -> None:
    mine, theirs = trained(fp8(std=0.05), 25), trained(random_model(std=0.05), 25)
    assert mine < 4.0 and mine == pytest.approx(theirs, rel=0.05)
