"""Attention of one layer on the CPU, forward and backward, by each kernel: python benchmarks/attention.py [--rounds 5]
[--write].

The fused C++ kernel, blocks of 32, 64 and 128 queries, and torch's scaled_dot_product_attention with the mask (with
`model.attention=flash`), in turns.
"""

from __future__ import annotations

import argparse
import statistics

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
    "blocks-32": "blocks of 32",
    "auto": "blocks of 64",
    "blocks-128": "blocks of 128",
    "flash": "torch SDPA",
}
HEAD = "| shape | type | " + " | ".join(KERNELS.values()) + " |\n" + "|---" * (2 + len(KERNELS)) + "|"


def table(rounds: int) -> str:
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
    from runner.engine.choices.layer_choices import AttentionShape, measure_attention
    from runner.engine.device.compile import set_inductor_cache

    kernels, message = list(KERNELS), ""
    try:
        load_kernels(set_inductor_cache())
    except KernelsUnavailableError as error:
        kernels.remove("fused")
        message = f"\n\nno fused kernel: {error}"
    lines = [HEAD]
    for name, sizes in SHAPES.items():
        for dtype in ("float32", "bfloat16"):
            times = [measure_attention(AttentionShape(*sizes, dtype=dtype), kernels) for _ in range(rounds)]
            medians = {kernel: statistics.median(each[kernel] for each in times) for kernel in times[0]}
            cells = [f"{medians[kernel] * 1000:.1f}" if kernel in medians else "-" for kernel in KERNELS]
            lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines) + message


def main(args: argparse.Namespace) -> None:
    from runner.engine.device.cpu.spinning import set_wait_policy

    set_wait_policy()  # as train.py does, before torch is imported
    command = f"python benchmarks/attention.py --rounds {args.rounds} --write"
    report_result("attention", "Attention of one layer on the CPU, ms", command, table(args.rounds), args.write)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="medians over this many (default: 5)")
    main(parser.parse_args())
