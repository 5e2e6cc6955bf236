"""Cost of saving a run of minimind_64m: python benchmarks/checkpoint.py [--folder DIR] [--write].

After each save the same bytes are written and synced alone: without checksums, manifest and copy. The disk is that of
--folder.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.results import report_result, result_parser
from lib.runs import NO_EXTRAS, build_state

ROUNDS = 9
CHUNK = 4 << 20  # bytes


def state_after_a_step(run_dir: Path) -> Any:
    """Return the state of a run of the 64M model after one AdamW step with random gradients."""
    import torch

    state = build_state(
        ["model=minimind_64m", "optimizer=adamw", "init_from=scratch", "device=cpu", *NO_EXTRAS], run_dir
    )
    for parameter in state.optimizers.names:
        parameter.grad = torch.randn_like(parameter)
    state.optimizers.step(torch.zeros(()))
    state.optimizers.zero_grad()
    return state


def save(state: Any) -> tuple[float, float]:
    """Return the seconds that training waits for a save, and the seconds from then until it is on disk."""
    state.progress.step += 1
    started = time.perf_counter()
    state.checkpoints.save_async(state.progress.step, state)
    stall = time.perf_counter() - started
    state.checkpoints.wait_for_save()
    assert (state.checkpoints.dir / f"step-{state.progress.step:08d}").is_dir(), "the save has failed"
    return stall, time.perf_counter() - started - stall


def save_best(state: Any) -> tuple[float, float]:
    """Return the same for the best weights of a step that is not saved otherwise."""
    state.progress.step += 1
    started = time.perf_counter()
    state.checkpoints.save_best(state.progress.step, 1.0, state)
    stall = time.perf_counter() - started
    state.checkpoints.wait_for_save()
    assert (state.checkpoints.dir / f"best-{state.progress.step:08d}").is_dir(), "the save has failed"
    return stall, time.perf_counter() - started - stall


def write_bytes(contents: dict[str, bytes], folder: Path) -> float:
    """Return the seconds to write these files one after another, each in chunks and then synced."""
    folder.mkdir()
    started = time.perf_counter()
    for name, data in contents.items():
        view, fd = memoryview(data), os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for start in range(0, len(view), CHUNK):
            assert os.write(fd, view[start : start + CHUNK]) == len(view[start : start + CHUNK])
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - started


def table(run_dir: Path) -> str:
    state = state_after_a_step(run_dir)
    save(state)  # warmup; its files are the bytes written below
    contents = {path.name: path.read_bytes() for path in sorted((state.checkpoints.dir / "step-00000001").iterdir())}
    stalls, commits, writes, best_stalls, best_commits = [], [], [], [], []
    for number in range(ROUNDS):  # interleaved: other load on the disk affects both
        stall, commit = save(state)
        stalls.append(stall), commits.append(commit), writes.append(write_bytes(contents, run_dir / f"raw{number}"))
        stall, commit = save_best(state)
        best_stalls.append(stall), best_commits.append(commit)
        # as many copies as checkpoints are kept
        shutil.rmtree(run_dir / f"raw{number - state.cfg.train.keep_checkpoints}", ignore_errors=True)
    size = sum(map(len, contents.values())) / 1e6
    lines = [
        f"{size:,.0f} MB per save (fp32 weights and both moments), {ROUNDS} rounds.",
        "",
        "| seconds | median | best |",
        "|---|---|---|",
    ]
    for case, seconds in (
        ("training waits (copy in memory)", stalls),
        ("background save, while training continues", commits),
        ("the same bytes written and synced alone", writes),
        ("training waits for best weights (a third of the bytes)", best_stalls),
        ("background save of best weights", best_commits),
    ):
        lines.append(f"| {case} | {statistics.median(seconds):.2f} | {min(seconds):.2f} |")
    ratio = statistics.median(commit / write for commit, write in zip(commits, writes, strict=True))
    best = min(commits) / min(writes)
    return "\n".join(
        [
            *lines,
            "",
            f"A background save takes {ratio:.2f} times as long as the bytes alone (median of {ROUNDS} ratios); best against best {best:.2f}.",
        ]
    )


if __name__ == "__main__":
    args = result_parser(__doc__, needs_disk="checkpoints, 5 GB").parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as temp:
        result = table(Path(temp))
    report_result(
        "checkpoint", "Cost of saving minimind_64m", "python benchmarks/checkpoint.py --write", result, args.write
    )
