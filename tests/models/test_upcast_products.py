"""Products of 16-bit matrices in fp32: the same numbers as in fp32, rounded once, by every operator of torch that
multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.cpu_kernels import upcast_products as module
from models.layers.cpu_kernels.upcast_products import (
    MIN_SIDE,
    UPCAST_DTYPES,
    are_products_upcast,
    multiply,
    upcast_products,
)
from models.layers.projections import fused_projection, weight_gradients


@pytest.fixture
def upcast(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Products are upcast.

    Yield whether each that was computed was: the numbers alone do not show it where torch, too, rounds once.
    """
    answers: list[bool] = []

    def spy(*arguments: object) -> bool:
        answers.append(is_upcast(*arguments))
        return answers[-1]

    is_upcast = module._is_upcast
    monkeypatch.setattr(module, "_is_upcast", spy)
    upcast_products(True)
    yield answers
    upcast_products(False)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Sums in another order may round to the next number."""
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    assert (y != expected.to(dtype)).float().mean() < 0.01


BLOCKS = module._blocks
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda c, a, b: torch.mm(a, b),
    "mm.out": lambda c, a, b: torch.mm(a, b, out=torch.empty_like(c)),
    "addmm": lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
    "addmm row": lambda c, a, b: torch.addmm(c[0], a, b),
    "addmm.out": lambda c, a, b: torch.addmm(c, a, b, alpha=2, out=torch.empty_like(c)),
    "bmm": lambda c, a, b: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "bmm.out": lambda c, a, b: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1), out=c.new_empty(3, *c.shape)),
    "baddbmm": lambda c, a, b: torch.baddbmm(c, a.expand(3, -1, -1), b.expand(3, -1, -1), beta=0.5),
    "baddbmm.out": lambda c, a, b: torch.baddbmm(
        c, a.expand(3, -1, -1), b.expand(3, -1, -1), out=c.new_empty(3, *c.shape)
    ),
    "linear": lambda c, a, b: F.linear(a, b.t(), c[0]),
    "einsum": lambda c, a, b: torch.einsum("mk,kn->mn", a, b),
}


@pytest.mark.parametrize("dtype", UPCAST_DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_multiply_in_fp32_and_round_once(
    name: str, transposed: bool, dtype: torch.dtype, upcast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block and in many."""
    c, a, b = numbers(70, 90, dtype=dtype), numbers(70, 50, dtype=dtype, seed=1), numbers(50, 90, dtype=dtype, seed=2)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    expected = OPERATORS[name](c.float(), a.float(), b.float())
    for elements in (module.CAST_ELEMENTS, 1):
        monkeypatch.setattr(module, "CAST_ELEMENTS", elements)
        upcast.clear()
        same(OPERATORS[name](c, a, b), expected, dtype)
        assert any(upcast)


