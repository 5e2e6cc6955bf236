"""What a start costs: python benchmarks/start.py [--folder DIR] [--write].

From the command to the first finished step, by the clock: of the default run, of a sweep's second job, and of a run on token stores of 2 MB, 200 MB and 2 GB
(made as in store.py). All take turns, each is a process of its own, and every store is prepared. `import torch` alone stands beside them, for it is
what no start can do without. The processor time of the whole command (its one step is saved, too) stands beside it: it counts our own work, whatever
else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import store
from lib.results import tell

ROOT = Path(__file__).parents[1]
ROUNDS = 7
SIZES = {"2 MB": 2 << 20, "200 MB": 200 << 20, "2 GB": 2 << 30}
GOALS = {"the default run": "at most 5 s", "a sweep's second job": "at most 5 s"}
# One step and its line; what is measured is over before the run saves, and nothing else is due.
ONE = ["train.max_steps=1", "train.log_every=1", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "tracker.console=plain"]
HEADER, STEP, SECOND = "run ", "step 1/1", "[2/2]"  # how the lines begin that are waited for


def lines(command: list[str]) -> Iterator[tuple[float, str]]:
    """What a program says, each line with the seconds from its start."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdout
        told = []
        for line in program.stdout:
            told.append(line)
            yield time.perf_counter() - began, line
    assert program.returncode == 0, "".join(told)


def train(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "runner" / "train.py"), *ONE, *words]


class Start(NamedTuple):
    """Seconds from the command."""

    header: float  # until a run says what it is
    step: float  # until its first step is done
    processor: float  # of its processor time until it has ended


def first_step(*words: str) -> Start:
    before = processor()
    said = list(lines(train(*words)))
    return Start(found(said, HEADER), found(said, STEP), processor() - before)


def second_job(folder: Path) -> Start:
    """The same of a sweep's second job, from the moment its process is begun; the processor time is that of driver and both jobs."""
    before = processor()
    said = list(lines(train("-m", "optimizer.lr=1e-3,2e-3", f"hydra.sweep.dir={folder}")))
    begun = next(place for place, (_, line) in enumerate(said) if line.startswith(SECOND))
    return Start(found(said[begun:], HEADER) - said[begun][0], found(said[begun:], STEP) - said[begun][0], processor() - before)


def only_torch() -> Start:
    """A program that imports torch and nothing else; it has no header."""
    before, began = processor(), time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return Start(0.0, time.perf_counter() - began, processor() - before)


def found(said: list[tuple[float, str]], beginning: str) -> float:
    return next(second for second, line in said if line.startswith(beginning))


def processor() -> float:
    """Seconds of all programs that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cases(place: Path) -> dict[str, Callable[[int], Start]]:
    """Name -> what to measure in a round."""
    made: dict[str, Callable[[int], Start]] = {
        "`import torch` alone": lambda _: only_torch(),
        "the default run": lambda number: first_step(f"hydra.run.dir={place / f'run{number}'}"),
        "a sweep's second job": lambda number: second_job(place / f"sweep{number}"),
    }
    for name, size in SIZES.items():
        folder = place / name.replace(" ", "")
        folder.mkdir()
        store.make(folder, size)
        made[f"a store of {name}"] = lambda number, folder=folder: first_step(*store.words(folder), f"hydra.run.dir={folder / f'run{number}'}")  # type: ignore[misc]  # bound in this turn
    return made


def table(place: Path) -> str:
    all_cases = cases(place)
    taken: dict[str, list[Start]] = {name: [] for name in all_cases}
    for measure in all_cases.values():
        measure(ROUNDS)  # what is not prepared yet
    for number in range(ROUNDS):  # interleaved: a busy machine disturbs all alike
        for name, measure in all_cases.items():
            taken[name].append(measure(number))
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
    out = [
        f"From the command, median of {ROUNDS} rounds (best); OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'as torch chooses')}.",
        "",
        "| what | goal | to the header | to the first finished step | beside `import torch` | processor time, whole command |",
        "|---|---|---|---|---|---|",
    ]
    alone = [start.step for start in taken["`import torch` alone"]]
    for name, starts in taken.items():
        header, step, used = zip(*starts, strict=True)
        ratio = statistics.median(mine / its for mine, its in zip(step, alone, strict=True))
        out.append(f"| {name} | {GOALS.get(name, '')} | {_said(header) if any(header) else ''} | {_said(step)} | {ratio:.2f} | {_said(used)} |")
    return "\n".join(out)


def _said(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("--folder", default=ROOT / "outputs", type=Path, help="where to make the stores: 3 GB (default: outputs/)")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix=".benchmark-") as temp:
        result = table(Path(temp))
    tell("start", "From the command to the first step", "python benchmarks/start.py --write", result, asked.write)
