"""Gradient of a weight in bf16 on the CPU, by the C++ kernel and by oneDNN: python benchmarks/weight_gradient.py
[--rounds 20] [--write].

Both compute G^T X in fp32 from the gradient of the output G and the input X of a layer in bf16, in turns: the kernel
adds in fp32; oneDNN rounds its product to bf16, which is copied to fp32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from lib.results import report_result, result_parser

SHAPES = {  # tokens, outputs, inputs
    "minimind_26m, gate and up": (2048, 2816, 512),
    "minimind_26m, down": (2048, 512, 1408),
    "minimind_26m, q, k and v": (2048, 768, 512),
    "minimind_26m, output of attention": (2048, 512, 512),
    "SmolLM2-135M, gate and up": (2048, 3072, 576),
}
HEAD = "| layer | G^T X | kernel, ms | oneDNN with the copy, ms | oneDNN / kernel | largest error of the kernel | of oneDNN |\n|---|---|---|---|---|---|---|"


def table_row(name: str, tokens: int, outputs: int, inputs: int, rounds: int) -> str:
    import torch

    from models.layers.projections import weight_gradients

    torch.manual_seed(0)
    g, x = torch.randn(tokens, outputs).bfloat16(), torch.randn(tokens, inputs).bfloat16()
    works: dict[str, Callable[[], torch.Tensor]] = {
        "kernel": lambda: weight_gradients(g, x, [outputs])[0],
        "oneDNN": lambda: (g.mT @ x).to(torch.float32),
    }
    seconds: dict[str, list[float]] = {work: [] for work in works}
    for number in range(-2, rounds):  # two warmup rounds
        for work, compute in works.items():
            started = time.perf_counter()
            compute()
            if number >= 0:
                seconds[work].append(time.perf_counter() - started)
    exact = g.double().mT @ x.double()
    errors = [float((compute() - exact).abs().max() / exact.abs().max()) for compute in works.values()]
    ratios = [other / own for own, other in zip(seconds["kernel"], seconds["oneDNN"], strict=True)]
    times = " | ".join(
        f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f})" for values in seconds.values()
    )
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | [{tokens}, {outputs}]^T x [{tokens}, {inputs}] | {times} | {spread} | {errors[0]:.1e} | {errors[1]:.1e} |"


def table(rounds: int) -> str:
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
    from runner.engine.device.compile import set_inductor_cache

    try:
        load_kernels(set_inductor_cache())
    except KernelsUnavailableError as error:
        raise SystemExit(f"no C++ kernels: {error}") from error
    rows = [table_row(name, *shape, rounds) for name, shape in SHAPES.items()]
    head = f"Medians of {rounds} rounds (smallest), {torch.get_num_threads()} threads; ratios of each round, median (smallest to largest); errors relative to fp64."
    return "\n".join([head, "", HEAD, *rows])


def main(args: argparse.Namespace) -> None:
    from runner.engine.device.spinning import adapt_spinning, set_wait_policy

    set_wait_policy()  # as train.py does, before torch is imported
    with adapt_spinning():
        text = table(args.rounds)
    command = f"python benchmarks/weight_gradient.py --rounds {args.rounds} --write"
    report_result("weight_gradient", "Gradient of a weight in bf16 on the CPU", command, text, args.write)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="medians over this many (default: 20)")
    main(parser.parse_args())
