"""Whether linear layers with the same input are one matrix product or several: one reads the input once, and needs a copy of the weights side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from runner.engine.choices.measured_choice import MeasuredChoice, shortest_times

if TYPE_CHECKING:
    from models.families.decoder import DecoderConfig

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


def projection_choice(cfg: DecoderConfig, shape: ProjectionShape, apply: Callable[[str], None]) -> MeasuredChoice:
    return MeasuredChoice(
        fact="projections",
        default=JOINED,
        others=(SEPARATE,),
        workload=asdict(shape),
        measure=partial(measure_projections, cfg, shape),
        apply=apply,
        unit="ms a network",
    )


def measure_projections(cfg: DecoderConfig, shape: ProjectionShape, names: Sequence[str]) -> dict[str, float]:
    """Return name -> the shortest time of a forward and a backward pass of one network, seconds. torch's global random state is left as it is."""
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
