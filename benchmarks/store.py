"""What the size of a store costs a start: python benchmarks/store.py [--folder DIR] [--write].

A run asks for its first batch from a prepared store of 2 MB and of 2 GB of tokens: open the stores, mix, hold rows out, open the packing
plan, read. Each in a process of its own, interleaved; then the batch of step 1,000,000 beside that of step 10. The store of 2 GB is
written as a build writes it, with made-up tokens: what is measured does not look at them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SIZES = {"2 MB": 2 << 20, "2 GB": 2 << 30}
ROUNDS = 7
NEAR, FAR = 10, 1_000_000
BLOCK = 1 << 20  # tokens that are written at once
MEAN_LENGTH = 5.3  # of the logarithm of a row's length: the median is 200 tokens


def words(folder: Path) -> list[str]:
    """Of a run that reads the store in `folder`."""
    path, cache = folder / "rows.jsonl", folder / "cache"
    return ["stage=pretrain", f"data.path={path}", f"data.cache={cache}", "data.max_length=512", "data.val_path=null", "train.batch_size=1"]


def config(folder: Path):
    from runner.config.compose import compose_config

    return compose_config(words(folder))


def make(folder: Path, size: int) -> int:
    """A file, and under its key a store of `size` bytes of tokens instead of the file's own. Returns the number of rows."""
    import numpy as np

    from data.store.block import EncodedBlock, RowStats
    from data.store.writer import StoreWriter
    from data.tokenize.tokenizer import Tokenizer
    from runner.engine.data_pipeline import build_data_pipeline

    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    cfg = config(folder)
    build_data_pipeline(cfg, Tokenizer.load(Path(cfg.data.tokenizer)))
    [place] = {path.parent for path in (folder / "cache").rglob("rows.bin")}
    facts = json.loads((place / "MANIFEST.json").read_text())["facts"]
    draw, rows = np.random.default_rng(0), 0
    with StoreWriter(place, 1, 6399) as writer:
        while writer.tokens * 2 < size:
            lengths = np.clip(draw.lognormal(MEAN_LENGTH, 0.8, BLOCK // 250), 2, 513).astype(np.int64)
            count, tokens = len(lengths), draw.integers(0, 6400, lengths.sum()).astype(np.int32)
            spans = np.stack([np.ones(count, np.int64), lengths], 1).astype(np.int32)
            told = RowStats(read=count, kept=count, tokens=len(tokens), supervised=len(tokens) - count)
            writer.append(EncodedBlock(tokens, lengths, spans, np.ones(count, np.int64), np.arange(rows, rows + count), np.ones(count, np.float32), told))
            rows += count
        writer.finish(facts)
    return rows


def first_batch(folder: Path, step: int) -> dict[str, float]:
    """Seconds from the configuration to the batch of `step`, and MiB this process holds then."""
    from data.tokenize.tokenizer import Tokenizer
    from runner.engine.data_pipeline import build_data_pipeline, build_loader

    for module in ("loader", "mixture", "packing", "build"):  # torch and all: a start pays for them whatever it reads
        importlib.import_module(f"data.{module}")
    cfg = config(folder)
    tokenizer = Tokenizer.load(Path(cfg.data.tokenizer))
    began = time.perf_counter()
    feed = build_data_pipeline(cfg, tokenizer)
    opened = time.perf_counter()
    loader = build_loader(feed.train, cfg, tokenizer, 1)
    next(loader.steps(0, skip=step - 1))
    return {"open": opened - began, "batch": time.perf_counter() - opened, "MiB": resident(), "steps": loader.steps_per_epoch}


def resident() -> float:
    """MiB of memory this process holds (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path, step: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", str(folder), "--step", str(step)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(told.stdout)


def table(place: Path) -> str:
    folders, rows, once = {}, {}, {}
    for name, size in SIZES.items():
        folders[name] = place / name.replace(" ", "")
        folders[name].mkdir()
        rows[name] = make(folders[name], size)
        once[name] = measure(folders[name], 1)  # makes the packing plan
    cases = {"2 MB, step 10": ("2 MB", NEAR), "2 GB, step 10": ("2 GB", NEAR), "2 GB, step 1,000,000": ("2 GB", FAR)}
    told = [{case: measure(folders[name], step) for case, (name, step) in cases.items()} for _ in range(ROUNDS)]
    lines = [
        f"Median of {ROUNDS} rounds, windows of 512, micro-batches of 1.",
        "",
        "| store, step | rows | windows | opened in | first batch after | resident memory |",
        "|---|---|---|---|---|---|",
    ]
    for case, (name, _) in cases.items():
        middle = {word: statistics.median(found[case][word] for found in told) for word in told[0][case]}
        steps = f"{int(middle['steps']):,}"
        lines.append(f"| {case} | {rows[name]:,} | {steps} | {middle['open'] * 1e3:.1f} ms | {middle['batch'] * 1e3:.1f} ms | {middle['MiB']:.1f} MiB |")
    plans = " and ".join(f"{once[name]['open']:.1f} s ({name}, {once[name]['MiB']:.0f} MiB)" for name in SIZES)
    return "\n".join([*lines, "", f"The first start of all makes the packing plan, once: opened in {plans}."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("--folder", default=ROOT / "outputs", type=Path, help="where to make the stores: 3 GB (default: outputs/)")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.step:
        print(json.dumps(first_batch(asked.folder, asked.step)))
        sys.exit()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".benchmark-") as place:
        found = table(Path(place))
    tell("store", "Starting on a prepared store", "python benchmarks/store.py --write", found, asked.write)
