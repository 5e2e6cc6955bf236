"""What a sweep costs beside its training: python benchmarks/sweep.py [--write].

Three questions, each asked of the command itself: how much faster two workers are than one, what a job costs beyond its steps
(process, words, imports, data, the last save), and how long a finished sweep of 200 jobs takes to say so.
"""

from __future__ import annotations

import argparse
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

ROUNDS = 3
JOBS, STEPS = 6, 20  # of the default model
FINISHED = 200
GOALS = {"two workers": "at least 1.6 times faster", "a job": "at most 6 s", "200 jobs": "under 5 s"}
WORDS = ["stage=pretrain", "init_from=scratch", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "tracker.console=quiet", "device=cpu"]


def command(*words: str) -> float:
    """Seconds of `python runner/train.py <words>`, one thread."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(ROOT / "runner" / "train.py"), *words], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - began


def sweep(folder: Path, steps: int, workers: int) -> float:
    rates = ",".join(f"{n + 1}e-4" for n in range(JOBS))
    where = f"hydra.sweep.dir={folder}"
    return command("-m", *WORDS, f"train.max_steps={steps}", f"optimizer.lr={rates}", where, f"hydra.launcher.workers={workers}")


def finished(folder: Path) -> float:
    """Seconds until a sweep of 200 jobs that are all completed has said so."""
    from runner.sweep.state import SweepState

    rates = [f"{n + 1}e-05" for n in range(FINISHED)]
    with SweepState.create(folder, overrides=WORDS, swept={"optimizer.lr": rates}, sweeper="grid", launcher="local", base_rows=16) as state:
        for rate in rates:
            job = state.add({"optimizer.lr": rate})
            job.update(status="completed", loss=3.0)
            (folder / job["name"]).mkdir()
            run = {"status": "completed", "attempt": 1, "step": 100, "metrics": {"loss": 3.0}, "code": {"commit": "0" * 40}, "data": ["x" * 200]}
            (folder / job["name"] / "run.json").write_text(json.dumps(run))
        state.set_status("completed")
    return command(f"resume={folder}")


def table() -> str:
    with tempfile.TemporaryDirectory() as temp:
        one, two, job, answer = [], [], [], []
        for number in range(ROUNDS):  # interleaved: a busy machine disturbs all alike
            one.append(sweep(Path(temp, f"one{number}"), STEPS, workers=1))
            two.append(sweep(Path(temp, f"two{number}"), STEPS, workers=2))
            job.append(sweep(Path(temp, f"job{number}"), 1, workers=1) / JOBS)
            answer.append(finished(Path(temp, f"finished{number}")))
    ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
    return "\n".join(
        [
            f"Median of {ROUNDS} rounds (best). The default model on the shipped sample, one thread a job.",
            "",
            "| what | goal | found |",
            "|---|---|---|",
            f"| {JOBS} jobs of {STEPS} steps, two workers beside one | {GOALS['two workers']} | {ratio:.2f} times ({_said(one)} and {_said(two)}) |",
            f"| a job of one step, start to end | {GOALS['a job']} | {_said(job)} |",
            f"| `resume=` of a finished sweep of {FINISHED} jobs | {GOALS['200 jobs']} | {_said(answer)} |",
        ]
    )


def _said(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    words = parser.parse_args()
    tell("sweep", "Sweeps", "python benchmarks/sweep.py --write", table(), words.write)
