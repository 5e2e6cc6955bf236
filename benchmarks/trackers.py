"""What trackers cost a training: python benchmarks/trackers.py [--rounds N] [--write].

The engine's training step of model=tiny with one record per step (the default logs every tenth), without a tracker and
with each of them, offline. The cases take turns in one process; a round of a case is ten steps. The ratio to no tracker
is the median over the rounds; that of a second case without a tracker says how far such ratios scatter on this machine.
The processor time of a record does not depend on the load: in the training process, from a block of records without
steps, and in the trackers' own processes. Together, divided by that of a step, they are what training loses if no core
is idle.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.results import report_result, result_parser, thread_setting
from lib.runs import build_state

CASES: dict[str, list[str]] = {
    "none": [],
    "none, again": [],  # how far the clocks scatter
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "swanlab": ["swanlab"],
    "all three": ["tensorboard", "wandb", "swanlab"],
}
CLOCKS = {"wall clock": time.perf_counter, "processor time": time.process_time}
STEPS, SEQUENCES = 10, 4  # steps of a round; packed sequences of a step
OVERRIDES = [
    "stage=pretrain",
    "init_from=scratch",
    "device=cpu",
    "train.compile=off",
    "tracker.console=quiet",
    "data.val_path=null",
]
# of a record of metrics.jsonl
NUMBERS = ("loss", "lr", "grad_norm", "tokens", "loss_tokens", "tokens_per_second", "data_wait", "epoch")
RECORDS = 500  # of a block without steps
GOAL = 0.02
START_TIMEOUT = 60.0  # seconds


def open_logger(folder: Path, trackers: list[str]) -> Any:
    """Return the logger of a run after its trackers have opened their files."""
    from runner.config.compose import compose_config
    from runner.tracking.logger import RunLogger

    choice = (
        [f"tracker={trackers[0]}", f"tracker.also=[{','.join(trackers[1:])}]", "tracker.mode=offline"]
        if trackers
        else []
    )
    folder.mkdir()
    logger = RunLogger(folder, compose_config([*choice, "tracker.console=quiet", "tracker.page=false"]).tracker)
    logger.start({}, total_steps=1, attempt=1, run_config={}, saved=None, tracker_id=None)
    deadline = time.monotonic() + START_TIMEOUT
    while sum(f"{name}: " in (folder / "train.log").read_text(encoding="utf-8") for name in trackers) < len(trackers):
        if time.monotonic() > deadline:
            raise RuntimeError((folder / "train.log").read_text(encoding="utf-8"))
        time.sleep(0.1)
    return logger


def tracker_seconds(logger: Any) -> float:
    """Return the processor time of a logger's tracker processes and of what they have started (Linux)."""
    groups = {tracker._process.pid for tracker in logger._trackers.values()}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def logging_seconds(logger: Any) -> float:
    """Return the processor time of this process for one record, its writer thread included."""
    started = time.process_time()
    for step in range(RECORDS):
        logger.log("train", step, **dict.fromkeys(NUMBERS, float(step)))
    time.sleep(2)  # the writer thread has sent them
    return (time.process_time() - started) / RECORDS


def measure(
    rounds: int, folder: Path
) -> tuple[dict[str, dict[str, list[float]]], dict[str, tuple[float, float, float]]]:
    """Return case -> clock -> seconds of each round, and case -> processor seconds: of the trackers at their start, and
    per record here and there.
    """
    from runner.engine.loop import train_step

    state = build_state([*OVERRIDES, "model=tiny"], folder)
    sequences = state.pipeline.train
    batches = [state.loader.collate([sequences[i] for i in range(SEQUENCES)])]
    loggers = {name: open_logger(folder / name, trackers) for name, trackers in CASES.items()}
    started = {name: tracker_seconds(logger) for name, logger in loggers.items()}
    seconds = {name: {clock: list[float]() for clock in CLOCKS} for name in CASES}
    names, step = list(CASES), 0
    for number in range(-1, rounds):  # one warmup round
        for name in names[number % len(names) :] + names[: number % len(names)]:  # each case follows each other one
            before = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(STEPS):
                step += 1
                train_step(state, batches, 1e-4)
                loggers[name].log("train", step, **dict.fromkeys(NUMBERS, float(step)))
            if number >= 0:
                for clock, read in CLOCKS.items():
                    seconds[name][clock].append(read() - before[clock])
    time.sleep(2)  # the trackers read what waits
    per_record = {
        name: (tracker_seconds(logger) - started[name]) / ((rounds + 1) * STEPS) for name, logger in loggers.items()
    }
    cost = {name: (started[name], logging_seconds(logger), per_record[name]) for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.finish("completed")
    return seconds, cost


def table(rounds: int) -> str:
    with tempfile.TemporaryDirectory() as temp:
        seconds, cost = measure(rounds, Path(temp))
    lines = [
        f"Medians of {rounds} rounds of {STEPS} steps, {SEQUENCES} packed sequences of 256 tokens, one record per step; {thread_setting()}. "
        f"Goal: at most {GOAL:.0%} more than without a tracker.",
        "",
        "| tracker | ratio, wall clock | ratio, processor time | start (CPU s) | record, training process (CPU ms) | record, trackers (CPU ms) | share of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    step = statistics.median(seconds["none"]["processor time"]) / STEPS
    for name, by_clock in seconds.items():
        ratios = [
            statistics.median(mine / none for mine, none in zip(by_clock[clock], seconds["none"][clock], strict=True))
            for clock in CLOCKS
        ]
        start, here, there = cost[name]
        share = (here - cost["none"][1] + there) / step
        lines.append(
            f"| {name} | {ratios[0]:.3f} | {ratios[1]:.3f} | {start:.1f} | {here * 1e3:.2f} | {there * 1e3:.2f} | {share:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    environment = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    command = f"{environment}python benchmarks/trackers.py --rounds {args.rounds} --write"
    report_result("trackers", "What trackers cost a training", command, table(args.rounds), args.write)
