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

from common.errors import UserError
from common.exit_codes import FAILED, INTERRUPTED, OK, PEER_LOST
from common.paths import REPO_ROOT
from runner.engine.config import Config
from runner.engine.device.distributed import RENDEZVOUS_ENV, DistributedConfig
from runner.launch import rank_logs
from runner.launch.signals import StopFlag
from runner.launch.subprocesses import child_env, die_with_parent, spawn
from runner.launch.train_process import config_from_json, train_as_rank
from runner.run_dir.metadata import RUN_FILE, RunMetadata

RUN_ID, RESTART_COUNT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
JOB_ENV = "RUNNER_JOB"  # which job of a sweep this process is
STORE_POLL_SECONDS = 0.1  # seconds between two looks at the store
JOB_GRACE = 30.0  # seconds a rank of a job may outlive the first
RESTART_DIR_KEY = "place"  # what a restart continues

_messages_sent = 0  # messages of this process
_jobs_announced = 0  # jobs this process has announced


def under_torchrun() -> bool:
    return RUN_ID in os.environ


def is_multi_process() -> bool:
    """Whether we are one of several that torchrun has started."""
    return under_torchrun() and _number("WORLD_SIZE", 1) > 1


def is_rank_zero() -> bool:
    return is_multi_process() and _number("RANK", 0) == 0


def _number(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))


def _prefix() -> str:
    """Keys of this attempt, and within a sweep of this job."""
    return "/".join([os.environ.get(RESTART_COUNT, "0"), *filter(None, [os.environ.get(JOB_ENV)])])


@cache
def _store() -> Any:
    from runner.engine.device.distributed import open_store

    return open_store("torchrun:runner", _number("WORLD_SIZE", 1), timedelta(minutes=5))


def _send(**message: Any) -> None:
    global _messages_sent
    _store().set(f"{_prefix()}/{_messages_sent}", json.dumps(message))
    _messages_sent += 1


def check_world(wanted: DistributedConfig) -> None:
    """Refuse words that do not fit how many processes there are."""
    line = f"torchrun --nnodes={wanted.nnodes} --nproc-per-node={'<GPUs of a node>' if wanted.nproc == 'auto' else wanted.nproc}"
    said = f"distributed={wanted.name} distributed.nproc={wanted.nproc} distributed.nnodes={wanted.nnodes}"
    if not under_torchrun():
        if wanted.nnodes > 1:
            meeting = "--rdzv-backend=c10d --rdzv-endpoint=<first node>:29500"
            raise UserError("torchrun starts what runs on several nodes", said, f"on every node: {line} {meeting} runner/train.py distributed={wanted.name}")
        return
    world, nodes = _number("WORLD_SIZE", 1), _number("GROUP_WORLD_SIZE", 1)
    if wanted.name == "single" and world > 1:
        raise UserError(f"torchrun has started {world} processes, and a single one is meant to train", said, "add distributed=ddp or distributed=fsdp")
    if (wanted.nnodes > 1 and wanted.nnodes != nodes) or (wanted.name != "single" and wanted.nproc != "auto" and int(wanted.nproc) * wanted.nnodes != world):
        raise UserError(
            f"torchrun has started {world} processes on {nodes} {'node' if nodes == 1 else 'nodes'}",
            said,
            f"{line} runner/train.py ..., or take those that are there: distributed.nproc=auto distributed.nnodes={nodes}",
        )


