"""A small run in a forked child process, to be killed, signalled and relaunched. torch is imported before the fork: a
launch takes milliseconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch._dynamo  # otherwise the first AdamW imports it, for a second, in every child

from common.errors import exiting_with_code
from common.filesystem import FileSystem
from runner.checkpoint.atomic_dir import verify_dir
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.fault_injection.rig import Launch, launch_fork
from runner.launch.run import run
from runner.run_dir.metadata import RunMetadata

TIMEOUT = 500  # seconds after which a hanging child is killed and its test fails
STEPS = 16  # 15 training examples, 2 per step, two epochs
OUTPUT_FILE = "output.txt"  # stdout and stderr of the children, beside the run directory
OVERRIDES = [
    "stage=sft", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=8",
    "model.intermediate_size=64", "model.max_position_embeddings=128", "model.dropout=0.1", "data.max_length=64", "data.packing=none", "data.val_path=null", "data.val_fraction=0.1", "train.batch_size=2",
    "train.epochs=2", "train.log_every=1", "train.save_every=1", "train.eval_every=5", "train.sample_every=6", "train.sample_tokens=4", "train.sample_prompts=[goats]", "optimizer.lr=1e-3",
    "schedule.warmup_steps=0", "tracker.console=quiet", "device=cpu",
]  # fmt: skip
PHRASES = [
    "the lake of Oru",
    "lies north",
    "of the old mill where Tami keeps nine grey goats",
    "and sings",
    "to them of the moon",
]


class SlowDisk(FileSystem):
    """A disk whose sync takes time: in memory a kill would hardly ever interrupt one."""

    SYNC_SECONDS = 0.002

    @classmethod
    def fsync(cls, fd: int) -> None:
        os.fsync(fd)
        time.sleep(cls.SYNC_SECONDS)


@contextmanager
def memory_dir(fallback: Path) -> Iterator[Path]:
    """A directory in memory if the system has one: hundreds of saves take minutes on a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else fallback) as folder:
        yield Path(folder)


def make_config(folder: Path, *overrides: str) -> Config:
    """Return the config of the small run, on the rows that are written into `folder`."""
    torch.set_num_threads(1)
    write_rows(folder)
    return compose_config(
        [*OVERRIDES, f"data.path={folder / 'rows.jsonl'}", f"data.cache={folder / 'cache'}", *overrides]
    )


def write_rows(folder: Path) -> None:
    """Write 17 ragged conversations to `folder/rows.jsonl`."""
    rows = [
        {
            "conversations": [
                {"role": "user", "content": PHRASES[i % 5]},
                {"role": "assistant", "content": " ".join(PHRASES[: 1 + i % 4])},
            ]
        }
        for i in range(17)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(config: Config, run_dir: Path, before: Callable[[], object] = lambda: None) -> Launch:
    """Return a child that trains in `run_dir`, from its newest checkpoint if it has one, and exits with the code of the
    command.

    `before` is called in the child. Its output is appended to OUTPUT_FILE beside the run directory.
    """

    def main() -> int:
        before()
        with exiting_with_code(), RunMetadata.open(run_dir, resume=(run_dir / "run.json").is_file()) as metadata:
            run(config, metadata)
        return 0

    return launch_fork(main, run_dir.parent / OUTPUT_FILE)


def wait_for_exit(child: Launch) -> int | None:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    child.wait(TIMEOUT)
    assert not child.is_hanging
    return child.code


def train(config: Config, run_dir: Path, before: Callable[[], object] = lambda: None) -> int | None:
    return wait_for_exit(launch(config, run_dir, before))


def read_output(run_dir: Path) -> str:
    """Return the end of what the children printed, for assertion messages."""
    return (run_dir.parent / OUTPUT_FILE).read_text()[-3000:]


def read_run_json(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def saved_steps(run_dir: Path) -> list[int]:
    """Return the saved steps, oldest first; every checkpoint must be valid."""
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert [(name, reason) for name in names if (reason := verify_dir(run_dir / "checkpoints" / name))] == []
    return [int(name[5:]) for name in names]


def last_logged_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl: with log_every=1, the last one trained."""
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((record["step"] for record in records if record["kind"] == "train"), default=0)


def temp_files(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.rglob(".*") if path.name.startswith((".tmp-", ".del-"))]
