"""Ranks started by torchrun: `torchrun --nproc-per-node=2 runner/train.py distributed=ddp`.

Rank 0 runs the command line as usual. The other ranks read its messages from torchrun's store: train this config, start
a job of a sweep, exit. Each job of a sweep is a new process on every rank, so that no process joins two process groups.
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
from typing import TYPE_CHECKING, Any

from common.errors import FAILED, INTERRUPTED, OK, PEER_LOST, UserError
from common.paths import REPO_ROOT
from runner.engine.config import Config
from runner.engine.device.distributed import RENDEZVOUS_ENV, DistributedConfig

if TYPE_CHECKING:
    from runner.engine.device.signals import StopFlag
    from runner.run_dir.metadata import RunMetadata

RUN_ID, RESTART_COUNT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
JOB_ENV = "RUNNER_JOB"  # the job of a sweep that this process trains
STORE_POLL_SECONDS = 0.1
JOB_GRACE = 30.0  # seconds for a rank of a job to exit once rank 0 begins the next job or exits
RESTART_DIR_KEY = "restart_dir"  # run or sweep directory that a restart continues

_messages_sent = 0  # by this process
_jobs_announced = 0  # by this process


def under_torchrun() -> bool:
    return RUN_ID in os.environ


def is_multi_process() -> bool:
    """Return whether torchrun has started this process as one of several ranks."""
    return under_torchrun() and _env_int("WORLD_SIZE", 1) > 1


def is_rank_zero() -> bool:
    return is_multi_process() and _env_int("RANK", 0) == 0


def _env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _prefix() -> str:
    """Prefix of the store keys of this restart and, in a sweep, of this job."""
    return "/".join([os.environ.get(RESTART_COUNT, "0"), *filter(None, [os.environ.get(JOB_ENV)])])


@cache
def _store() -> Any:
    from runner.engine.device.distributed import open_store

    return open_store("torchrun:runner", _env_int("WORLD_SIZE", 1), timedelta(minutes=5))


def _send(**message: Any) -> None:
    global _messages_sent
    _store().set(f"{_prefix()}/{_messages_sent}", json.dumps(message))
    _messages_sent += 1


def check_world(wanted: DistributedConfig) -> None:
    """Raise UserError where the settings do not fit the processes that torchrun has started."""
    command = f"torchrun --nnodes={wanted.nnodes} --nproc-per-node={'<GPUs per node>' if wanted.nproc == 'auto' else wanted.nproc}"
    given = f"distributed={wanted.name} distributed.nproc={wanted.nproc} distributed.nnodes={wanted.nnodes}"
    if not under_torchrun():
        if wanted.nnodes > 1:
            rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=<first node>:29500"
            raise UserError(
                f"distributed.nnodes={wanted.nnodes} needs torchrun on every node",
                given,
                f"on every node: {command} {rendezvous} runner/train.py distributed={wanted.name}",
            )
        return
    world, nodes = _env_int("WORLD_SIZE", 1), _env_int("GROUP_WORLD_SIZE", 1)
    if wanted.name == "single" and world > 1:
        raise UserError(
            f"torchrun has started {world} processes, but distributed=single trains in one",
            given,
            "add distributed=ddp or distributed=fsdp",
        )
    wrong_nodes = wanted.nnodes > 1 and wanted.nnodes != nodes
    wrong_world = wanted.name != "single" and wanted.nproc != "auto" and int(wanted.nproc) * wanted.nnodes != world
    if wrong_nodes or wrong_world:
        raise UserError(
            f"torchrun has started {world} processes on {nodes} {'node' if nodes == 1 else 'nodes'}, the settings ask for another number",
            given,
            f"{command} runner/train.py ..., or use the processes there are: distributed.nproc=auto distributed.nnodes={nodes}",
        )


def check_sweep_launcher(name: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for a sweep under torchrun that starts its jobs on other machines or several at once: each job
    needs all ranks.
    """
    if not is_multi_process():
        return
    if name != "local":
        raise UserError(
            f"under torchrun a sweep needs hydra/launcher=local, got {name}",
            f"hydra/launcher={name}",
            "leave the override out, or do not use torchrun",
        )
    for key in ("workers", "devices"):
        if options[key] not in (None, 1):
            raise UserError(
                f"under torchrun one job at a time trains on all ranks; hydra.launcher.{key} must be 1",
                f"hydra.launcher.{key}={options[key]}",
                "leave the override out",
            )


# --- rank 0 ---


