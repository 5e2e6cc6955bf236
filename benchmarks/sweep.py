"""Cost of a sweep besides its training: python benchmarks/sweep.py [--write].

How much faster two workers are than one; what a job costs besides its steps (process, config, imports, data, the final
save); how long a finished sweep of 200 jobs takes to resume. All are measured with the command itself.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from lib.results import median_and_best, report_result, result_parser
from lib.runs import NO_EXTRAS, run_train

ROUNDS = 3
JOBS, STEPS = 6, 20  # of the default model
FINISHED_JOBS = 200
OVERRIDES = ["stage=pretrain", "init_from=scratch", "device=cpu", *NO_EXTRAS]


def command_seconds(*overrides: str) -> float:
    started = time.perf_counter()
    run_train(*overrides, threads=1)
    return time.perf_counter() - started


def sweep_seconds(folder: Path, steps: int, workers: int) -> float:
    rates = ",".join(f"{n + 1}e-4" for n in range(JOBS))
    length, swept = f"train.max_steps={steps}", f"optimizer.lr={rates}"
    return command_seconds(
        "-m", *OVERRIDES, length, swept, f"hydra.sweep.dir={folder}", f"hydra.launcher.workers={workers}"
    )


def resume_seconds(folder: Path) -> float:
    """Return the seconds of `resume=` for a sweep whose jobs are all completed."""
    from runner.sweep.state import SweepState

    rates = [f"{n + 1}e-05" for n in range(FINISHED_JOBS)]
    with SweepState.create(
        folder, overrides=OVERRIDES, swept={"optimizer.lr": rates}, sweeper="grid", launcher="local", base_rows=16
    ) as state:
        for rate in rates:
            job = state.add_job({"optimizer.lr": rate})
            job.status, job.loss = "completed", 3.0
            (folder / job.name).mkdir()
            metadata = {
                "status": "completed",
                "attempt": 1,
                "step": 100,
                "metrics": {"loss": 3.0},
                "code": {"commit": "0" * 40},
                "data": ["x" * 200],
            }
            (folder / job.name / "run.json").write_text(json.dumps(metadata))
        state.set_status("completed")
    return command_seconds(f"resume={folder}")


def table() -> str:
    with tempfile.TemporaryDirectory() as temp:
        one, two, job, resume = [], [], [], []
        for number in range(ROUNDS):  # interleaved: other load affects all cases
            one.append(sweep_seconds(Path(temp, f"one{number}"), STEPS, workers=1))
            two.append(sweep_seconds(Path(temp, f"two{number}"), STEPS, workers=2))
            job.append(sweep_seconds(Path(temp, f"job{number}"), 1, workers=1) / JOBS)
            resume.append(resume_seconds(Path(temp, f"finished{number}")))
    ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
    return "\n".join(
        [
            f"Median of {ROUNDS} rounds (best). The default model on the shipped sample, one thread per job.",
            "",
            "| case | goal | measured |",
            "|---|---|---|",
            f"| {JOBS} jobs of {STEPS} steps, two workers instead of one | at least 1.6 times faster | {ratio:.2f} times ({median_and_best(one)} and {median_and_best(two)}) |",
            f"| a job of one step, start to end | at most 6 s | {median_and_best(job)} |",
            f"| `resume=` of a finished sweep of {FINISHED_JOBS} jobs | under 5 s | {median_and_best(resume)} |",
        ]
    )


if __name__ == "__main__":
    args = result_parser(__doc__).parse_args()
    report_result("sweep", "Sweeps", "python benchmarks/sweep.py --write", table(), args.write)
