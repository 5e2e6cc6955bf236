"""Attention of one layer on the CPU, forward and backward, by each kernel: python benchmarks/attention.py [--rounds 5]
[--write].

The fused C++ kernel, blocks of queries, and torch's scaled_dot_product_attention with the mask (with
`model.attention=flash`), in turns.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from lib.interleave import shortest_times
from lib.results import report_result, result_parser

SHAPES = {  # rows, tokens, documents per row, query heads, key/value heads, head width
    "minimind_26m, documents of 150": (4, 512, 3, 8, 2, 64),
    "minimind_26m, one document": (4, 512, 1, 8, 2, 64),
    "SmolLM2-135M, documents of 150": (4, 512, 3, 9, 3, 64),
    "as many key heads, documents of 150": (4, 512, 3, 12, 12, 64),
    "rows of 2,048, one document": (1, 2048, 1, 8, 2, 64),
}
KERNELS = {
    "fused": "fused",
    "auto": "blocks of queries",
    "flash": "torch SDPA",
}
HEAD = "| shape | type | " + " | ".join(KERNELS.values()) + " |\n" + "|---" * (2 + len(KERNELS)) + "|"


def table(rounds: int) -> str:
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
    from models.layers.cpu_kernels.upcast_products import upcast_products
    from runner.engine.device.compile import set_inductor_cache
    from runner.engine.kernel_choice import are_16_bits_fast

    if not are_16_bits_fast(torch.bfloat16):  # as a run does
        upcast_products(True)
    kernels, message = ["auto", "fused", "flash"], ""  # the first one has to be on every processor
    try:
        load_kernels(set_inductor_cache())
    except KernelsUnavailableError as error:
        kernels.remove("fused")
        message = f"\n\nno fused kernel: {error}"
    lines = [HEAD]
    for name, sizes in SHAPES.items():
        for dtype in ("float32", "bfloat16"):
            times = [measure_attention(*sizes, dtype, kernels) for _ in range(rounds)]
            found = [kernel for kernel in kernels if all(kernel in each for each in times)]
            medians = {kernel: statistics.median(each[kernel] for each in times) for kernel in found}
            cells = [f"{medians[kernel] * 1000:.1f}" if kernel in medians else "-" for kernel in KERNELS]
            lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines) + message


def measure_attention(
    rows: int, tokens: int, documents: int, heads: int, key_heads: int, width: int, dtype: str, kernels: list[str]
) -> dict[str, float]:
    """Return kernel -> the shortest time of a forward and a backward pass, seconds."""
    import torch

    from models.layers.attention import attention, document_mask

    q, k, v = (
        torch.randn(rows, tokens, count, width, dtype=getattr(torch, dtype)).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )
    ids = torch.arange(tokens) * documents // tokens
    mask = document_mask(ids.expand(rows, tokens), 0.0) if documents > 1 else None

    def compute(kernel: str) -> None:
        out = attention(q, k, v, mask, 0.0, kernel)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return shortest_times({kernel: partial(compute, kernel) for kernel in kernels}, turns=4, passes=2)


def main(args: argparse.Namespace) -> None:
    from runner.engine.device.spinning import set_wait_policy

    set_wait_policy()  # as train.py does, before torch is imported
    command = f"python benchmarks/attention.py --rounds {args.rounds} --write"
    report_result("attention", "Attention of one layer on the CPU, ms", command, table(args.rounds), args.write)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="medians over this many (default: 5)")
    main(parser.parse_args())
