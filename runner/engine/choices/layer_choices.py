"""The kernel of attention on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runner.engine.choices.measured_choice import KernelChoice, shortest_times

if TYPE_CHECKING:
    import torch

DEFAULT_KERNEL = "auto"  # blocks of 64 queries
FUSED = "fused"
OTHER_KERNELS = ("blocks-32", "blocks-128", FUSED)
ATTENTION_TURNS, ATTENTION_PASSES = 4, 2  # of each kernel
ROW_LIMIT, ROW_TOKEN_LIMIT = 4, 2_048  # measured at a time: the order of kernels is that of larger batches, too


@dataclass(frozen=True)
class AttentionShape:
    """What one layer computes in one micro-batch."""

    rows: int
    tokens: int  # per row
    documents: int  # per row
    heads: int
    key_heads: int
    head_width: int
    dtype: str  # of torch: float32 or bfloat16


def attention_choice(shape: AttentionShape, apply: Callable[[str], None]) -> KernelChoice:
    """Return the choice between `models.layers.attention.CPU_KERNELS`, forward and backward."""
    return KernelChoice(
        fact="attention",
        default=DEFAULT_KERNEL,
        others=OTHER_KERNELS,
        workload=asdict(shape),
        measure=partial(measure_attention, shape),
        apply=apply,
        smaller=(FUSED,),  # it saves no probabilities
        unit="ms a layer",
        labels={DEFAULT_KERNEL: "blocks-64"},
        load=partial(load_attention, shape),
    )


def load_attention(shape: AttentionShape, kernel: str, folder: Path) -> None:
    """Raise KernelsUnavailableError if this machine cannot compute `kernel` for `shape`."""
    if kernel != FUSED:
        return
    import torch

    from models.layers.cpu_kernels.fused_attention import check_product, supports
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels

    dtype = getattr(torch, shape.dtype)
    if not supports(dtype, shape.head_width):
        raise KernelsUnavailableError(f"not for heads of {shape.head_width} numbers in {shape.dtype}")
    load_kernels(folder)
    check_product(dtype, shape.head_width)


def measure_attention(shape: AttentionShape, kernels: Sequence[str]) -> dict[str, float]:
    """Return kernel -> the shortest time of a forward and a backward pass, seconds; kernels that cannot compute `shape`
    are left out.
    """
    import torch

    from models.layers.attention import attention

    (q, k, v), mask = _make_inputs(shape)

    def compute(kernel: str) -> None:
        out = attention(q, k, v, mask, 0.0, kernel)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return shortest_times({kernel: partial(compute, kernel) for kernel in kernels}, ATTENTION_TURNS, ATTENTION_PASSES)


def _make_inputs(shape: AttentionShape) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return random queries, keys and values, and the mask; torch's global generator is not used."""
    import torch

    from models.layers.attention import document_mask

    B, T = min(shape.rows, ROW_LIMIT), min(shape.tokens, ROW_TOKEN_LIMIT)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(B, T, heads, shape.head_width, generator=generator)
        .to(getattr(torch, shape.dtype))
        .transpose(1, 2)
        .requires_grad_()
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    ]
    if shape.documents <= 1:
        return inputs, None
    ids = torch.arange(T) * shape.documents // shape.tokens
    mask = document_mask(ids.expand(B, T), 0.0)
    assert isinstance(mask, torch.Tensor)
    return inputs, mask