@contextmanager
def releasing_workers() -> Iterator[None]:
    """Wrap everything that rank 0 of several does: however it ends, rank 0 makes the other ranks exit."""
    from runner.launch.subprocesses import die_with_parent

    die_with_parent(os.getppid())()
    try:
        yield
    finally:
        _send(exit=True)


def previous_run_dir() -> Path | None:
    """Return the run or sweep directory of the previous attempt if torchrun has restarted this process."""
    if not is_rank_zero() or JOB_ENV in os.environ or _env_int(RESTART_COUNT, 0) == 0:
        return None
    return Path(_store().get(RESTART_DIR_KEY).decode()) if _store().check([RESTART_DIR_KEY]) else None


def set_restart_dir(folder: Path) -> None:
    """Make `folder` what a restart continues."""
    if is_rank_zero() and JOB_ENV not in os.environ:
        _store().set(RESTART_DIR_KEY, str(folder))


def broadcast_config(config: Config, metadata: RunMetadata) -> None:
    """Make the other ranks join the training of `config`, which rank 0 of several calls."""
    set_restart_dir(metadata.folder)
    metadata.allow_ranks(keep=2)
    _set_rendezvous()
    _send(config=dataclasses.asdict(config), folder=str(metadata.folder), attempt=metadata.attempt)


def _set_rendezvous() -> None:
    os.environ[RENDEZVOUS_ENV] = f"torchrun:runner/{_prefix()}/group"


def begin_job() -> dict[str, str]:
    """Tell the other ranks to start their process of the next job; return the environment for the process of rank 0."""
    global _jobs_announced
    if not is_rank_zero():
        return {}
    _jobs_announced += 1
    variables = {JOB_ENV: f"job{_jobs_announced}"}
    _send(job=variables)
    return variables


# --- the other ranks ---


def worker_main() -> int:
    """Execute the messages of rank 0; return the exit code."""
    from runner.engine.device.signals import StopFlag
    from runner.launch.subprocesses import die_with_parent, spawn

    die_with_parent(os.getppid())()
    jobs: list[subprocess.Popen] = []
    code = INTERRUPTED
    with StopFlag() as stop:
        for message in _messages(stop, jobs):
            if "config" in message:
                return _train_rank(message, stop)
            if "exit" in message:
                code = OK  # also if torchrun, which has seen rank 0 exit, sends SIGTERM
                break
            _wait_for_jobs(jobs, JOB_GRACE)  # the former one has ended on rank 0
            jobs.append(spawn([str(REPO_ROOT / "runner" / "train.py")], message["job"], None))
        _wait_for_jobs(jobs, None if stop() else JOB_GRACE)
    return code


def _messages(stop: StopFlag, jobs: list[subprocess.Popen]) -> Iterator[dict[str, Any]]:
    """Yield the messages of rank 0 until a stop signal arrives; then forward the signal to the jobs, which save."""
    store, prefix, number = _store(), _prefix(), 0
    while True:
        # before `stop()`: rank 0 may already wait for this rank in a collective
        if store.check([key := f"{prefix}/{number}"]):
            number += 1
            yield json.loads(store.get(key))
        elif stop():
            break
        else:
            time.sleep(STORE_POLL_SECONDS)
    for job in jobs:
        job.send_signal(signal.SIGTERM)


def _wait_for_jobs(jobs: list[subprocess.Popen], seconds: float | None) -> None:
    for job in jobs:
        try:
            job.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _train_rank(message: dict[str, Any], stop: StopFlag) -> int:
    from runner.launch import subprocesses
    from runner.launch.train_process import config_from_json, train_as_rank
    from runner.run_dir.contents import RUN_FILE
    from runner.run_dir.metadata import RunMetadata

    folder, rank = Path(message["folder"]), _env_int("RANK", 0)
    _set_rendezvous()
    config = config_from_json(message["config"], folder)
    if not (folder / RUN_FILE).is_file():  # another node, without a shared file system: print to its terminal
        return train_as_rank(config, RunMetadata.detached(folder, message["attempt"]), stop)
    log = subprocesses.RankLog(folder, rank, _env_int("WORLD_SIZE", 1), message["attempt"])
    with RunMetadata.attach(folder, rank) as metadata, subprocesses.redirect_stdio_to(log) as terminal:
        code = train_as_rank(config, metadata, stop)
        if code in (FAILED, PEER_LOST):  # a user error is printed by rank 0
            subprocesses.print_rank_lines(rank, log.last_error_lines(), terminal)
        return code
