"""How much faster two ranks train than one: python benchmarks/ranks.py [--write].

Both are the command itself, on the CPU (gloo), each rank with one thread and eight micro-batches a step. What is compared is
tokens_per_second of metrics.jsonl without its first lines, all taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.results import tell

ROOT = Path(__file__).parents[1]
ROUNDS, STEPS, WARM = 3, 7, 2
WORDS = ["stage=pretrain", "init_from=scratch", "device=cpu", f"train.max_steps={STEPS}", "train.log_every=1", "train.eval_every=0", "train.save_every=0"]
WORDS += ["train.sample_every=0", "train.batch_size=4", "train.accumulation_steps=8", "train.compile=off", "tracker.console=quiet"]
CASES = {  # name -> words
    "one rank": [],
    "two ranks, ddp": ["distributed=ddp", "distributed.nproc=2"],
    "two ranks, fsdp": ["distributed=fsdp", "distributed.nproc=2"],
}


def tokens_per_second(folder: Path, words: list[str]) -> float:
    command = [sys.executable, str(ROOT / "runner" / "train.py"), *WORDS, *words, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines[WARM:])


def table() -> str:
    found: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as temp:
        for number in range(ROUNDS):  # taking turns: a busy machine disturbs all alike
            for place, (name, words) in enumerate(CASES.items()):
                found[name].append(tokens_per_second(Path(temp, f"{number}.{place}"), words))
    about = "The default model on the shipped sample, one thread a rank, batches of 4 windows; medians of"
    about += f" {ROUNDS} rounds of {STEPS - WARM} steps. Goal: two ranks at least 1.7 times one at accumulation 8."
    lines = [about, "", "| what | tokens/s, median (best) | beside one rank |", "|---|---|---|"]
    for name, rates in found.items():
        ratio = statistics.median(rate / one for rate, one in zip(rates, found["one rank"], strict=True))
        lines.append(f"| {name} | {statistics.median(rates):,.0f} ({max(rates):,.0f}) | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    words = parser.parse_args()
    tell("ranks", "Ranks", "python benchmarks/ranks.py --write", table(), words.write)
