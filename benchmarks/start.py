"""Time from the command to the first step: python benchmarks/start.py [--folder DIR] [--rounds N] [--sizes "2 MB+200
MB"] [--write].

Wall-clock time to the run's header and to the first finished step: of the default run, of a sweep's second job, and of
runs on token stores of 2 MB, 200 MB and 2 GB. The cases are interleaved, each in a process of its own, with prepared
stores. `import torch` alone is the lower bound of every start. The processor time of the whole command (its one step is
saved, too) does not depend on the load of the machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lib.results import median_and_best, report_result, result_parser, thread_setting
from lib.runs import train_command

SIZES = {"2 MB": 2 << 20, "200 MB": 200 << 20, "2 GB": 2 << 30}
GOALS = {"the default run": "at most 5 s", "a sweep's second job": "at most 5 s"}
ONE_STEP = [
    "train.max_steps=1",
    "train.log_every=1",
    "train.eval_every=0",
    "train.save_every=0",
    "train.sample_every=0",
    "tracker.console=plain",
]
BATCH_TOKENS = 1 << 20  # of a random store, written at once
MEAN_LOG_LENGTH = 5.3  # of its rows: the median is 200 tokens
HEADER, STEP, SECOND_JOB = "run ", "step 1/1", "[2/2]"  # first characters of the lines that are timed


class Start(NamedTuple):
    """Seconds from the start of the command."""

    header: float  # wall clock, to the header of the run
    step: float  # wall clock, to its first finished step
    processor: float  # processor time of the whole command


def timed_lines(command: list[str]) -> Iterator[tuple[float, str]]:
    """Yield (seconds from the start, line) of a program's output.

    Raises RuntimeError with the output if it fails.
    """
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        output = []
        for line in process.stdout:
            output.append(line)
            yield time.perf_counter() - started, line
    if process.returncode:
        raise RuntimeError("".join(output))


def time_of(lines: list[tuple[float, str]], prefix: str) -> float:
    return next(seconds for seconds, line in lines if line.startswith(prefix))


def first_step(*overrides: str) -> Start:
    before = processor_seconds()
    lines = list(timed_lines(train_command(*ONE_STEP, *overrides)))
    return Start(time_of(lines, HEADER), time_of(lines, STEP), processor_seconds() - before)


def second_job(folder: Path) -> Start:
    """Return the times of a sweep's second job from the start of its process, and the processor time of the sweep
    process and both jobs.
    """
    before = processor_seconds()
    lines = list(timed_lines(train_command(*ONE_STEP, "-m", "optimizer.lr=1e-3,2e-3", f"hydra.sweep.dir={folder}")))
    first = next(index for index, (_, line) in enumerate(lines) if line.startswith(SECOND_JOB))
    second = lines[first:]
    return Start(
        time_of(second, HEADER) - second[0][0], time_of(second, STEP) - second[0][0], processor_seconds() - before
    )


def import_torch() -> Start:
    before, started = processor_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return Start(0.0, time.perf_counter() - started, processor_seconds() - before)


def processor_seconds() -> float:
    """Return the processor time of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def store_overrides(folder: Path) -> list[str]:
    """Return the overrides of a run that reads the store in `folder`."""
    path, cache = folder / "rows.jsonl", folder / "cache"
    return [
        "stage=pretrain",
        f"data.path={path}",
        f"data.cache={cache}",
        "data.max_length=512",
        "data.val_path=null",
        "train.batch_size=1",
    ]


def write_random_store(folder: Path, size: int) -> None:
    """Write a small JSONL file and, under its cache key, a store of `size` bytes of tokens instead of its own."""
    import numpy as np

    from data.store.writer import write_store
    from data.tokenize.block import EncodedBlock, RowStats
    from data.tokenize.origin import open_tokenizer
    from runner.config.compose import compose_config
    from runner.engine.data_pipeline import build_data_pipeline

    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    cfg = compose_config(store_overrides(folder))
    build_data_pipeline(cfg, open_tokenizer(cfg.data, "scratch"))
    [store] = {path.parent for path in (folder / "cache").rglob("rows.bin")}
    metadata = json.loads((store / "MANIFEST.json").read_text())["metadata"]
    generator, rows = np.random.default_rng(0), 0
    with write_store(store, 1, 6399, metadata) as writer:
        while writer.tokens * 2 < size:
            lengths = np.clip(generator.lognormal(MEAN_LOG_LENGTH, 0.8, BATCH_TOKENS // 250), 2, 513).astype(np.int64)
            count, tokens = len(lengths), generator.integers(0, 6400, lengths.sum()).astype(np.int32)
            sequences = [(ids.tobytes(), [(1, len(ids), 1.0)]) for ids in np.split(tokens, np.cumsum(lengths)[:-1])]
            stats = RowStats(read=count, kept=count, tokens=len(tokens), loss_tokens=len(tokens) - count)
            writer.append(EncodedBlock([(rows + i, 1.0, [each]) for i, each in enumerate(sequences)], stats))
            rows += count


def make_cases(parent: Path, sizes: list[str]) -> dict[str, Callable[[int], Start]]:
    """Return case -> function that measures it in round N."""
    cases: dict[str, Callable[[int], Start]] = {
        "`import torch` alone": lambda _: import_torch(),
        "the default run": lambda number: first_step(f"hydra.run.dir={parent / f'run{number}'}"),
        "a sweep's second job": lambda number: second_job(parent / f"sweep{number}"),
    }
    for name in sizes:
        folder = parent / name.replace(" ", "")
        write_random_store(folder, SIZES[name])
        cases[f"a store of {name}"] = lambda number, folder=folder: first_step(
            *store_overrides(folder), f"hydra.run.dir={folder / f'run{number}'}"
        )  # type: ignore[misc]  # folder is bound here
    return cases


def table(parent: Path, rounds: int, sizes: list[str]) -> str:
    cases = make_cases(parent, sizes)
    starts: dict[str, list[Start]] = {name: [] for name in cases}
    for measure in cases.values():
        measure(rounds)  # prepares the data of each case
    for number in range(rounds):  # interleaved: other load affects all cases
        for name, measure in cases.items():
            starts[name].append(measure(number))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    lines = [
        f"Median of {rounds} rounds (best); {thread_setting()}.",
        "",
        "| case | goal | to the header | to the first finished step | relative to `import torch` | processor time, whole command |",
        "|---|---|---|---|---|---|",
    ]
    torch_alone = [start.step for start in starts["`import torch` alone"]]
    for name, measured in starts.items():
        header, step, processor = zip(*measured, strict=True)
        ratio = statistics.median(seconds / alone for seconds, alone in zip(step, torch_alone, strict=True))
        header_text = median_and_best(header) if any(header) else ""
        lines.append(
            f"| {name} | {GOALS.get(name, '')} | {header_text} | {median_and_best(step)} | {ratio:.2f} | {median_and_best(processor)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__, needs_disk="the stores, 3 GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="+".join(SIZES), help=f"stores, of {', '.join(SIZES)}, joined by +")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as temp:
        result = table(Path(temp), args.rounds, [size for size in args.sizes.split("+") if size])
    report_result(
        "start",
        "From the command to the first step",
        f"python benchmarks/start.py --rounds {args.rounds} --write",
        result,
        args.write,
    )
