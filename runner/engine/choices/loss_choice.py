"""How many tokens of the loss are computed at once on the CPU: few keep the logits in the caches, many add fewer times to the gradient of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from runner.engine.choices.measured_choice import MeasuredChoice, shortest_times

if TYPE_CHECKING:
    from models.layers.chunked_loss import LMHead

DEFAULT_CHUNK = "auto"  # `models.layers.chunked_loss.default_chunk_tokens`
CHUNK_TOKENS = (256, 512, 1_024, 2_048)
MAX_CHUNK_LOGITS = 1 << 23  # of a chunk: memory for speed, at most twice that of the default
LOSS_TURNS, LOSS_PASSES = 5, 1
LOSS_TOKEN_LIMIT = 2_048  # measured at a time
MAX_MEASURED_FLOPS = 2e11  # of a pass: a larger vocabulary would take longer to measure than it gains


@dataclass(frozen=True)
class LossShape:
    """The loss of one micro-batch."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str  # of torch: that of the products
    trains_head: bool  # the weight of the output layer gets a gradient


def loss_choice(shape: LossShape, heads: Sequence[LMHead]) -> MeasuredChoice | None:
    """Return the choice between CHUNK_TOKENS for the output layers `heads`; None where there is none."""
    from models.layers.chunked_loss import default_chunk_tokens

    default = default_chunk_tokens(shape.vocab, "cpu")
    others = [tokens for tokens in CHUNK_TOKENS if tokens != default and tokens * shape.vocab <= MAX_CHUNK_LOGITS and min(tokens, default) < shape.tokens]
    products = 2 + shape.trains_head
    flops = 2 * products * min(shape.tokens, LOSS_TOKEN_LIMIT) * shape.hidden * shape.vocab
    if not others or flops > MAX_MEASURED_FLOPS:
        return None

    def apply(kernel: str) -> None:
        for head in heads:
            head.chunk_tokens = 0 if kernel == DEFAULT_CHUNK else int(kernel)

    return MeasuredChoice(
        fact="loss_chunk_tokens",
        default=DEFAULT_CHUNK,
        others=tuple(map(str, others)),
        workload=asdict(shape),
        measure=partial(measure_loss, shape),
        apply=apply,
        unit="ms a micro-batch",
        labels={DEFAULT_CHUNK: str(default)},
    )


def measure_loss(shape: LossShape, kernels: Sequence[str]) -> dict[str, float]:
    """Return kernel -> the shortest time of the loss with its gradients, seconds. torch's global generator is not used."""
    import torch

    from models.layers.chunked_loss import linear_cross_entropy

    generator = torch.Generator().manual_seed(0)
    n = min(shape.tokens, LOSS_TOKEN_LIMIT)
    x = torch.randn(1, n, shape.hidden, generator=generator).to(getattr(torch, shape.dtype)).requires_grad_()
    weight = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(shape.hidden**-0.5).requires_grad_(shape.trains_head)
    labels = torch.randint(shape.vocab, (1, n), generator=generator)

    def compute(kernel: str) -> None:
        loss = linear_cross_entropy(x, weight, labels, "sum", 0 if kernel == DEFAULT_CHUNK else int(kernel))
        torch.autograd.grad(loss, (x, weight) if shape.trains_head else (x,))

    return shortest_times({kernel: partial(compute, kernel) for kernel in kernels}, LOSS_TURNS, LOSS_PASSES)
