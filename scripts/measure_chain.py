"""Train the chain of the README (pretrain, sft, dpo, dpo_lora, as shipped) and measure each model: `python
scripts/measure_chain.py FOLDER [SEED ...]`.

Prints one table row per model: seconds of training, exact match on sft_val.jsonl, exact match in the ten-turn
conversations of chat_val.jsonl, and accuracy on the preference pairs of dpo_val.jsonl. A run that FOLDER holds already
is measured and not trained again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "data" / "samples"
# stage -> stage of its initial weights
CHAIN = {"pretrain": "scratch", "sft": "pretrain", "dpo": "sft", "dpo_lora": "sft"}
METRICS = {"sft_val": "exact_match", "chat_val": "conversation", "dpo_val": "preference"}  # file -> metric


def train(stage: str, folder: Path, seed: int) -> float:
    """Return the seconds of the whole command, 0 if the run exists."""
    if (folder / stage / "model").exists():
        return 0.0
    source = CHAIN[stage]
    started = time.perf_counter()
    overrides = [
        f"seed={seed}",
        f"stage={stage}",
        f"init_from={source if source == 'scratch' else folder / source}",
        f"hydra.run.dir={folder / stage}",
    ]
    subprocess.run([sys.executable, ROOT / "runner" / "train.py", *overrides, "tracker.console=quiet"], check=True)
    return time.perf_counter() - started


def evaluate(run: Path, file: str, reference: Path) -> str:
    overrides = [
        f"run={run}",
        f"data.path={SAMPLES / file}.jsonl",
        f"metric={METRICS[file]}",
        f"reference={reference}",
        "batch_size=72",
        "show=0",
    ]
    out = subprocess.run(
        [sys.executable, ROOT / "runner" / "evaluate.py", *overrides], check=True, capture_output=True, text=True
    ).stdout
    results = json.loads(out.splitlines()[-1])
    return f"{100 * results['reward_accuracy' if METRICS[file] == 'preference' else 'exact_match']:.1f} %"


def measure(folder: Path, seed: int) -> None:
    for stage in CHAIN:
        seconds = train(stage, folder, seed)
        files = (
            [] if stage == "pretrain" else [name for name in METRICS if name != "dpo_val" or stage.startswith("dpo")]
        )
        cells = [evaluate(folder / stage, file, folder / "sft") for file in files]
        print(
            f"| {seed} | {stage} | {seconds:.0f} | " + " | ".join([*cells, *[""] * (len(METRICS) - len(cells))]) + " |",
            flush=True,
        )


if __name__ == "__main__":
    print("| seed | stage | seconds | exact match | ten turns | preference |\n|---|---|---|---|---|---|", flush=True)
    for seed in map(int, sys.argv[2:] or ["42"]):
        measure(Path(sys.argv[1]).absolute() / f"seed{seed}", seed)
