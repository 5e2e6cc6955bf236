"""Locks on file systems without lockf: an owner file that names the process, and what happens to it when that process
dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from common import filesystem, ownership
from common.file_lock import NO_LOCKS, NO_LOCKS_PROMISE, FileLock, is_file_locked
from common.ownership import process_id


def refuse_locks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(filesystem, "WEAKER_PROMISES", [])


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_locks(errno.ENOLCK, monkeypatch)


def write_owner(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**process_id(), **changed}))


@pytest.mark.parametrize("number", sorted(NO_LOCKS), ids=errno.errorcode.get)
def test_lock_without_lockf_is_exclusive_and_says_what_is_weaker(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(number, monkeypatch)
    with FileLock.acquire(tmp_path / "lock") as lock:
        assert is_file_locked(tmp_path / "lock") and lock.is_intact()
        assert json.loads((tmp_path / "lock.owner").read_text())["pid"] == os.getpid()
        with pytest.raises(BlockingIOError):
            FileLock.acquire(tmp_path / "lock")
    assert not is_file_locked(tmp_path / "lock") and os.listdir(tmp_path) == ["lock"]
    assert filesystem.WEAKER_PROMISES == [NO_LOCKS_PROMISE]


DEAD = json.dumps({**process_id(), "start_ticks": 1})


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({**process_id(), "host": "another"}),
        "{",
        "",
        DEAD.replace("{", '{"pid": 1, '),
        DEAD.replace(f'"pid": {os.getpid()}', '"pid": 1e400'),
    ],
    ids=["another host", "unreadable", "empty", "two pids", "no pid"],
)
def test_lock_of_an_owner_that_may_live_is_busy(content: str, tmp_path: Path) -> None:
    (tmp_path / "lock.owner").write_text(content)
    with pytest.raises(BlockingIOError):
        FileLock.acquire(tmp_path / "lock")
    assert is_file_locked(tmp_path / "lock") and (tmp_path / "lock.owner").exists()


def test_lock_of_a_dead_process_of_this_host_is_taken(tmp_path: Path) -> None:
    for changed in ({"start_ticks": 1}, {"boot_id": "before the restart"}):
        write_owner(tmp_path / "lock.owner", **changed)
        write_owner(tmp_path / "lock.owner-2", **changed)
        assert not is_file_locked(tmp_path / "lock")
        FileLock.acquire(tmp_path / "lock").release()
        assert os.listdir(tmp_path) == ["lock"]


def test_lock_that_shrinks_lets_other_processes_take_their_byte(tmp_path: Path) -> None:
    lock = FileLock.acquire(tmp_path / "lock")
    (tmp_path / "lock.owner").rename(tmp_path / "mine")
    write_owner(tmp_path / "lock.owner", host="another")
    assert not lock.is_intact()  # another process has put its file there
    (tmp_path / "mine").rename(tmp_path / "lock.owner")
    assert lock.is_intact()
    lock.shrink(1)
    assert lock.is_intact() and (tmp_path / "lock.owner-0").exists()
    lock.release()
    write_owner(tmp_path / "lock.owner-0", host="another")  # a launcher that allows ranks
    rank = FileLock.acquire(tmp_path / "lock", start=2, length=1)
    assert is_file_locked(tmp_path / "lock")
    rank.release()
    with pytest.raises(BlockingIOError):
        FileLock.acquire(tmp_path / "lock")
    (tmp_path / "lock.owner-0").rename(tmp_path / "lock.owner")  # a launcher that does not
    with pytest.raises(BlockingIOError):
        FileLock.acquire(tmp_path / "lock", start=2, length=1)


def test_process_that_has_ended_and_was_not_waited_for_is_not_alive() -> None:
    """In a container whose first process reaps no orphans, killed ranks stay zombies for ever: they must not keep a run
    busy.
    """
    if not (child := os.fork()):
        signal.pause()
    described = {**ownership.process_id(), "pid": child, "start_ticks": ownership.start_ticks(child)}
    assert ownership.is_alive(described)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not ownership.is_alive(described)
    os.waitpid(child, 0)


def test_process_without_a_start_time_is_known_by_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "start_ticks", lambda pid: None)
    me = ownership.process_id()
    assert (
        ownership.is_alive(me)
        and not ownership.is_alive({**me, "pid": 1 << 22})
        and not ownership.is_alive({**me, "pid": "x"})
    )
