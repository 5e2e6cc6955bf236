"""Kernels of single layers on the CPU: attention, experts and projections.

Experts get their tokens one by one, or all in one operator, which pays for many small experts. Linear layers with the
same input are one matrix product or several: one reads the input once, and needs a copy of the weights side by side.
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

    from models.families.decoder import DecoderConfig

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


EXPERT_TURNS, EXPERT_PASSES = 5, 1
MAX_EXPERT_FLOPS = 2e11  # of a pass: more tokens for an expert gain less


@dataclass(frozen=True)
class ExpertShape:
    """A layer of experts in one micro-batch."""

    tokens: int
    hidden: int
    width: int
    experts: int
    per_token: int
    dtype: str  # of torch: that of the products
    kernel: str  # one of `models.layers.attention.CPU_KERNELS`: the fused one has kernels for experts, too
    is_trained: bool = True  # the weights of the experts get gradients
    joins_projections: bool = True  # one product for gate and up of an expert, where experts are called one by one


def expert_choice(cfg: DecoderConfig, shape: ExpertShape, apply: Callable[[str], None]) -> KernelChoice | None:
    """Return the choice between EXPERT_DISPATCHES; None where measuring would take longer than it gains."""
    from models.layers.mlp import EXPERT_DISPATCHES

    default, *others = EXPERT_DISPATCHES
    if 18.0 * shape.tokens * shape.per_token * shape.hidden * shape.width > MAX_EXPERT_FLOPS:
        return None
    return KernelChoice(
        fact="expert_dispatch",
        default=default,
        others=tuple(others),
        workload=vars(shape),
        measure=partial(measure_experts, cfg, shape),
        apply=apply,
        unit="ms a layer",
    )


def measure_experts(cfg: DecoderConfig, shape: ExpertShape, dispatches: Sequence[str]) -> dict[str, float]:
    """Return dispatch -> the shortest time of a forward and a backward pass of one layer, seconds. torch's global
    random state is left as it is.
    """
    import torch

    from models.layers.mlp import MoE

    dtype = getattr(torch, shape.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = MoE(cfg).requires_grad_(shape.is_trained)
        x = torch.randn(1, shape.tokens, shape.hidden).to(dtype).requires_grad_()
    layer.attention_kernel = shape.kernel
    for expert in layer.experts:
        vars(expert).update(attention_kernel=shape.kernel, joins_projections=shape.joins_projections)
    inputs = [x, *(p for p in layer.parameters() if shape.is_trained)]

    def compute(dispatch: str) -> None:
        layer.dispatch = dispatch
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y, _ = layer(x, None)
        torch.autograd.grad(y.float().square().sum(), inputs)

    return shortest_times(
        {dispatch: partial(compute, dispatch) for dispatch in dispatches}, EXPERT_TURNS, EXPERT_PASSES
    )


JOINED, SEPARATE = "joined", "separate"
PROJECTION_TURNS, PROJECTION_PASSES = 4, 2


@dataclass(frozen=True)
class ProjectionShape:
    """The SwiGLU network of a layer in one micro-batch."""

    tokens: int  # of a network: of an expert its share
    hidden: int
    width: int
    dtype: str  # of torch: that of the products
    kernel: str  # one of `models.layers.attention.CPU_KERNELS`: the fused one has kernels for these networks, too
    has_bias: bool
    is_trained: bool  # the weights get gradients


def projection_choice(cfg: DecoderConfig, shape: ProjectionShape, apply: Callable[[str], None]) -> KernelChoice:
    return KernelChoice(
        fact="projections",
        default=JOINED,
        others=(SEPARATE,),
        workload=asdict(shape),
        measure=partial(measure_projections, cfg, shape),
        apply=apply,
        unit="ms a network",
    )


def measure_projections(cfg: DecoderConfig, shape: ProjectionShape, names: Sequence[str]) -> dict[str, float]:
    """Return name -> the shortest time of a forward and a backward pass of one network, seconds. torch's global random
    state is left as it is.
    """
    import torch

    from models.layers.mlp import MLP

    dtype = getattr(torch, shape.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MLP(cfg, shape.width).requires_grad_(shape.is_trained)
        x = torch.randn(1, shape.tokens, shape.hidden).to(dtype).requires_grad_()
    network.attention_kernel = shape.kernel
    inputs = [x, *(p for p in network.parameters() if shape.is_trained)]

    def compute(name: str) -> None:
        network.joins_projections = name == JOINED
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = network(x)
        torch.autograd.grad(y.float().square().sum(), inputs)

    return shortest_times({name: partial(compute, name) for name in names}, PROJECTION_TURNS, PROJECTION_PASSES)
