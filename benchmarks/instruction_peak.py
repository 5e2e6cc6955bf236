"""Operations per second of the instructions for products on this CPU, and of products: python
benchmarks/instruction_peak.py [--rounds 5] [--write].

One thread a core repeats one instruction on registers: a bound for every product that is made of it. Those of AVX2 or
AVX-512 (vfmadd231ps) and of AVX-512 BF16 (vdpbf16ps) are measured, not those of AMX. The products are those of a linear
layer, forward and backward: torch's own, in bf16 with operands that are cast to fp32, and by the C++ kernel
(`upcast_products.py`, `product.cpp`).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lib.interleave import shortest_times
from lib.results import report_result, result_parser

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "lib" / "instruction_peak.cpp"
INSTRUCTIONS = {
    "multiply-add in fp32": "lm_runner_multiply_add_fp32",
    "sum of two products in bf16 (vdpbf16ps)": "lm_runner_multiply_add_bf16",
}
REPETITIONS = 80_000_000  # of the loop over one instruction: tenths of a second
LAYER = {"tokens": 2048, "outputs": 2048, "inputs": 512}
HEAD = "| | GFLOP/s | relative to the instruction in fp32 |\n|---|---|---|"


def instruction_rate(function: Callable[..., int], threads: int, repetitions: int) -> float:
    """Return operations per second of all threads together; 0 if the processor lacks the instruction."""
    operations: list[int] = []

    def work() -> None:
        operations.append(function(ctypes.c_int64(repetitions), ctypes.byref(ctypes.c_float())))

    # a call of ctypes does not hold the lock of the interpreter
    workers = [threading.Thread(target=work) for _ in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(operations) * repetitions / (time.perf_counter() - started)


def product_rates(layer: dict[str, int]) -> dict[str, float]:
    """Return name -> operations per second of the products of a linear layer, forward and backward."""
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError
    from models.layers.cpu_kernels.upcast_products import multiply, multiply_by_kernel
    from runner.engine.kernel_choice import KERNEL, UPCAST, load_products

    n, outputs, inputs = layer.values()
    plain = [torch.ones(*sizes) for sizes in ((n, inputs), (n, outputs), (outputs, inputs))]
    halves = [matrix.bfloat16() for matrix in plain]
    runs = {"float32": partial(multiply_by_torch, *plain), "bfloat16, in bfloat16": partial(multiply_by_torch, *halves)}
    others = {UPCAST: ("in float32 and rounded", multiply), KERNEL: ("by the C++ kernel", multiply_by_kernel)}
    for kernel, (name, function) in others.items():
        with suppress(KernelsUnavailableError):
            load_products(kernel)
            runs[f"bfloat16, {name}"] = partial(multiply_by, function, *halves)
    flops, seconds = 6.0 * math.prod(layer.values()), shortest_times(runs, turns=3, passes=1)
    return {f"products of a linear layer, {name}": flops / value for name, value in seconds.items()}


def multiply_by_torch(x: Tensor, g: Tensor, weight: Tensor) -> None:
    """Compute the products of a linear layer, forward and backward: inputs, gradients of the outputs, weights."""
    x @ weight.t()
    g @ weight
    (g.t() @ x).float()


def multiply_by(function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, g: Tensor, weight: Tensor) -> None:
    function(x, weight.t(), g.new_empty(g.shape))
    function(g, weight, x.new_empty(x.shape))
    function(g.t(), x, weight.new_empty(weight.shape).float())


def table(rounds: int, repetitions: int, layer: dict[str, int]) -> str:
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_library

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = load_library("instruction_peak", [SOURCE], Path(folder))
        except KernelsUnavailableError as error:
            raise SystemExit(f"no C++ compiler: {error}") from error
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):  # in turns: the clock of a shared machine changes
        for name, symbol in INSTRUCTIONS.items():
            function = getattr(library, symbol)
            function.restype = ctypes.c_int64
            rates.setdefault(name, []).append(instruction_rate(function, threads, repetitions) / 1e9)
        for name, rate in product_rates(layer).items():
            rates.setdefault(name, []).append(rate / 1e9)
    sizes = ", ".join(f"{value} {name}" for name, value in layer.items())
    lines = [
        f"Medians of {rounds} rounds (smallest to largest), {threads} threads; the ratio is that of each round. The layer has {sizes}.\n",
        HEAD,
    ]
    return "\n".join([*lines, *(table_row(name, values, next(iter(rates.values()))) for name, values in rates.items())])


def table_row(name: str, rates: Sequence[float], peaks: Sequence[float]) -> str:
    """`peaks`: of multiply-add in fp32 in the same rounds; 0 on a processor without the instruction."""
    if not all(rates):
        return f"| {name} | not on this processor | |"
    ratio = (
        f"{statistics.median(rate / peak for rate, peak in zip(rates, peaks, strict=True)):.2f}" if all(peaks) else ""
    )
    return f"| {name} | {statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}) | {ratio} |"


def main(args: argparse.Namespace) -> None:
    from runner.engine.device.spinning import set_wait_policy

    set_wait_policy()  # as train.py does, before torch is imported
    command = f"python benchmarks/instruction_peak.py --rounds {args.rounds} --write"
    report_result(
        "instruction_peak",
        "Peak of the instructions for products",
        command,
        table(args.rounds, REPETITIONS, LAYER),
        args.write,
    )


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="medians over this many (default: 5)")
    main(parser.parse_args())
