"""Matrix products of 16-bit numbers on the CPU, computed in fp32 and rounded once: `upcast_products(True)` lets torch
compute them so in this process.

oneDNN, too, sums products of 16-bit numbers in fp32 and rounds the sum, with instructions for 16 bits. Without them
that takes many times as long as a product in fp32, and with those of AVX-512 it may still take longer
(`are_16_bits_fast`). Numbers of 16 bits are exact in fp32, and so are their products.

The kernels of torch are replaced by those in Python that call them with operands in fp32 (torch.library.get_kernel), so
that all layers, compiled or not, adapters, attention and models of transformers are computed so. Products with a side
of less than MIN_SIDE, as those of single tokens in generation, stay as they are: to cast the weight would take longer.
So does torch's own fused attention, which calls none of these operators.

`upcast_products(True, by_kernel=True)` computes those in bf16, without a sum that is added, by the C++ kernel, which
converts numbers where it packs them.

Shapes: (M, K) @ (K, N), and S of such products at once.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from models.layers.cpu_kernels.library import call_kernel

P = ParamSpec("P")
T = TypeVar("T")
UPCAST_DTYPES = (torch.bfloat16, torch.float16)
MIN_SIDE = 8  # of M and N
MIN_BLOCK = 64  # rows of a block
CAST_ELEMENTS = 1 << 21  # cast at a time, besides an operand that all blocks share: 8 MiB in fp32
DIMENSIONS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}  # operator of aten -> dimensions of its matrices

_overrides: torch.library.Library | None = None
_by_kernel = False


def are_products_upcast() -> bool:
    return _overrides is not None


def are_products_by_kernel() -> bool:
    """Return whether those that are upcast are computed by the C++ kernel, where it supports them."""
    return _by_kernel


def upcast_products(enabled: bool, *, by_kernel: bool = False) -> None:
    """Let torch compute products of 16-bit matrices on the CPU in fp32, or as it does by itself: in all of this
    process, until the next call.

    `by_kernel`: by the C++ kernel, which has been loaded.
    """
    global _overrides, _by_kernel
    _by_kernel = enabled and by_kernel
    if enabled == are_products_upcast():
        return
    if _overrides is not None:
        _overrides._destroy()
        _overrides = None
        return
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in DIMENSIONS}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel that is replaced
        for name, kernel in kernels.items():
            compute = _upcast_kernel(kernel, DIMENSIONS[name])
            library.impl(name, compute, "CPU", with_keyset=True)
            library.impl(f"{name}.out", _with_output(compute), "CPU", with_keyset=True)
    _overrides = library


def _without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Disable autocast meanwhile.

    It is on where an operator of `custom_op` calls one of torch, and would cast operands back to 16 bits.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return call


def _upcast_kernel(kernel: Any, dimensions: int) -> Callable[..., Tensor]:
    """Return the function that replaces `kernel`, one of torch that returns a new tensor."""

    def compute(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        a, b = args[-2:]
        if args[0].dtype != a.dtype or not _is_upcast(a, b, dimensions):
            result: Tensor = kernel.call_boxed(keys, *args, **kwargs)
            return result
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if args[:-2] or dimensions == 3:
            return _multiply_add(args[0] if args[:-2] else None, a, b, out, **kwargs)
        return multiply(a, b, out)

    return compute


def _with_output(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `compute` for the variant with `out=`.

    Torch's own kernel of it is not called: `call_boxed` of it has damaged memory (torch 2.13).
    """

    def compute_into(keys: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = compute(keys, *args, **kwargs)
        if out.dtype != result.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return compute_into


def _is_upcast(a: Tensor, b: Tensor, dimensions: int) -> bool:
    """Return whether a @ b is computed in fp32; no for what torch refuses."""
    if a.dtype not in UPCAST_DTYPES or b.dtype != a.dtype or not a.dim() == b.dim() == dimensions:
        return False
    return a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2] and min(a.shape[-2], b.shape[-1]) >= MIN_SIDE


@_without_autocast
def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """a: (M, K), b: (K, N), 16 bits -> out (M, N) = a @ b, in 16 bits or fp32.

    `add`: out += a @ b, in fp32.

    Without the kernel the longest side is computed in blocks, so that no copy in fp32 is larger than the shorter
    operand or CAST_ELEMENTS.
    """
    (M, K), N = a.shape, b.shape[1]
    assert not add or out.dtype == torch.float32
    if _by_kernel and supports_product(a, b, out):
        return multiply_by_kernel(a, b, out, add=add)
    if max(M, N) < K:
        total = out if add else None
        for block in _blocks(K, M + N):
            total = _multiply_fp32(a[:, block].float(), b[block].float(), total)
        assert total is not None
        return out.copy_(total)
    if M < N:
        multiply(b.t(), a.t(), out.t(), add=add)
        return out
    b = b.float()
    for block in _blocks(M, K + N):
        out[block] = _multiply_fp32(a[block].float(), b, out[block] if add else None)
    return out


def _multiply_fp32(a: Tensor, b: Tensor, total: Tensor | None) -> Tensor:
    """Return a @ b, or total + a @ b."""
    return a @ b if total is None else torch.addmm(total, a, b)


@_without_autocast
def _multiply_add(c: Tensor | None, a: Tensor, b: Tensor, out: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """a: (M, K), b: (K, N), or S of each -> out (M, N) = beta * c + alpha * a @ b; c: anything that broadcasts to out,
    or None, only for S of them.
    """
    is_batch = a.dim() == 3
    c = None if c is None else c.expand(out.shape)
    numbers = _numbers(a) + (1 if c is None else 2) * _numbers(out) + (_numbers(b) if is_batch else 0)
    b = b if is_batch else b.float()
    for block in _blocks(len(a), numbers, smallest=1 if is_batch else MIN_BLOCK):
        a_block, b_block = a[block].float(), b[block].float() if is_batch else b
        if c is None:
            out[block] = a_block @ b_block
        else:
            add = torch.baddbmm if is_batch else torch.addmm
            out[block] = add(c[block].float(), a_block, b_block, beta=beta, alpha=alpha)
    return out


def supports_product(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Return whether the kernel computes out (M, N) = a (M, K) @ b (K, N): operands in bf16, each with contiguous rows
    or columns, out as well.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or out.dtype not in (torch.bfloat16, torch.float32):
        return False
    return all(1 in x.stride() and x.numel() > 0 for x in (a, b, out))


def multiply_by_kernel(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """a: (M, K), b: (K, N) -> out (M, N) = a @ b, or out += a @ b in fp32: those of `supports_product`.

    Raises MemoryError.
    """
    if out.stride(1) != 1:
        multiply_by_kernel(b.t(), a.t(), out.t(), add=add)
        return out
    is_fp32 = out.dtype == torch.float32
    call_kernel(
        "lm_runner_multiply", a, *a.stride(), b, *b.stride(), out, out.stride(0), *out.shape, a.shape[1], is_fp32, add
    )
    return out


def _numbers(x: Tensor) -> int:
    """Return how many numbers a row of x has, or one of its matrices."""
    return math.prod(x.shape[1:])


def _blocks(size: int, numbers: int, smallest: int = MIN_BLOCK) -> Iterator[slice]:
    """Cut `size` rows into blocks of at most CAST_ELEMENTS numbers, and at least `smallest` rows; `numbers`: of one
    row.
    """
    step = max(smallest, CAST_ELEMENTS // max(1, numbers))
    yield from (slice(start, start + step) for start in range(0, size, step))
