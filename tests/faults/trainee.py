"""A small run in a child of its own, to be killed, signalled and relaunched. torch is imported before the fork: a launch costs milliseconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch._dynamo  # the first AdamW would import it, for a second, in every child

from common.filesystem import FileSystem
from runner.checkpoint import atomic_dir
from runner.cli import entrypoint
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.launch.run import run
from runner.run_dir.metadata import RunMetadata

PATIENCE = 120  # seconds; a child that hangs is ended, and its test fails instead of the whole session
STEPS = 16  # 15 rows to train on in steps of 2, two epochs
WORDS = [
    "stage=sft", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=8",
    "model.intermediate_size=64", "model.max_position_embeddings=128", "model.dropout=0.1", "data.max_length=64", "data.packing=none", "data.val_path=null", "data.val_fraction=0.1", "train.batch_size=2",
    "train.epochs=2", "train.log_every=1", "train.save_every=1", "train.eval_every=5", "train.sample_every=6", "train.sample_tokens=4", "stage.prompts=[goats]", "optimizer.lr=1e-3",
    "schedule.warmup_steps=0", "tracker.console=quiet", "device=cpu",
]  # fmt: skip


class SlowDisk(FileSystem):
    """In memory a sync takes no time, and no kill would ever meet one."""

    SYNC = 0.002  # seconds

    @classmethod
    def fsync(cls, fd: int) -> None:
        os.fsync(fd)
        time.sleep(cls.SYNC)


@contextmanager
def room(otherwise: Path) -> Iterator[Path]:
    """A folder in memory where the system offers that: hundreds of saves take minutes on a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else otherwise) as folder:
        yield Path(folder)


def config(folder: Path, *words: str) -> Config:
    """The small run on 17 ragged conversations that are written into `folder`."""
    torch.set_num_threads(1)
    said = ["the lake of Oru", "lies north", "of the old mill where Tami keeps nine grey goats", "and sings", "to them of the moon"]
    rows = [{"conversations": [{"role": "user", "content": said[i % 5]}, {"role": "assistant", "content": " ".join(said[: 1 + i % 4])}]} for i in range(17)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return compose_config([*WORDS, f"data.path={folder / 'rows.jsonl'}", f"data.cache={folder / 'cache'}", *words])


def launch(config: Config, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """The pid of a child that trains in `folder`, from its newest checkpoint if it has one, and leaves with the code of the command.

    `before` is called in the child. What it prints goes to the file `said` beside the folder.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    signal.alarm(PATIENCE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # an earlier test may have started the tokenizers' threads: a fork has none of them, and would wait
    try:
        said = os.open(folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        before()
        code = _train(config, folder)
        wind_up()
    finally:
        os._exit(code)


def wind_up() -> None:
    """As at the end of any program: the writer is waited for."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush(), sys.stderr.flush()


def _train(config: Config, folder: Path) -> int:
    try:
        with RunMetadata.open(folder, resume=(folder / "run.json").is_file()) as record:
            run(config, record)
        return 0
    except Exception as error:
        try:
            entrypoint.exit_with_code_of(error)
        except SystemExit as leaving:
            return leaving.code
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


def code_of(child: int) -> int:
    """How it ended, once it has: an exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(config: Config, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    return code_of(launch(config, folder, before))


def record_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def steps_of(folder: Path) -> list[int]:
    """The saved steps, oldest first; each must prove whole."""
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert [(name, reason) for name in names if (reason := atomic_dir.verify_dir(folder / "checkpoints" / name))] == []
    return [int(name[5:]) for name in names]


def trained(folder: Path) -> int:
    """Steps whose line stands in metrics.jsonl: with log_every=1, those that were done."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)


def litter(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name.startswith((".tmp-", ".del-"))]
