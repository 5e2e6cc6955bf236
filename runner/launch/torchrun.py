"""Ranks that torchrun has started: `torchrun --nproc-per-node=2 runner/train.py distributed=ddp`.

The first of them goes through the door as always. The others wait there for what it says on torchrun's own store: train this, start a
job of a sweep, or leave. A job of a sweep is a process of its own in every rank, so that no process joins a second group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from runner.engine.config import Config
from runner.engine.distributed import MEETING, DistributedConfig
from runner.engine.signals import StopFlag
from runner.launch import ranklog
from runner.launch.carry import as_rank, handed_over
from runner.launch.processes import begin, end_with_parent, surroundings
from runner.launch.record import RECORD, Record
from runner.launch.refusal import ALONE, DONE, FAILED, INTERRUPTED
from runner.launch.words import ROOT

RUN_ID, RESTART = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
JOB = "RUNNER_JOB"  # which job of a sweep this process is
LOOK = 0.1  # seconds between two looks at the store
GRACE = 30.0  # seconds a rank of a job may outlive the first
PLACE = "place"  # what a restart continues

_said = 0  # messages of this process
_jobs = 0  # jobs this process has announced


def started_us() -> bool:
    return RUN_ID in os.environ


def is_on() -> bool:
    """Whether we are one of several that torchrun has started."""
    return started_us() and _number("WORLD_SIZE", 1) > 1


def leads() -> bool:
    return is_on() and _number("RANK", 0) == 0


def _number(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))


def _prefix() -> str:
    """Keys of this attempt, and within a sweep of this job."""
    return "/".join([os.environ.get(RESTART, "0"), *filter(None, [os.environ.get(JOB)])])


@cache
def _store() -> Any:
    from runner.engine.distributed import open_store

    return open_store("torchrun:runner", _number("WORLD_SIZE", 1), timedelta(minutes=5))


def _say(**message: Any) -> None:
    global _said
    _store().set(f"{_prefix()}/{_said}", json.dumps(message))
    _said += 1


def check(wanted: DistributedConfig) -> None:
    """Refuse words that do not fit how many processes there are."""
    line = f"torchrun --nnodes={wanted.nnodes} --nproc-per-node={'<GPUs of a node>' if wanted.nproc == 'auto' else wanted.nproc}"
    said = f"distributed={wanted.name} distributed.nproc={wanted.nproc} distributed.nnodes={wanted.nnodes}"
    if not started_us():
        if wanted.nnodes > 1:
            meeting = "--rdzv-backend=c10d --rdzv-endpoint=<first node>:29500"
            raise ValueError("torchrun starts what runs on several nodes", said, f"on every node: {line} {meeting} runner/train.py distributed={wanted.name}")
        return
    world, nodes = _number("WORLD_SIZE", 1), _number("GROUP_WORLD_SIZE", 1)
    if wanted.name == "single" and world > 1:
        raise ValueError(f"torchrun has started {world} processes, and a single one is meant to train", said, "add distributed=ddp or distributed=fsdp")
    if (wanted.nnodes > 1 and wanted.nnodes != nodes) or (wanted.name != "single" and wanted.nproc != "auto" and int(wanted.nproc) * wanted.nnodes != world):
        raise ValueError(
            f"torchrun has started {world} processes on {nodes} {'node' if nodes == 1 else 'nodes'}",
            said,
            f"{line} runner/train.py ..., or take those that are there: distributed.nproc=auto distributed.nnodes={nodes}",
        )


def check_launcher(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a sweep that would start its jobs elsewhere, or several at once: each of them needs all ranks."""
    if not is_on():
        return
    if name != "local":
        raise ValueError("a sweep of torchrun's processes goes through our own launcher", f"hydra/launcher={name}", "leave the word out, or leave out torchrun")
    for word in ("workers", "devices"):
        if options[word] not in (None, 1):
            raise ValueError("under torchrun one job at a time trains, on all ranks", f"hydra.launcher.{word}={options[word]}", "leave the word out")


# The first rank


@contextmanager
def leading() -> Iterator[None]:
    """Around all that the first rank does: however it ends, nobody waits for it any longer."""
    if not leads():
        yield
        return
    end_with_parent(os.getppid())()
    try:
        yield
    finally:
        _say(leave=True)


def former() -> Path | None:
    """The run or sweep of before, where torchrun has started us again."""
    if not leads() or JOB in os.environ or _number(RESTART, 0) == 0:
        return None
    return Path(_store().get(PLACE).decode()) if _store().check([PLACE]) else None


def keep(place: Path) -> None:
    """`place` is what a restart continues."""
    if leads() and JOB not in os.environ:
        _store().set(PLACE, str(place))


def call_the_others(config: Config, record: Record) -> None:
    """They train with us from here on."""
    if not leads():
        return
    keep(record.folder)
    record.share(keep=2)
    _meet()
    _say(config=dataclasses.asdict(config), folder=str(record.folder), attempt=record.attempt)


def _meet() -> None:
    os.environ[MEETING] = f"torchrun:runner/{_prefix()}/group"


def announce() -> dict[str, str]:
    """A job of a sweep is about to start: what its process finds in its environment."""
    global _jobs
    if not leads():
        return {}
    _jobs += 1
    _say(job=str(_jobs))
    return {JOB: f"job{_jobs}"}


def job_ended() -> None:
    if leads():
        _say(ended=str(_jobs))


# All the others


def follows() -> bool:
    return is_on() and not leads()


def follow() -> int:
    """Do what the first rank says; returns the exit code."""
    end_with_parent(os.getppid())()
    jobs: dict[str, subprocess.Popen] = {}
    code = INTERRUPTED
    with StopFlag() as stop:
        for message in _heard(stop, jobs):
            if "config" in message:
                return _train(message, stop)
            if "leave" in message:
                code = DONE  # whether or not torchrun, which has seen the first rank leave, tells us to as well
                break
            if "job" in message:
                number = message["job"]
                jobs[number] = begin([str(ROOT / "runner" / "train.py")], surroundings() | {JOB: f"job{number}"}, None)
            if "ended" in message:
                _wait(jobs.pop(message["ended"]), GRACE)
        for job in jobs.values():
            _wait(job, None if stop() else GRACE)
    return code


def _heard(stop: StopFlag, jobs: dict[str, subprocess.Popen]) -> Iterator[dict[str, Any]]:
    """What the first rank says, until we are asked to stop; then the jobs are asked to, and save."""
    store, prefix, number = _store(), _prefix(), 0
    while True:
        if store.check([key := f"{prefix}/{number}"]):  # before all else: the first rank may already wait for us, to stop with us
            number += 1
            yield json.loads(store.get(key))
        elif stop():
            break
        else:
            time.sleep(LOOK)
    for job in jobs.values():
        job.send_signal(signal.SIGTERM)


def _wait(job: subprocess.Popen, seconds: float | None) -> None:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _train(message: dict[str, Any], stop: StopFlag) -> int:
    folder, rank = Path(message["folder"]), _number("RANK", 0)
    _meet()
    config = handed_over(message["config"], folder)
    if not (folder / RECORD).is_file():  # a folder of another node: we speak where we are
        return as_rank(config, Record.of_another_node(folder, message["attempt"]), stop)
    log = ranklog.RankLog(folder, rank, _number("WORLD_SIZE", 1), message["attempt"])
    with Record.attach(folder, rank) as record, ranklog.instead_of_the_terminal(log) as terminal:
        code = as_rank(config, record, stop)
        if code in (FAILED, ALONE):  # what it refuses the first rank refuses too, and has said
            ranklog.tell(rank, log.ending(), terminal)
        return code
