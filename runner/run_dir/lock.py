"""The lock of a run directory, held as long as any process of one launch lives.

A launch locks all bytes of `.lock`. Before it starts ranks it keeps byte 0 only, and rank k locks byte k + 1. The next launch asks for
all bytes again and is refused until the last of these processes has ended. The owner is recorded in a second file, because closing any
descriptor of `.lock` frees the lock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from common.file_lock import FileLock, is_file_locked
from common.filesystem import read_json_object
from runner.run_dir import provenance
from runner.run_dir.naming import create_dirs

LOCK_FILE, OWNER_FILE = ".lock", ".owner.json"
MAX_JSON_BYTES = 16 << 20  # bytes; larger JSON files are not read


def acquire_run(folder: Path) -> FileLock:
    """Lock `folder`, which is created if needed. Raises UserError, which names the owner, if it is locked."""
    try:
        create_dirs(folder)
        return FileLock.acquire(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise busy_error(folder) from error
    except OSError as error:
        raise unusable_error(folder, error) from error


def acquire_rank(folder: Path, rank: int) -> FileLock:
    """Lock the byte of `rank`, of the launch that holds the lock of `folder`."""
    try:
        return FileLock.acquire(folder / LOCK_FILE, start=rank + 1, length=1)
    except BlockingIOError as error:
        raise busy_error(folder) from error
    except OSError as error:
        raise unusable_error(folder, error) from error


def busy_error(folder: Path) -> UserError:
    return UserError(
        f"this run is being trained by {describe_holder(folder)}", str(folder), "wait for it to end; hydra.run.dir=DIR places a new run in another directory"
    )


def unusable_error(folder: Path, error: OSError) -> UserError:
    return UserError(f"the run directory cannot be used: {error.strerror or error}", str(folder), "place the run in another directory with hydra.run.dir=DIR")


def describe_processes(pids: list[int]) -> list[dict[str, Any]]:
    """Return what `provenance.process_id` returns, for child processes."""
    return [{**provenance.process_id(), "pid": pid, "start_ticks": provenance.start_ticks(pid)} for pid in pids]


def is_locked(folder: Path) -> bool:
    """Return whether a process trains in `folder`."""
    return is_file_locked(folder / LOCK_FILE)


def describe_holder(folder: Path) -> str:
    owner = read_json_object(folder / OWNER_FILE)
    since = f"on {owner.get('host')} since {owner.get('since')}"
    try:
        if owner and provenance.is_alive(owner):
            return f"process {owner.get('pid')} {since}"
        ranks = [str(rank["pid"]) for rank in owner.get("ranks", []) if provenance.is_alive(rank)]
    except (AttributeError, TypeError, KeyError):
        ranks = []
    return f"process {', '.join(ranks)} {since}, ranks whose launcher has died; they save and exit" if ranks else "another process"
