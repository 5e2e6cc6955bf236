"""What it costs to resume far into a run: python benchmarks/position.py [--write].

A resumed run asks its loader for step 1,000,000 of an epoch of 10^8 rows; the same for step 1 beside it, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

ROWS, FAR, ROUNDS = 10**8, 1_000_000, 5
BATCH = 32


class Rows:
    """A file of 10^8 rows, but for the file: what is measured is finding the place, not reading."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int):
        import numpy as np

        from data.types import EncodedRow, TokenSequence

        ids = np.full(65, index % 6400, np.int32)
        return EncodedRow((TokenSequence(ids, np.ones(65, bool)),), f"row {index}")


def first_batch(step: int) -> dict[str, float]:
    """Seconds to the first batch from `step` on, and MiB this process takes with it."""
    from data.batching.batch import UnpackedWindows
    from data.batching.loader import StepLoader
    from data.batching.sampler import ShuffledSampler

    loader, first = (StepLoader(UnpackedWindows(Rows()), ShuffledSampler(ROWS, BATCH, seed), batch_size=BATCH, pad_id=0, packed=False) for seed in (42, 7))
    next(first.steps(0))  # imports and the first allocations
    before, began = resident(), time.perf_counter()
    batches = next(loader.steps(0, skip=step - 1))
    seconds, more = time.perf_counter() - began, resident() - before
    assert len(batches[0].names) == BATCH
    return {"seconds": seconds, "MiB": resident(), "MiB more": more}


def resident() -> float:
    """MiB of memory this process holds (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(step: int) -> dict[str, float]:
    told = subprocess.run(
        [sys.executable, __file__, "--step", str(step)], check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return json.loads(told.stdout)


def table() -> str:
    rounds = [(measure(1), measure(FAR)) for _ in range(ROUNDS)]  # interleaved: a busy machine disturbs both
    lines = [
        f"Median of {ROUNDS} rounds, {ROWS:,} rows, batches of {BATCH}.",
        "",
        "| step | to the first batch | resident memory | of it for the batch |",
        "|---|---|---|---|",
    ]
    for at, step in enumerate((1, FAR)):
        middle = {word: statistics.median(pair[at][word] for pair in rounds) for word in rounds[0][at]}
        lines.append(f"| {step:,} | {middle['seconds'] * 1e3:.2f} ms | {middle['MiB']:.1f} MiB | {middle['MiB more']:.2f} MiB |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.step:
        print(json.dumps(first_batch(words.step)))
    else:
        tell("position", "Resuming far into a run", "python benchmarks/position.py --write", table(), words.write)
