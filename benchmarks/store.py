"""Start time by size of the token store: python benchmarks/store.py [--folder DIR] [--write].

The first batch of a run on a prepared store of 2 MB and of 2 GB of tokens: open the stores, mix, split validation rows,
open the packing plan, read. Each is measured in a process of its own, interleaved; the batch of step 1,000,000 beside
that of step 10. The stores hold random tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lib.results import report_result, result_parser
from lib.runs import resident_mib, run_self
from lib.token_store import store_config, write_random_store

SIZES = {"2 MB": 2 << 20, "2 GB": 2 << 30}
ROUNDS = 7
NEAR_STEP, FAR_STEP = 10, 1_000_000


def first_batch(folder: Path, step: int) -> dict[str, float]:
    """Return the seconds from the config to the batch of `step`, and the memory of this process then."""
    from data.tokenize.origin import open_tokenizer
    from runner.engine.data_pipeline import build_data_pipeline, build_loader

    for module in ("loader", "mixture", "packing"):  # torch and others: every start imports them
        importlib.import_module(f"data.batching.{module}")
    cfg = store_config(folder)
    tokenizer = open_tokenizer(cfg.data, "scratch")
    started = time.perf_counter()
    pipeline = build_data_pipeline(cfg, tokenizer)
    opened = time.perf_counter()
    loader = build_loader(pipeline.train, cfg, tokenizer, 1)
    next(loader.iter_epoch(0, skip=step - 1))
    return {
        "open": opened - started,
        "batch": time.perf_counter() - opened,
        "mib": resident_mib(),
        "steps": loader.steps_per_epoch,
    }


def measure(folder: Path, step: int) -> dict[str, float]:
    return json.loads(run_self(__file__, "--folder", str(folder), "--step", str(step)))


def table(parent: Path) -> str:
    folders = {name: parent / name.replace(" ", "") for name in SIZES}
    rows = {name: write_random_store(folders[name], size) for name, size in SIZES.items()}
    first = {name: measure(folder, 1) for name, folder in folders.items()}  # writes the packing plan
    cases = {
        "2 MB, step 10": ("2 MB", NEAR_STEP),
        "2 GB, step 10": ("2 GB", NEAR_STEP),
        "2 GB, step 1,000,000": ("2 GB", FAR_STEP),
    }
    rounds = [{case: measure(folders[name], step) for case, (name, step) in cases.items()} for _ in range(ROUNDS)]
    lines = [
        f"Median of {ROUNDS} rounds, packed sequences of 512 tokens, micro-batches of 1.",
        "",
        "| store, step | rows | packed sequences | open | first batch | resident memory |",
        "|---|---|---|---|---|---|",
    ]
    for case, (name, _) in cases.items():
        median = {key: statistics.median(results[case][key] for results in rounds) for key in rounds[0][case]}
        steps = f"{int(median['steps']):,}"
        lines.append(
            f"| {case} | {rows[name]:,} | {steps} | {median['open'] * 1e3:.1f} ms | {median['batch'] * 1e3:.1f} ms | {median['mib']:.1f} MiB |"
        )
    plans = " and ".join(f"{first[name]['open']:.1f} s ({name}, {first[name]['mib']:.0f} MiB)" for name in SIZES)
    return "\n".join([*lines, "", f"The first start writes the packing plan: opened in {plans}."])


if __name__ == "__main__":
    parser = result_parser(__doc__, needs_disk="the stores, 3 GB")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(first_batch(args.folder, args.step)))
        sys.exit()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as temp:
        result = table(Path(temp))
    report_result("store", "Start on a prepared store", "python benchmarks/store.py --write", result, args.write)
