"""Products of bf16 matrices by the C++ kernel: sums in fp32, rounded once, for every layout, size and number of
threads.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.cpu_kernels import upcast_products as upcast_products_module
from models.layers.cpu_kernels.upcast_products import (
    are_products_by_kernel,
    multiply,
    multiply_by_kernel,
    supports_product,
    upcast_products,
)
from models.layers.projections import weight_gradients

pytestmark = pytest.mark.usefixtures("kernels")

SIZES = [
    (1, 1, 1),
    (12, 256, 32),
    (13, 257, 33),
    (5, 3, 2),
    (64, 300, 40),
    (300, 64, 40),
    (40, 64, 300),
    (24, 512, 1100),
    (37, 1025, 530),
    (700, 40, 11),
    (4100, 300, 20),
]


def matrix(
    rows: int, cols: int, seed: int, *, is_transposed: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.t().contiguous().t() if is_transposed else x


def same(y: Tensor, expected: Tensor) -> None:
    """`expected`: in fp64. Sums in fp32 may round to the next number in bf16."""
    if y.dtype == torch.float32:
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        return
    assert (y != expected.bfloat16()).double().mean() <= 0.01
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel_multiplies_every_layout_in_fp32_and_rounds_once(size: tuple[int, int, int]) -> None:
    M, K, N = size
    for a_transposed, b_transposed, out_transposed in itertools.product([False, True], repeat=3):
        a, b = matrix(M, K, 1, is_transposed=a_transposed), matrix(K, N, 2, is_transposed=b_transposed)
        product = a.double() @ b.double()
        for dtype, add in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            out = matrix(M, N, 3, is_transposed=out_transposed, dtype=dtype)
            expected = product + out.double() if add else product
            assert supports_product(a, b, out) and multiply_by_kernel(a, b, out, add=add) is out
            same(out, expected)


def test_kernel_reads_and_writes_parts_of_larger_matrices_only() -> None:
    wide, high, out = matrix(70, 200, 1), matrix(130, 90, 2), torch.full((80, 120), 7.0)
    a, b, part = wide[3:58, 20:117], high[11:108, 5:75], out[9:64, 30:100]
    multiply_by_kernel(a, b, part)
    same(part, a.double() @ b.double())
    part.fill_(7.0)
    assert torch.equal(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_product_is_the_same_for_every_number_of_threads(is_transposed: bool) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            a, b = matrix(130, 600, 1, is_transposed=is_transposed), matrix(600, 90, 2, is_transposed=is_transposed)
            results.append(
                [multiply_by_kernel(a, b, a.new_empty(130, 90)), multiply_by_kernel(b.t(), a.t(), torch.empty(90, 130))]
            )
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_stays_in_its_row_and_column(value: float) -> None:
    a, b = matrix(13, 300, 1), matrix(300, 33, 2)
    a[12, 299] = value
    y = multiply_by_kernel(a, b, a.new_empty(13, 33))
    assert y[:12].isfinite().all() and not y[12].isfinite().any()
    y = multiply_by_kernel(b.t(), a.t(), a.new_empty(33, 13))
    assert y[:, :12].isfinite().all() and not y[:, 12].isfinite().any()


def test_kernel_leaves_other_types_layouts_and_empty_matrices_to_torch() -> None:
    a, b, out = matrix(64, 64, 1), matrix(64, 64, 2), matrix(64, 64, 3)
    assert supports_product(a, b, out)
    for wrong in (
        (a.half(), b.half(), out.half()),
        (a.float(), b, out),
        (a, b, out.half()),
        (a[:, ::2], b[:32], out),
        (a[:0], b, out[:0]),
    ):
        assert not supports_product(*wrong)


def test_sums_of_many_products_are_as_exact_as_those_of_torch() -> None:
    """Of numbers of one sign, one chain of additions would have an error of 5e-6."""
    a, b = matrix(24, 16_384, 1).abs(), matrix(16_384, 32, 2).abs()
    exact = a.double() @ b.double()
    total = multiply_by_kernel(a, b, torch.zeros(24, 32), add=True)
    assert ((total - exact) / exact).abs().max() < 1e-6


def test_products_of_torch_and_gradients_are_computed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(
        upcast_products_module,
        "multiply_by_kernel",
        lambda *tensors, **settings: calls.append(multiply_by_kernel(*tensors, **settings)) or calls[-1],
    )
    x, weight, g = matrix(70, 64, 1).requires_grad_(), matrix(96, 64, 2).requires_grad_(), matrix(70, 96, 3)
    upcast_products(True, by_kernel=True)
    try:
        assert are_products_by_kernel()
        y = F.linear(x, weight)
        assert torch.equal(y, multiply_by_kernel(x.detach(), weight.detach().t(), g.new_empty(70, 96)))
        dx, dw = torch.autograd.grad(y, (x, weight), g)
        x, weight = x.detach(), weight.detach()
        assert torch.equal(dx, multiply_by_kernel(g, weight, torch.empty_like(x))) and torch.equal(
            dw, multiply_by_kernel(g.t(), x, torch.empty_like(weight))
        )
        same(torch.cat(weight_gradients(g, x, [64, 32])), g.double().t() @ x.double())
        assert len(calls) == 5  # forward, two gradients; one for each part of the weight
        every_other = multiply(x[:, ::2], weight.t()[:32], g.new_empty(70, 96))
        same(every_other, x[:, ::2].double() @ weight.t()[:32].double())
    finally:
        upcast_products(False)
    assert not are_products_by_kernel() and len(calls) == 5  # columns that are not contiguous are cast
