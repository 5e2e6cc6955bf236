"""Threads as the command chooses them beside fixed settings: python benchmarks/threads.py [--runs 1+2+4] [--busy 0+2]
[--rounds N] [--write] [OVERRIDES].

The default run with each setting of the environment, alone, several at once, and beside processes that compute all the
time. Tokens per second are those of all runs together while each of them trains; the settings take turns; medians over
the rounds, with the slowest and the fastest. The machine must be quiet. Several runs share the cores where
OMP_NUM_THREADS is not set, whatever the other variables say.
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

from lib.results import report_result, result_parser
from lib.runs import train_command

SETTINGS: dict[str, dict[str, str]] = {
    "nothing set": {},
    "sleep (OMP_WAIT_POLICY=passive)": {"OMP_WAIT_POLICY": "passive"},
    "spin (OMP_WAIT_POLICY=active)": {"OMP_WAIT_POLICY": "active"},
    "spin 0.1 ms (GOMP_SPINCOUNT=10000)": {"GOMP_SPINCOUNT": "10000"},
    "spin 1 ms (GOMP_SPINCOUNT=100000)": {"GOMP_SPINCOUNT": "100000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
THREAD_VARIABLES = ("OMP_", "GOMP_", "MKL_NUM", "KMP_")
NO_EVENTS = [
    "train.eval_every=0",
    "train.save_every=0",
    "train.sample_every=0",
    "train.log_every=5",
    "tracker.console=quiet",
    "tracker.page=false",
]
SKIPPED = 2  # logged records before the median: first allocations


def tokens_per_second(setting: dict[str, str], runs: int, busy: int, overrides: list[str], limit: float) -> float:
    """Return the tokens per second of all runs together; 0 if they have not ended after `limit` seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(THREAD_VARIABLES)} | setting
    with tempfile.TemporaryDirectory() as folder:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        commands = [train_command(f"hydra.run.dir={folder}/{number}", *NO_EVENTS, *overrides) for number in range(runs)]
        processes = [
            subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL) for command in commands
        ]
        try:
            codes = [process.wait(limit) for process in processes]
        except subprocess.TimeoutExpired:
            return 0.0
        finally:
            for process in [*others, *processes]:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"a run failed: {codes}")
        return total_rate([Path(folder) / str(number) / "metrics.jsonl" for number in range(runs)])


def total_rate(files: list[Path]) -> float:
    """Return the tokens per second of all runs together, in the time in which each of them trains."""
    import numpy as np

    runs = []
    for file in files:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        runs.append([(record["time"], record["tokens"]) for record in records if record["kind"] == "train"][SKIPPED:])
    first, last = max(run[0][0] for run in runs), min(run[-1][0] for run in runs)
    if last <= first:
        return 0.0  # one had ended before the other began
    tokens = [np.diff(np.interp([first, last], *zip(*run, strict=True))).item() for run in runs]
    return sum(tokens) / (last - first)


def measure_load(names: list[str], runs: int, busy: int, rounds: int, overrides: list[str], limit: float) -> list[str]:
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rates[name].append(tokens_per_second(SETTINGS[name], runs, busy, overrides, limit))
    best = max(statistics.median(values) for values in rates.values())
    load = f"{runs} run{'s' * (runs > 1)}" + (f" beside {busy} busy processes" if busy else "")
    rows = []
    for name, values in rates.items():
        rate = statistics.median(values)
        text = (
            f"{rate:,.0f} | {min(values):,.0f} to {max(values):,.0f} | {rate / best:.2f}"
            if rate
            else f"not done in {limit:.0f} s | | 0"
        )
        rows.append(f"| {load} | {name} | {text} |")
        print(rows[-1], flush=True)
    return rows


def main(args: argparse.Namespace) -> None:
    loads = [(runs, 0) for runs in map(int, args.runs.split("+")) if runs] + [
        (1, busy) for busy in map(int, args.busy.split("+")) if busy
    ]
    overrides = [f"train.max_steps={args.steps}", *args.overrides]
    names = [name for name in SETTINGS if any(part in name for part in args.settings.split("+"))]
    rows = [row for runs, busy in loads for row in measure_load(names, runs, busy, args.rounds, overrides, args.limit)]
    table = "\n".join(
        ["| load | setting | tokens/s | of the rounds | relative to the best |\n|---|---|---|---|---|", *rows]
    )
    flags = {"runs": args.runs, "busy": args.busy, "rounds": args.rounds, "steps": args.steps} | (
        {"settings": args.settings} if args.settings else {}
    )
    command = " ".join(
        ["python benchmarks/threads.py", *(f"--{flag} {value}" for flag, value in flags.items()), *args.overrides]
    )
    report_result(args.name, "Threads of the default run", command, table, args.write)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--runs", default="1+2+4", help="numbers of runs at once; 0: none")
    parser.add_argument("--settings", default="", help="only settings whose name contains one of these: nothing+sleep")
    parser.add_argument("--name", default="threads", help="of the file in benchmarks/results/")
    parser.add_argument("--busy", default="2", help="numbers of foreign busy processes beside one run; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which the runs of a setting are ended"
    )
    parser.add_argument("overrides", nargs="*", help="overrides of the run")
    main(parser.parse_args())