def check_sweep_launcher(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a sweep that would start its jobs elsewhere, or several at once: each of them needs all ranks."""
    if not is_multi_process():
        return
    if name != "local":
        raise UserError("a sweep of torchrun's processes goes through our own launcher", f"hydra/launcher={name}", "leave the word out, or leave out torchrun")
    for word in ("workers", "devices"):
        if options[word] not in (None, 1):
            raise UserError("under torchrun one job at a time trains, on all ranks", f"hydra.launcher.{word}={options[word]}", "leave the word out")


# The first rank


@contextmanager
def releasing_workers() -> Iterator[None]:
    """Around all that the first rank does: however it ends, nobody waits for it any longer."""
    if not is_rank_zero():
        yield
        return
    die_with_parent(os.getppid())()
    try:
        yield
    finally:
        _send(leave=True)


def previous_run_dir() -> Path | None:
    """The run or sweep of before, where torchrun has started us again."""
    if not is_rank_zero() or JOB_ENV in os.environ or _number(RESTART_COUNT, 0) == 0:
        return None
    return Path(_store().get(RESTART_DIR_KEY).decode()) if _store().check([RESTART_DIR_KEY]) else None


def set_restart_dir(place: Path) -> None:
    """`place` is what a restart continues."""
    if is_rank_zero() and JOB_ENV not in os.environ:
        _store().set(RESTART_DIR_KEY, str(place))


def broadcast_config(config: Config, record: RunMetadata) -> None:
    """They train with us from here on."""
    if not is_rank_zero():
        return
    set_restart_dir(record.folder)
    record.share(keep=2)
    _set_rendezvous()
    _send(config=dataclasses.asdict(config), folder=str(record.folder), attempt=record.attempt)


def _set_rendezvous() -> None:
    os.environ[RENDEZVOUS_ENV] = f"torchrun:runner/{_prefix()}/group"


def begin_job() -> dict[str, str]:
    """A job of a sweep is about to start: what its process finds in its environment."""
    global _jobs_announced
    if not is_rank_zero():
        return {}
    _jobs_announced += 1
    _send(job=str(_jobs_announced))
    return {JOB_ENV: f"job{_jobs_announced}"}


def end_job() -> None:
    if is_rank_zero():
        _send(ended=str(_jobs_announced))


# All the others


def is_worker() -> bool:
    return is_multi_process() and not is_rank_zero()


def worker_main() -> int:
    """Do what the first rank says; returns the exit code."""
    die_with_parent(os.getppid())()
    jobs: dict[str, subprocess.Popen] = {}
    code = INTERRUPTED
    with StopFlag() as stop:
        for message in _messages(stop, jobs):
            if "config" in message:
                return _train_rank(message, stop)
            if "leave" in message:
                code = OK  # whether or not torchrun, which has seen the first rank leave, tells us to as well
                break
            if "job" in message:
                number = message["job"]
                jobs[number] = spawn([str(REPO_ROOT / "runner" / "train.py")], child_env() | {JOB_ENV: f"job{number}"}, None)
            if "ended" in message:
                _wait_for_job(jobs.pop(message["ended"]), JOB_GRACE)
        for job in jobs.values():
            _wait_for_job(job, None if stop() else JOB_GRACE)
    return code


def _messages(stop: StopFlag, jobs: dict[str, subprocess.Popen]) -> Iterator[dict[str, Any]]:
    """What the first rank says, until we are asked to stop; then the jobs are asked to, and save."""
    store, prefix, number = _store(), _prefix(), 0
    while True:
        if store.check([key := f"{prefix}/{number}"]):  # before all else: the first rank may already wait for us, to stop with us
            number += 1
            yield json.loads(store.get(key))
        elif stop():
            break
        else:
            time.sleep(STORE_POLL_SECONDS)
    for job in jobs.values():
        job.send_signal(signal.SIGTERM)


def _wait_for_job(job: subprocess.Popen, seconds: float | None) -> None:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _train_rank(message: dict[str, Any], stop: StopFlag) -> int:
    folder, rank = Path(message["folder"]), _number("RANK", 0)
    _set_rendezvous()
    config = config_from_json(message["config"], folder)
    if not (folder / RUN_FILE).is_file():  # a folder of another node: we speak where we are
        return train_as_rank(config, RunMetadata.of_another_node(folder, message["attempt"]), stop)
    log = rank_logs.RankLog(folder, rank, _number("WORLD_SIZE", 1), message["attempt"])
    with RunMetadata.attach(folder, rank) as record, rank_logs.redirect_stdio_to(log) as terminal:
        code = train_as_rank(config, record, stop)
        if code in (FAILED, PEER_LOST):  # what it refuses the first rank refuses too, and has said
            rank_logs.print_rank_lines(rank, log.ending(), terminal)
        return code
