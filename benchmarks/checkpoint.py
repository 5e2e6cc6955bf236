"""What saving costs a training of minimind_64m: python benchmarks/checkpoint.py [--write] [--folder DIR].

Beside each save the same bytes are written and synced with nothing else around it: no checksum, no manifest, no copy. The disk
is the one of `--folder`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

ROUNDS = 9
CHUNK = 4 << 20


def state_of_minimind():
    """Weights and AdamW's state of the 64M model after one step on made-up gradients, as a run holds them."""
    import torch

    from models.decoder import Decoder
    from runner.config.compose import compose_config
    from runner.engine.optim.groups import build_optimizer

    cfg = compose_config(["model=minimind_64m", "optimizer=adamw", "init_from=scratch"])
    model = Decoder(cfg.model)
    optimizers = build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers)
    for parameter in optimizers.parameters:
        parameter.grad = torch.randn_like(parameter)
    for part in optimizers.parts:
        part.step()
    optimizers.zero_grad()
    return cfg, model, optimizers


def run_in(folder: Path, parts) -> SimpleNamespace:
    """As much of a run as checkpoint.save looks at."""
    from runner.checkpoint.async_writer import AsyncWriter
    from runner.engine.state import Progress

    cfg, model, optimizers = parts
    silent = SimpleNamespace(position=dict, tracker_id=None, say=lambda text: None, warn=lambda text: None)
    return SimpleNamespace(
        cfg=cfg, folder=folder, model=model, optimizers=optimizers, progress=Progress(), precision=SimpleNamespace(state=dict), world=SimpleNamespace(leads=True), facts={},
        track=silent, writer=AsyncWriter(), note=lambda **facts: None, saved_step=0, save_stall=0.0, failed_saves=0,
    )  # fmt: skip


def save(run: SimpleNamespace) -> tuple[float, float]:
    """One save: seconds the training stands still, and seconds until it is committed."""
    from runner.checkpoint import manager

    run.progress.step += 1
    began = time.perf_counter()
    manager.save_async(run)
    stall = time.perf_counter() - began
    manager.wait_for_save(run)
    assert run.failed_saves == 0, "the disk refused"
    return stall, time.perf_counter() - began - stall


def raw(contents: dict[str, bytes], folder: Path) -> float:
    """Seconds to write these files, one after the other, each in chunks and then synced."""
    folder.mkdir()
    began = time.perf_counter()
    for name, data in contents.items():
        view, fd = memoryview(data), os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for start in range(0, len(view), CHUNK):
            assert os.write(fd, view[start : start + CHUNK]) == len(view[start : start + CHUNK])
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - began


def table(place: Path) -> str:
    from runner.checkpoint import manager

    run = run_in(place, state_of_minimind())
    save(run)  # warms up, and shows the bytes
    contents = {path.name: path.read_bytes() for path in sorted(manager.newest_checkpoint(place).iterdir())}
    stalls, commits, raws = [], [], []
    for number in range(ROUNDS):  # interleaved: a busy disk disturbs both alike
        stall, commit = save(run)
        stalls.append(stall), commits.append(commit), raws.append(raw(contents, place / f"raw{number}"))
        shutil.rmtree(place / f"raw{number - run.cfg.train.keep_checkpoints}", ignore_errors=True)  # as many stay as of ours: memory is as warm
    size = sum(map(len, contents.values())) / 1e6
    lines = [f"{size:,.0f} MB a save (fp32 weights and both moments), {ROUNDS} rounds.", "", "| seconds | median | best |", "|---|---|---|"]
    for what, times in (
        ("the training stands still (copy in memory)", stalls),
        ("commit, beside the training", commits),
        ("the same bytes, written and synced, nothing else", raws),
    ):
        lines.append(f"| {what} | {statistics.median(times):.2f} | {min(times):.2f} |")
    ratio = statistics.median(commit / alone for commit, alone in zip(commits, raws, strict=True))
    return "\n".join(
        [
            *lines,
            "",
            f"A commit takes {ratio:.2f} times as long as the bytes alone right after it (median of {ROUNDS} ratios); best against best {min(commits) / min(raws):.2f}.",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("--folder", default=ROOT / "outputs", type=Path, help="where to save (default: outputs/)")
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=words.folder, prefix=".benchmark-") as place:
        found = table(Path(place))
    tell("checkpoint", "What saving minimind_64m costs", "python benchmarks/checkpoint.py --write", found, words.write)
