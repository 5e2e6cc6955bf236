"""Cost of resuming far into an epoch: python benchmarks/position.py [--write].

Time and memory until the first batch from step 1 and from step 1,000,000 of an epoch of 10^8 rows, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from lib.results import report_result, result_parser
from lib.runs import resident_mib, run_self

ROWS, FAR_STEP, ROUNDS = 10**8, 1_000_000, 5
BATCH_SIZE = 32


class SyntheticRows:
    """10^8 rows without a file: finding the position is measured, not reading."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int):
        import numpy as np

        from data.types import EncodedRow, TokenSequence

        ids = np.full(65, index % 6400, np.int32)
        return EncodedRow((TokenSequence(ids, np.ones(65, bool)),), f"row {index}")


def first_batch(step: int) -> dict[str, float]:
    """Return the seconds to the first batch from `step` on, the memory of this process, and its increase."""
    from data.batching.loader import StepLoader
    from data.batching.packing import UnpackedSequences
    from data.batching.sampler import ShuffledSampler

    sequences = UnpackedSequences(SyntheticRows())
    loader, warmup = (
        StepLoader(sequences, ShuffledSampler(ROWS, BATCH_SIZE, seed), batch_size=BATCH_SIZE, pad_id=0)
        for seed in (42, 7)
    )
    next(warmup.iter_epoch(0))  # imports and first allocations
    before, started = resident_mib(), time.perf_counter()
    batches = next(loader.iter_epoch(0, skip=step - 1))
    seconds, increase = time.perf_counter() - started, resident_mib() - before
    assert len(batches[0].names) == BATCH_SIZE
    return {"seconds": seconds, "mib": resident_mib(), "mib_increase": increase}


def measure(step: int) -> dict[str, float]:
    return json.loads(run_self(__file__, "--step", str(step)))


def table() -> str:
    rounds = [(measure(1), measure(FAR_STEP)) for _ in range(ROUNDS)]  # interleaved: other load affects both
    lines = [
        f"Median of {ROUNDS} rounds, {ROWS:,} rows, batches of {BATCH_SIZE}.",
        "",
        "| step | time to the first batch | resident memory | increase for the batch |",
        "|---|---|---|---|",
    ]
    for index, step in enumerate((1, FAR_STEP)):
        median = {key: statistics.median(pair[index][key] for pair in rounds) for key in rounds[0][index]}
        lines.append(
            f"| {step:,} | {median['seconds'] * 1e3:.2f} ms | {median['mib']:.1f} MiB | {median['mib_increase']:.2f} MiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(first_batch(args.step)))
    else:
        report_result(
            "position", "Resuming far into an epoch", "python benchmarks/position.py --write", table(), args.write
        )
