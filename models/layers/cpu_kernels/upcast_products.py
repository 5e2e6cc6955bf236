"""Matrix products of 16-bit numbers on the CPU, computed in fp32 and rounded once: `upcast_products(True)` lets torch compute them so in this process.

oneDNN, too, sums products of 16-bit numbers in fp32 and rounds the sum, with instructions for 16 bits. Without them that takes up to ten times as long as a
product in fp32, and with those of AVX-512 it may still take longer; a run measures it. Numbers of 16 bits are exact in fp32, and so are their products.

The kernels of torch are replaced by those in Python that call them with operands in fp32 (torch.library.get_kernel), so that all layers, compiled or not,
adapters, attention and models of transformers are computed so. Products that are small on one side, as those of single tokens in generation, stay as they
are: to cast the weight would take longer.

Shapes: (M, K) @ (K, N), and S of such products at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

UPCAST_DTYPES = (torch.bfloat16, torch.float16)
MIN_SIDE = 8  # of M and N
MIN_BLOCK = 64  # rows of a block
CAST_ELEMENTS = 1 << 21  # cast at a time, besides an operand that all blocks share: 8 MiB in fp32
PRODUCTS = ("mm", "mm.out", "addmm", "addmm_", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm_", "baddbmm.out")  # of aten

_overrides: torch.library.Library | None = None


def are_products_upcast() -> bool:
    return _overrides is not None


def can_upcast() -> bool:
    """Return whether this torch lets kernels be replaced by some that call them."""
    return hasattr(torch.library, "get_kernel")


def upcast_products(enabled: bool) -> None:
    """Let torch compute products of 16-bit matrices on the CPU in fp32, or as it does by itself: in all of this process, until the next call."""
    global _overrides
    if enabled == are_products_upcast():
        return
    if _overrides is not None:
        _overrides._destroy()
        _overrides = None
        return
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in PRODUCTS}
    _overrides = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel that is replaced
        for name, kernel in kernels.items():
            _overrides.impl(name, _upcast_kernel(name, kernel), "CPU", with_keyset=True)


def _upcast_kernel(name: str, kernel: Any) -> Callable[..., Tensor]:
    """Return the function that replaces `kernel`, the one of torch for aten::`name`."""
    is_in_place = name.endswith("_")

    def compute(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        a, b = args[-2:]
        out = args[0] if is_in_place else kwargs.get("out")
        if not _is_upcast(a, b, out) or args[0].dtype != a.dtype:
            result: Tensor = kernel.call_boxed(keys, *args, **kwargs)
            return result
        if out is None:
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if len(args) == 2:
            return multiply(a, b, out) if a.dim() == 2 else _multiply_batch(a, b, out)
        return _multiply_add(args[0], a, b, out, kwargs.get("beta", 1), kwargs.get("alpha", 1))

    return compute


def _is_upcast(a: Tensor, b: Tensor, out: Tensor | None) -> bool:
    """Return whether a @ b is computed in fp32; no for what torch refuses."""
    if a.dtype not in UPCAST_DTYPES or b.dtype != a.dtype or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return False
    shape = (*a.shape[:-1], b.shape[-1])
    return min(shape[-2:]) >= MIN_SIDE and (out is None or (out.dtype == a.dtype and out.shape == shape))


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """a: (M, K), b: (K, N), 16 bits -> out (M, N) = a @ b, in 16 bits or fp32. `add`: out += a @ b, in fp32.

    The longest side is computed in blocks, so that no copy in fp32 is larger than the shorter operand or CAST_ELEMENTS.
    """
    (M, K), N = a.shape, b.shape[1]
    assert not add or out.dtype == torch.float32
    if max(M, N) < K:
        total = out if out.dtype == torch.float32 else out.new_empty(M, N, dtype=torch.float32)
        for block in _blocks(K, M + N):
            total.addmm_(a[:, block].float(), b[block].float(), beta=int(add or block.start > 0))
        return out if total is out else out.copy_(total)
    if M < N:
        multiply(b.t(), a.t(), out.t(), add=add)
        return out
    b = b.float()
    for block in _blocks(M, K + N):
        if out.dtype == torch.float32:
            out[block].addmm_(a[block].float(), b, beta=int(add))
        else:
            _product_into(out[block], a[block].float(), b)
    return out


def projection_gradients_upcast(g: Tensor, x: Tensor, weight: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of x (n, D) and, in fp32, of each part of `weight` (sum of sizes, D), from that of the output, g (n, sum of sizes).

    The same numbers as those of `multiply`, but each number of g is cast once.
    """
    dx, dw = torch.empty_like(x), [x.new_empty(size, x.shape[1], dtype=torch.float32) for size in sizes]
    weight = weight.float()
    for block in _blocks(len(g), g.shape[1] + x.shape[1]):
        g_block, x_block = g[block].float(), x[block].float()
        _product_into(dx[block], g_block, weight)
        for gradient, part in zip(dw, g_block.split([*sizes], dim=1), strict=True):
            gradient.addmm_(part.t(), x_block, beta=int(block.start > 0))
    return dx, dw


def _multiply_batch(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a: (S, M, K), b: (S, K, N) -> out (S, M, N)."""
    for block in _blocks(len(a), a[0].numel() + b[0].numel() + out[0].numel() if len(a) else 1):
        _product_into(out[block], a[block].float(), b[block].float())
    return out


def _multiply_add(c: Tensor, a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> Tensor:
    """a: (M, K), b: (K, N), or S of each -> out (M, N) = beta * c + alpha * a @ b; c: anything that broadcasts to out, or out itself."""
    c, is_batch = c.expand(out.shape), a.dim() == 3
    b = b if is_batch else b.float()
    per_row = a[0].numel() + 2 * out[0].numel() + b[0].numel() * is_batch if len(a) else 1
    for block in _blocks(len(a), per_row):
        operands = c[block].float(), a[block].float(), b[block].float() if is_batch else b
        total = torch.empty_like(out[block], dtype=torch.float32)
        out[block] = (torch.baddbmm if is_batch else torch.addmm)(*operands, beta=beta, alpha=alpha, out=total)
    return out


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, computed in the type of a and b. Autocast, which would cast them back, leaves calls with `out=` alone."""
    out.copy_((torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=torch.empty_like(out, dtype=a.dtype)))


def _blocks(size: int, elements: int) -> Iterator[slice]:
    """Cut `size` rows into blocks of at most CAST_ELEMENTS; `elements`: of one row."""
    step = max(MIN_BLOCK, CAST_ELEMENTS // max(1, elements))
    yield from (slice(start, start + step) for start in range(0, size, step))
