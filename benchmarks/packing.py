"""Speed of packed against padded rows: python benchmarks/packing.py [--path FILE] [--stage pretrain] [--rounds N]
[--write] [OVERRIDE ...].

The engine's training step on rows padded to data.max_length (as most scripts do), padded to the longest row of the
batch, grouped by length, and packed; same model, precision and batch size, interleaved. Useful tokens are those without
padding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.results import report_result, result_parser
from lib.runs import SAMPLES, build_state

PADDED = "padded to max_length"
CASES = {  # name -> overrides
    PADDED: ["data.packing=none", "data.too_long=truncate"],
    "padded to the longest": ["data.packing=none"],
    "grouped by length": ["data.packing=none", "data.group_by_length=true"],
    "packed": ["data.packing=best_fit"],
}


def state_of(case: str, overrides: list[str], run_dir: Path) -> Any:
    from torch.nn.functional import pad

    from data.batching.batch import Batch

    state = build_state([*overrides, *CASES[case]], run_dir)
    if case == PADDED:
        collate, pad_id = state.loader.collate, state.tokenizer.pad_id

        def padded(sequences: list) -> Batch:
            batch = collate(sequences)
            missing = (0, state.cfg.data.max_length - batch.input_ids.shape[1])
            return Batch(
                pad(batch.input_ids, missing, value=pad_id),
                pad(batch.labels, missing, value=-100),
                batch.lengths,
                batch.names,
            )

        state.loader.collate = padded
    return state


def make_step(case: str, overrides: list[str], run_dir: Path) -> Callable[[], float]:
    """Return a function that does one training step and returns its computed tokens per second, padding included."""
    from runner.engine.loop import train_step

    state = state_of(case, overrides, run_dir)
    steps = state.loader.iter_epoch(0)

    def step() -> float:
        started = time.perf_counter()
        batches = next(steps)
        train_step(state, batches, lr=1e-4)
        return sum(batch.input_ids.numel() for batch in batches) / (time.perf_counter() - started)

    return step


def useful_tokens(case: str, overrides: list[str], run_dir: Path) -> tuple[float, int]:
    """Return the share of tokens without padding, and their number, in one epoch."""
    batches = [batch for step in state_of(case, overrides, run_dir).loader.iter_epoch(0) for batch in step]
    useful = sum(int(batch.lengths.sum()) for batch in batches)
    return useful / sum(batch.input_ids.numel() for batch in batches), useful


def table(overrides: list[str], rounds: int) -> str:
    with tempfile.TemporaryDirectory() as temp:
        steps = {case: make_step(case, overrides, Path(temp)) for case in CASES}
        speeds: dict[str, list[float]] = {case: [] for case in CASES}
        for number in range(rounds + 1):  # interleaved: other load affects all cases; the first round is the warmup
            for case, step in steps.items():
                speed = step()
                if number:
                    speeds[case].append(speed)
        useful = {case: useful_tokens(case, overrides, Path(temp)) for case in CASES}
    lines = [
        "| rows are | share of tokens without padding | tokens per epoch | tokens/s, padding included | useful tokens/s | relative to padded |",
        "|---|---|---|---|---|---|",
    ]
    raw = {case: statistics.median(values) for case, values in speeds.items()}
    for case, (share, count) in useful.items():
        ratio = raw[case] * share / (raw[PADDED] * useful[PADDED][0])
        lines.append(
            f"| {case} | {share:.1%} | {count:,} | {raw[case]:,.0f} | {raw[case] * share:,.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--path", default=str(SAMPLES / "pretrain.jsonl"))
    parser.add_argument("--stage", default="pretrain")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py, e.g. precision=bf16")
    args = parser.parse_args()
    path = Path(args.path)
    overrides = [
        f"stage={args.stage}",
        "init_from=scratch",
        "data=own",
        f"data.path={path.resolve()}",
        "data.val_path=null",
        "data.val_fraction=0",
    ]
    overrides += [
        "model=minimind_26m",
        "optimizer=adamw",
        "data.max_length=512",
        "data.num_workers=0",
        "train.batch_size=4",
        "tracker.console=quiet",
    ]
    command = " ".join(
        [
            f"python benchmarks/packing.py --path {path.name} --stage {args.stage} --rounds {args.rounds}",
            *args.overrides,
            "--write",
        ]
    )
    result = (
        f"Batches of 4 rows of 512 tokens, {args.rounds} rounds.\n\n{table([*overrides, *args.overrides], args.rounds)}"
    )
    report_result(
        f"packing-{path.stem.removesuffix('_demo')}",
        f"Packed and padded rows, {args.stage}",
        command,
        result,
        args.write,
    )