@pytest.mark.parametrize(
    "shape", [(64, 300, 40), (300, 64, 40), (40, 64, 300), (1, 1, 1), (0, 5, 4), (4, 5, 0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_product_is_computed_in_blocks_of_its_longest_side(
    shape: tuple[int, int, int], dtype: torch.dtype, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if add and dtype != torch.float32:
        return
    M, K, N = shape
    a, b, total = numbers(M, K), numbers(K, N, seed=1), torch.randn(M, N)
    expected = a.float() @ b.float() + (total if add else 0)
    for elements in (module.CAST_ELEMENTS, 1):
        monkeypatch.setattr(module, "CAST_ELEMENTS", elements)
        out = total.clone() if add else torch.full((M, N), torch.nan, dtype=dtype)
        assert multiply(a, b, out, add=add) is out
        torch.testing.assert_close(out, expected.to(dtype))


def test_product_without_inner_numbers_is_zero(upcast: None) -> None:
    a, b, c = numbers(40, 0), numbers(0, 40), numbers(40, 40)
    assert torch.equal(a @ b, torch.zeros_like(c)) and torch.equal(torch.addmm(c, a, b, beta=0.5), 0.5 * c)
    assert torch.equal(torch.baddbmm(c[None], a[None], b[None], beta=0.5), 0.5 * c[None])


def test_products_are_torchs_own_again_afterwards() -> None:
    a, b = numbers(200, 300), numbers(300, 200)
    before = a @ b
    for _ in range(2):
        upcast_products(True)
        upcast_products(True)
        assert are_products_upcast()
        upcast_products(False)
        assert torch.equal(a @ b, before) and not are_products_upcast()


def test_products_of_other_types_and_of_few_rows_are_torchs_own(upcast: None) -> None:
    few, weight, double = numbers(MIN_SIDE - 1, 64), numbers(64, 64), numbers(64, 64, dtype=torch.float64)
    y, y_fp32, y_double = few @ weight, weight.float() @ weight.float(), double @ double
    integers = torch.arange(64 * 64).view(64, 64)
    y_integers, narrow = integers @ integers, weight @ few.t()
    upcast_products(False)
    assert (
        torch.equal(few @ weight, y)
        and torch.equal(weight.float() @ weight.float(), y_fp32)
        and torch.equal(double @ double, y_double)
    )
    assert torch.equal(integers @ integers, y_integers) and torch.equal(weight @ few.t(), narrow)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: a @ a.float(),
        lambda a: torch.mm(torch.cat([a, a], 1)[:40], torch.cat([a, a, a[:32]])[:, :40]),
        lambda a: torch.mm(a, a, out=a.new_empty(64, 64, dtype=torch.float32)),
        lambda a: torch.bmm(a.expand(2, -1, -1), a.expand(3, -1, -1)),
        lambda a: torch.addmm(a[:, :5], a, a),
        lambda a: torch.addmm(a.float(), a, a),
        lambda a: torch.mm(a[None], a[None]),
        lambda a: torch.bmm(a, a),
        lambda a: torch.baddbmm(a, a, a),
        lambda a: torch.mm(a, a[0]),
        lambda a: a[:1].addmm_(a, a),
    ],
    ids=[
        "types",
        "sizes",
        "type of the output",
        "batches",
        "added",
        "type of the added",
        "3 dimensions",
        "2 dimensions",
        "2 dimensions, added",
        "a vector",
        "shape to overwrite",
    ],
)
def test_errors_of_torch_stay(wrong: Callable[[Tensor], Tensor], upcast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAST_ELEMENTS", 1)  # blocks of the sizes of both fit together
    with pytest.raises((RuntimeError, IndexError)):
        wrong(numbers(64, 64))


def test_batches_of_large_matrices_are_cast_one_by_one(upcast: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAST_ELEMENTS", 1)
    sizes: list[int] = []
    monkeypatch.setattr(
        module,
        "_blocks",
        lambda *arguments, **settings: [
            block for block in BLOCKS(*arguments, **settings) if not sizes.append(block.stop - block.start)
        ],
    )
    a = numbers(3, 40, 40)
    torch.baddbmm(a @ a, a, a)
    assert sizes == [1] * 6


def test_gradients_are_those_of_fp32_rounded(upcast: list[bool]) -> None:
    x, weight, g = (
        numbers(2, 40, 64).requires_grad_(),
        numbers(96, 64, seed=1).requires_grad_(),
        numbers(2, 40, 96, seed=2),
    )
    dx, dw = torch.autograd.grad(F.linear(x, weight), (x, weight), g)
    same(dx, g.float() @ weight.detach().float(), torch.bfloat16)
    same(dw, g.flatten(0, 1).float().t() @ x.detach().flatten(0, 1).float(), torch.bfloat16)
    assert upcast.count(True) == 3


def test_autocast_and_inference_multiply_in_fp32(upcast: list[bool]) -> None:
    x, linear = torch.randn(40, 64), torch.nn.Linear(64, 96)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert any(upcast)
    x, weight, bias = (value.detach().bfloat16().float() for value in (x, linear.weight, linear.bias))
    same(y, F.linear(x, weight, bias), torch.bfloat16)


def test_operators_called_by_others_under_autocast_are_not_cast_back(
    upcast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Custom operators run with autocast enabled, and autocast leaves `out=` alone: the product in fp32 would come back
    as one in bf16.
    """
    calls = []
    monkeypatch.setattr(
        module, "multiply", lambda *arguments, **settings: calls.append(arguments) or multiply(*arguments, **settings)
    )
    a, b = numbers(64, 64), numbers(64, 64, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.mm(a, b, out=torch.empty_like(a))
        assert len(calls) == 1
        total = multiply(a[:48], b, torch.empty(48, 64))  # calls itself for the transposed product
        assert torch.is_autocast_enabled("cpu")
    same(y, a.float() @ b.float(), torch.bfloat16)
    torch.testing.assert_close(total, a[:48].float() @ b.float())


def test_kernel_of_weight_gradients_is_not_needed(upcast: None) -> None:
    """Nothing was compiled, and sums are not rounded to bf16."""
    weight = torch.nn.Linear(64, 96, bias=False)
    out = fused_projection(x := numbers(2, 70, 64).requires_grad_(), weight, use_kernel=True)[0]
    dx, dw = torch.autograd.grad(out, (x, weight.weight), torch.ones_like(out))
    assert dx.shape == x.shape
    torch.testing.assert_close(dw, torch.ones(96, 140) @ x.detach().flatten(0, 1).float())
    g, x = numbers(130, 96), numbers(130, 64, seed=1)
    for gradient, part in zip(weight_gradients(g, x, [64, 32]), g.split([64, 32], dim=1), strict=True):
        torch.testing.assert_close(gradient, part.float().t() @ x.float())
