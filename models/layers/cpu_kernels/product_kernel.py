"""Products of matrices in bf16 by the C++ kernel: summed in fp32, rounded once, without copies of the operands in fp32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from models.layers.cpu_kernels.library import call_kernel


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
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)]
    a_strides, b_strides = ([ctypes.c_int64(stride) for stride in x.stride()] for x in (a, b))
    sizes = (ctypes.c_int64(size) for size in (out.stride(0), *out.shape, a.shape[1]))
    flags = (ctypes.c_int(flag) for flag in (out.dtype == torch.float32, add, torch.get_num_threads()))
    call_kernel("lm_runner_multiply", pointers[0], *a_strides, pointers[1], *b_strides, pointers[2], *sizes, *flags)
    return out
