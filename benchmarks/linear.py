"""That a step costs what it holds: python benchmarks/linear.py [--model NAME ...] [--rounds N] [--write].

The engine's own training step with 1, 2, 4, 8 micro-batches of four windows, and with one micro-batch of 1, 2, 4, 8 windows; all of them take turns in
one process, and every case meets the same windows over the rounds. To the medians of the times a line is fitted; how far they lie from it is what is
asked. What a step costs beside its micro-batches (b of the line) is mostly clipping and the optimizer, whose time is taken by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

COUNTS = (1, 2, 4, 8)
LINES = 4  # windows of a micro-batch where their number is not what varies
WORDS = ["stage=pretrain", "init_from=scratch", "device=cpu", "train.compile=off", "tracker.console=quiet", "data.val_path=null"]
CLOCKS = {"wall clock": time.perf_counter, "processor time": time.process_time}
GOAL = 0.02  # of the time, where the number of micro-batches varies


def run_of(model: str, folder: Path) -> Any:
    """A run that is ready for its first step."""
    from runner.config.compose import compose_config
    from runner.engine.build import build_run

    folder.mkdir()
    return build_run(compose_config([*WORDS, f"model={model}"]), folder, attempt=1, note=lambda **facts: None)


def batches_of(run: Any, counts: list[int], at: int) -> list[Any]:
    """Micro-batches of so many windows each, from window `at` on."""
    found, windows = [], run.feed.train
    for count in counts:
        found.append(run.loader.collate([windows[(at + i) % (LINES * max(COUNTS))] for i in range(count)]))
        at += count
    return found


def watched(run: Any) -> list[dict[str, float]]:
    """Where the seconds of each update (clipping and the optimizer) will stand."""
    update, taken = run.precision.step, list[dict[str, float]]()

    def timed(*inputs: Any) -> Any:
        began = {name: clock() for name, clock in CLOCKS.items()}
        done = update(*inputs)
        taken.append({name: clock() - began[name] for name, clock in CLOCKS.items()})
        return done

    run.precision.step = timed
    return taken


def measure(run: Any, shapes: dict[int, list[int]], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of a step of each shape, by each clock."""
    from runner.engine.loop import train_step

    found = {count: {name: list[float]() for name in CLOCKS} for count in shapes}
    for number in range(-2, rounds):  # the first two warm up
        for count, counts in shapes.items():
            batches = batches_of(run, counts, at=number * LINES)
            began = {name: clock() for name, clock in CLOCKS.items()}
            train_step(run, batches, 1e-4)
            if number >= 0:
                for name, clock in CLOCKS.items():
                    found[count][name].append(clock() - began[name])
    return found


def line_through(times: dict[int, float]) -> tuple[float, float, float]:
    """a and b of a * k + b with the least sum of squared relative errors, and the largest of these errors."""
    import numpy as np

    k, t = np.array(list(times)), np.array(list(times.values()))
    a, b = np.polyfit(k, t, 1, w=1 / t)
    return float(a), float(b), float(np.abs((a * k + b) / t - 1).max())


def rows(model: str, folder: Path, rounds: int) -> Iterator[str]:
    run = run_of(model, folder)
    updates = watched(run)
    cases = {
        "micro-batches of a step": {k: [LINES] * k for k in COUNTS},
        "windows of a micro-batch": {k: [k] for k in COUNTS},
    }
    for what, shapes in cases.items():
        updates.clear()
        found = measure(run, shapes, rounds)
        for clock in CLOCKS:
            times = {k: statistics.median(taken[clock]) for k, taken in found.items()}
            a, b, off = line_through(times)
            update = statistics.median(taken[clock] for taken in updates)
            told = " / ".join(f"{seconds * 1e3:.1f}" for seconds in times.values())
            yield f"| {model}, {what} | {clock} | {told} | {a * 1e3:.1f} | {b * 1e3:.1f} | {update * 1e3:.1f} | {off:.1%} |"


def table(models: list[str], rounds: int) -> str:
    import torch

    with tempfile.TemporaryDirectory() as temp:
        told = [row for model in models for row in rows(model, Path(temp, model), rounds)]
    about = f"Medians of {rounds} rounds in ms, fp32, windows of 256 from the shipped sample, {torch.get_num_threads()} threads."
    about += f" Goal: at most {GOAL:.0%} off the line a * k + b as the number of micro-batches varies."
    head = [
        about,
        "",
        f"| what | clock | k = {' / '.join(map(str, COUNTS))} | a | b | the update alone | off the line at most |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *told])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny"], help="presets of conf/model")
    parser.add_argument("--rounds", type=int, default=16, help="every case begins with each window equally often where it is a multiple of 8")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    asked = parser.parse_args()
    said = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    command = f"{said}python benchmarks/linear.py --model {' '.join(asked.model)} --rounds {asked.rounds} --write"
    tell("linear", "What a step costs by what it holds", command, table(asked.model, asked.rounds), asked.write)
