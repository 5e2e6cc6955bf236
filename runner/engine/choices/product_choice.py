"""Whether products of 16-bit matrices are computed with instructions for 16 bits or in fp32: without AMX, the former
may take many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runner.engine.choices.measured_choice import KernelChoice, shortest_times

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NATIVE, UPCAST, KERNEL = "native", "fp32", "cpp"
PRODUCT_DTYPES = ("bfloat16", "float16")
MIN_RUN_FLOPS = 2e12  # of runs that measure it: some seconds at the speed of a laptop
PRODUCT_TURNS, PRODUCT_PASSES = 3, 1
# largest sides of matrices, measured in this order until the next would take longer than PRODUCT_SECONDS:
PRODUCT_SIDES = (128, 512, 2_048)
# without instructions for 16 bits torch's own products may take a thousand times as long as with them
PRODUCT_SECONDS = 0.3


@dataclass(frozen=True)
class ProductShape:
    """A linear layer in one micro-batch."""

    tokens: int
    outputs: int
    inputs: int
    dtype: str  # of torch: bfloat16 or float16


def product_choice(shape: ProductShape) -> KernelChoice:
    """Return the choice of how torch multiplies 16-bit matrices in this process."""
    return KernelChoice(
        fact="products",
        default=NATIVE,
        others=(UPCAST, KERNEL) if shape.dtype == "bfloat16" else (UPCAST,),
        long_only=(KERNEL,),
        workload=asdict(shape),
        measure=partial(measure_products, shape),
        apply=use_products,
        unit="ms a linear layer",
        labels={NATIVE: f"in {shape.dtype}", UPCAST: "in float32 and rounded", KERNEL: "by the C++ kernel"},
        load=load_products,
        in_short_runs=True,
    )


def current_products() -> str:
    """Return the kernel that this process computes with."""
    from models.layers.cpu_kernels.upcast_products import are_products_by_kernel, are_products_upcast

    return KERNEL if are_products_by_kernel() else UPCAST if are_products_upcast() else NATIVE


def use_products(kernel: str) -> None:
    """Compute products of 16-bit matrices by `kernel` in this process. KERNEL has to be loaded."""
    from models.layers.cpu_kernels.upcast_products import upcast_products

    upcast_products(kernel != NATIVE, by_kernel=kernel == KERNEL)


def load_products(kernel: str, folder: Path) -> None:
    """Raise KernelsUnavailableError if this torch does not let its products be replaced; for the C++ kernel, if it is
    not compiled or torch has no AVX-512.
    """
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
    from models.layers.cpu_kernels.upcast_products import can_upcast

    if not can_upcast():
        raise KernelsUnavailableError("torch.library.get_kernel is missing")
    if kernel != KERNEL:
        return
    if not (capability := torch.backends.cpu.get_cpu_capability()).startswith("AVX512"):
        raise KernelsUnavailableError(f"it needs AVX-512, and torch uses {capability}")
    load_kernels(folder)


def measure_products(shape: ProductShape, kernels: Sequence[str]) -> dict[str, float]:
    """Return kernel -> the shortest time of the forward and backward products of the layer, seconds.

    The choice made before does not matter.
    """
    import torch

    before = current_products()
    use_products(NATIVE)
    try:
        times, flops = dict[str, float](), 0.0
        for largest in PRODUCT_SIDES:
            tokens, outputs, inputs = (min(size, largest) for size in (shape.tokens, shape.outputs, shape.inputs))
            larger = float(tokens * outputs * inputs)
            if times and times[NATIVE] * larger / flops > PRODUCT_SECONDS:
                break
            times, flops = _time_products(tokens, outputs, inputs, getattr(torch, shape.dtype), kernels), larger
        return times
    finally:
        use_products(before)


def _time_products(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, kernels: Sequence[str]
) -> dict[str, float]:
    import torch

    from models.layers.cpu_kernels.upcast_products import multiply, multiply_by_kernel

    x, g, weight = (
        torch.ones(*sizes, dtype=dtype) for sizes in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )
    runs: dict[str, Callable[[], object]] = {
        NATIVE: partial(_native, x, g, weight),
        UPCAST: partial(_upcast, multiply, x, g, weight),
        KERNEL: partial(_upcast, multiply_by_kernel, x, g, weight),
    }
    return shortest_times({kernel: runs[kernel] for kernel in kernels}, PRODUCT_TURNS, PRODUCT_PASSES)


def _native(x: Tensor, g: Tensor, weight: Tensor) -> None:
    x @ weight.t()
    g @ weight
    (g.t() @ x).float()


def _upcast(multiply: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, g: Tensor, weight: Tensor) -> None:
    import torch

    (n, inputs), outputs = x.shape, len(weight)
    multiply(x, weight.t(), x.new_empty(n, outputs))
    multiply(g, weight, x.new_empty(n, inputs))
    multiply(g.t(), x, weight.new_empty(outputs, inputs, dtype=torch.float32))
