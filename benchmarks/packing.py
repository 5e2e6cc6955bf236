"""What packing saves: python benchmarks/packing.py --path FILE [--stage pretrain] [--write].

The engine's own training step on rows padded to data.max_length (as most scripts do it), padded to the longest of the batch,
grouped by length, and packed; the same model, precision and lines a batch, interleaved. Useful tokens are those that are no padding.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

WAYS = {
    "padded to max_length": ["data.packing=none"],
    "padded to the longest": ["data.packing=none"],
    "grouped by length": ["data.packing=none", "data.group_by_length=true"],
    "packed": ["data.packing=pack"],
}


def run_of(way: str, words: list[str], folder: Path):
    """A run that is ready for its first step."""
    from data.batching.batch import Batch
    from runner.config.compose import compose_config
    from runner.engine.build import build_run

    cut = ["data.too_long=truncate"] if way == "padded to max_length" else []
    run = build_run(compose_config([*words, *WAYS[way], *cut]), folder, attempt=1, note=lambda **facts: None)
    if way == "padded to max_length":
        collate, pad_id = run.loader.collate, run.tokenizer.pad_id

        def filled_up(windows) -> Batch:
            from torch.nn.functional import pad

            batch = collate(windows)
            more = (0, run.cfg.data.max_length - batch.input_ids.shape[1])
            return Batch(pad(batch.input_ids, more, value=pad_id), pad(batch.labels, more, value=-100), batch.lengths, batch.names)

        run.loader.collate = filled_up
    return run


def stepper(way: str, words: list[str], folder: Path) -> Callable[[], tuple[float, int, int]]:
    """Call for one step: (seconds, positions that are no padding, computed positions)."""
    from runner.engine.loop import train_step

    run = run_of(way, words, folder)
    steps = run.loader.steps(0)

    def step() -> tuple[float, int, int]:
        began = time.perf_counter()
        batches = next(steps)
        result = train_step(run, batches, lr=1e-4)
        return time.perf_counter() - began, result.positions, sum(batch.input_ids.numel() for batch in batches)

    return step


def fill(way: str, words: list[str], folder: Path) -> tuple[float, int]:
    """(share of computed positions that are no padding, how many they are) over a whole epoch."""
    batches = [batch for step in run_of(way, words, folder).loader.steps(0) for batch in step]
    useful = sum(int(batch.lengths.sum()) for batch in batches)
    return useful / sum(batch.input_ids.numel() for batch in batches), useful


def table(words: list[str], rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        steppers = {way: stepper(way, words, Path(folder)) for way in WAYS}
        times: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):  # interleaved: a busy machine disturbs all; the first round warms up
            for way, step in steppers.items():
                found = step()
                if number:
                    times[way].append(found)
        fills = {way: fill(way, words, Path(folder)) for way in WAYS}
    lines = [
        "| rows are | share of tokens that are no padding | tokens of an epoch | tokens/s, padding included | useful tokens/s | against padded |",
        "|---|---|---|---|---|---|",
    ]
    # The median over the rounds, of each step's own speed: one that was disturbed does not count more than another.
    raw = {way: statistics.median(computed / seconds for seconds, _, computed in steps) for way, steps in times.items()}
    rate = {way: raw[way] * fills[way][0] for way in WAYS}
    for way in WAYS:
        share, useful = fills[way]
        lines.append(f"| {way} | {share:.1%} | {useful:,} | {raw[way]:,.0f} | {rate[way]:,.0f} | {rate[way] / rate['padded to max_length']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True)
    parser.add_argument("--stage", default="pretrain")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("words", nargs="*", help="words of train.py on top, e.g. precision=bf16")
    asked = parser.parse_args()
    base = [
        f"stage={asked.stage}",
        "init_from=scratch",
        "data=own",
        f"data.path={asked.path}",
        "data.val_path=null",
        "data.val_fraction=0",
        "data.num_workers=0",
    ]
    base += ["model=minimind_26m", "optimizer=adamw", "data.max_length=512", "train.batch_size=4", "tracker.console=quiet", *asked.words]
    about = f"`python benchmarks/packing.py --path {Path(asked.path).name} --stage {asked.stage} {' '.join(asked.words)}`".replace(" `", "`")
    text = f"{about}: 4 lines of 512 a step, {asked.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n{table(base, asked.rounds)}\n"
    print(text)
    if asked.write:
        where = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-packing.md"
        where.parent.mkdir(exist_ok=True)
        with open(where, "a", encoding="utf-8") as file:
            file.write(text + "\n")
