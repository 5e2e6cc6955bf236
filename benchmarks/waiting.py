"""How long a step waits for its data: python benchmarks/waiting.py [--only WORD ...] [--alone] [--write].

Every shipped configuration trains for two log intervals on the shipped sample (a preset, on what its stage ships), and what is told is `data_wait` as
metrics.jsonl has it: the share of the time since the line before. The first line holds the wait for the very first batch, which is made while nothing
else can be done; an interval as shipped is longer than the ones here. Beside it stands what one thread needs to make the data of a step, in processor
time: a step that takes longer need not wait. --alone measures nothing else, and takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

GOAL = 0.01
STAGES = ("pretrain", "sft", "lora", "dpo", "dpo_lora")
SAMPLES = {"lora": "lora_identity", "dpo_lora": "dpo"}  # those that are not called as their stage is
MADE = 20  # steps whose data is made while nobody trains
SHORT = {"tiny": 10}  # steps of an interval, 2 for the larger ones: as many as are worth waiting for here
WORDS = ["init_from=scratch", "device=cpu", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "train.compile=off", "tracker.console=quiet"]


def configurations() -> Iterator[tuple[str, list[str], int]]:
    """(its words, all words of it, steps of an interval)"""
    for model in sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml")):
        for stage in STAGES:
            yield f"stage={stage} model={model}", [f"stage={stage}", f"model={model}"], SHORT.get(model, 2)
    for file in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        stage = file.stem.removeprefix("minimind_") if file.stem.startswith("minimind_") else "pretrain"
        path = ROOT / "data" / "samples" / f"{SAMPLES.get(stage, stage)}.jsonl"
        yield f"experiment={file.stem}", [f"experiment={file.stem}", f"data.path={path}"], 2


def measure(words: list[str], steps: int, folder: Path) -> list[dict]:
    """The two logged lines."""
    command = [sys.executable, str(ROOT / "runner" / "train.py"), *words, *WORDS, f"train.max_steps={2 * steps}", f"train.log_every={steps}"]
    done = subprocess.run([*command, f"hydra.run.dir={folder}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(words: list[str], steps: int) -> str:
    with tempfile.TemporaryDirectory() as temp:
        first, second = measure(words, steps, Path(temp))
    seconds = (second["time"] - first["time"]) / steps
    return f" {steps} | {seconds:.3f} | {first['data_wait']:.2%} | {second['data_wait']:.2%} |"


def made_alone(words: list[str]) -> float:
    """Seconds of the processor that the data of a step cost, while nobody trains."""
    from data.tokenize.tokenizer import Tokenizer
    from runner.config.compose import compose_config
    from runner.engine.data_pipeline import build_data_pipeline, build_loader

    cfg = compose_config([*words, "data.num_workers=0"])
    tokenizer = Tokenizer.load(Path(cfg.data.tokenizer))
    loader = build_loader(build_data_pipeline(cfg, tokenizer).train, cfg, tokenizer, cfg.train.batch_size * cfg.train.accumulation_steps)
    with closing(loader.onward(0, 1 + MADE)) as steps:
        next(steps)
        began = time.process_time()
        for _ in steps:
            pass
    return (time.process_time() - began) / MADE


def table(only: list[str], alone: bool) -> str:
    lines = [
        f"fp32 on the CPU but where a preset says otherwise, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'as torch chooses')}.",
        f"Goal: under {GOAL:.0%}.",
        "",
        "| configuration | its data, ms a step | steps of an interval | a step, s | data_wait of the first line | of the second |",
        "|---|---|---|---|---|---|",
    ]
    chosen = [one for one in configurations() if all(word in one[0] for word in only)]
    if not chosen:
        raise SystemExit(f"no configuration says {' and '.join(only)}")
    for name, words, steps in chosen:
        lines.append(f"| `{name}` | {made_alone(words) * 1e3:.1f} |" + ("" if alone else trained(words, steps)))
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="configurations that say all of these, e.g. stage=sft tiny")
    parser.add_argument("--alone", action="store_true", help="do not train")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    asked = parser.parse_args()
    command = " ".join(["python benchmarks/waiting.py", *(["--only", *asked.only] if asked.only else []), *(["--alone"] if asked.alone else []), "--write"])
    tell("waiting", "Waiting for data", command, table(asked.only, asked.alone), asked.write)
