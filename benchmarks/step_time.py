"""Step time by the content of the step: python benchmarks/step_time.py [--model NAME ...] [--rounds N] [--write].

The engine's training step with 1, 2, 4, 8 micro-batches of four sequences, and with one micro-batch of 1, 2, 4, 8
sequences; all cases take turns in one process and use the same sequences over the rounds. A line a * k + b is fitted to
the medians; measured is the largest deviation from it. The constant b is mostly gradient clipping and the optimizer,
which are also timed alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.results import report_result, result_parser
from lib.runs import build_state

COUNTS = (1, 2, 4, 8)
BATCH_SIZE = 4  # sequences per micro-batch in the first case
OVERRIDES = [
    "stage=pretrain",
    "init_from=scratch",
    "device=cpu",
    "train.compile=off",
    "tracker.console=quiet",
    "data.val_path=null",
]
CLOCKS = {"wall clock": time.perf_counter, "processor time": time.process_time}
GOAL = 0.02  # largest relative deviation, by number of micro-batches


def micro_batches(state: Any, sizes: list[int], start: int) -> list[Any]:
    """Return micro-batches of these sizes, from sequence `start` on."""
    batches, sequences = [], state.pipeline.train
    for size in sizes:
        batches.append(state.loader.collate([sequences[(start + i) % (BATCH_SIZE * max(COUNTS))] for i in range(size)]))
        start += size
    return batches


def record_updates(state: Any) -> list[dict[str, float]]:
    """Return a list to which each step adds the seconds of its update: gradient clipping and the optimizer."""
    update, seconds = state.precision.clip_and_update, list[dict[str, float]]()

    def timed_update(*args: Any) -> Any:
        started = {name: clock() for name, clock in CLOCKS.items()}
        result = update(*args)
        seconds.append({name: clock() - started[name] for name, clock in CLOCKS.items()})
        return result

    state.precision.clip_and_update = timed_update
    return seconds


def measure(state: Any, cases: dict[int, list[int]], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return k -> clock -> seconds of each step."""
    from runner.engine.loop import train_step

    seconds = {k: {name: list[float]() for name in CLOCKS} for k in cases}
    for number in range(-2, rounds):  # two warmup rounds
        for k, sizes in cases.items():
            batches = micro_batches(state, sizes, start=number * BATCH_SIZE)
            started = {name: clock() for name, clock in CLOCKS.items()}
            train_step(state, batches, 1e-4)
            if number >= 0:
                for name, clock in CLOCKS.items():
                    seconds[k][name].append(clock() - started[name])
    return seconds


def fit_line(times: dict[int, float]) -> tuple[float, float, float]:
    """Return a and b of a * k + b with the smallest sum of squared relative errors, and the largest of these errors."""
    import numpy as np

    k, t = np.array(list(times)), np.array(list(times.values()))
    a, b = np.polyfit(k, t, 1, w=1 / t)
    return float(a), float(b), float(np.abs((a * k + b) / t - 1).max())


def table_rows(model: str, run_dir: Path, rounds: int) -> Iterator[str]:
    run_dir.mkdir()
    state = build_state([*OVERRIDES, f"model={model}"], run_dir)
    updates = record_updates(state)
    cases = {
        "micro-batches per step": {k: [BATCH_SIZE] * k for k in COUNTS},
        "sequences per micro-batch": {k: [k] for k in COUNTS},
    }
    for case, sizes in cases.items():
        updates.clear()
        seconds = measure(state, sizes, rounds)
        for clock in CLOCKS:
            times = {k: statistics.median(by_clock[clock]) for k, by_clock in seconds.items()}
            a, b, deviation = fit_line(times)
            update = statistics.median(each[clock] for each in updates)
            values = " / ".join(f"{seconds * 1e3:.1f}" for seconds in times.values())
            yield f"| {model}, {case} | {clock} | {values} | {a * 1e3:.1f} | {b * 1e3:.1f} | {update * 1e3:.1f} | {deviation:.1%} |"


def table(models: list[str], rounds: int) -> str:
    import torch

    with tempfile.TemporaryDirectory() as temp:
        rows = [row for model in models for row in table_rows(model, Path(temp, model), rounds)]
    lines = [
        f"Medians of {rounds} rounds in ms, fp32, packed sequences of 256 tokens from the shipped sample, {torch.get_num_threads()} threads. "
        f"Goal: at most {GOAL:.0%} deviation from the line a * k + b by number of micro-batches.",
        "",
        f"| case | clock | k = {' / '.join(map(str, COUNTS))} | a | b | update alone | largest deviation |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *rows])


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny"], help="names of conf/model")
    parser.add_argument(
        "--rounds",
        type=int,
        default=16,
        help="with a multiple of 8, every case begins with each sequence equally often",
    )
    args = parser.parse_args()
    environment = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    command = (
        f"{environment}python benchmarks/step_time.py --model {' '.join(args.model)} --rounds {args.rounds} --write"
    )
    report_result(
        "step_time", "Step time by the content of the step", command, table(args.model, args.rounds), args.write
    )
