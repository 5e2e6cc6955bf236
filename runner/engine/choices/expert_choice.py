"""How the tokens of a mixture of experts get to their experts on the CPU: one by one, or all in one operator, which pays for many small experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from runner.engine.choices.measured_choice import MeasuredChoice, shortest_times

if TYPE_CHECKING:
    from models.families.decoder import DecoderConfig

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


def expert_choice(cfg: DecoderConfig, shape: ExpertShape, apply: Callable[[str], None]) -> MeasuredChoice | None:
    """Return the choice between EXPERT_DISPATCHES; None where measuring would take longer than it gains."""
    from models.layers.mlp import EXPERT_DISPATCHES

    default, *others = EXPERT_DISPATCHES
    if 18.0 * shape.tokens * shape.per_token * shape.hidden * shape.width > MAX_EXPERT_FLOPS:
        return None
    return MeasuredChoice(
        fact="expert_dispatch",
        default=default,
        others=tuple(others),
        workload=vars(shape),
        measure=partial(measure_experts, cfg, shape),
        apply=apply,
        unit="ms a layer",
    )


def measure_experts(cfg: DecoderConfig, shape: ExpertShape, dispatches: Sequence[str]) -> dict[str, float]:
    """Return dispatch -> the shortest time of a forward and a backward pass of one layer, seconds. torch's global random state is left as it is."""
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

    return shortest_times({dispatch: partial(compute, dispatch) for dispatch in dispatches}, EXPERT_TURNS, EXPERT_PASSES)
