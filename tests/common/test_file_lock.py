import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.file_lock import FileLock, is_file_locked, lock_holder

ROOT = Path(__file__).parents[2]


def start_holder(path, start=0, length=0):
    """Start a process that holds a lock until its stdin closes."""
    code = f"from pathlib import Path; from common.file_lock import FileLock; lock = FileLock.acquire(Path({str(path)!r}), {start}, {length})"
    command = [sys.executable, "-c", f"{code}; print('held', flush=True); input()"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_lock_of_another_process_is_busy_until_it_is_killed(tmp_path):
    with start_holder(tmp_path / "lock") as other:
        assert is_file_locked(tmp_path / "lock")
        assert lock_holder(tmp_path / "lock") == other.pid
        with pytest.raises(BlockingIOError):
            FileLock.acquire(tmp_path / "lock")
        other.kill()
        other.wait()
        assert not is_file_locked(tmp_path / "lock") and lock_holder(tmp_path / "lock") is None
        FileLock.acquire(tmp_path / "lock").release()


def test_lock_held_by_this_process_is_busy_and_survives_the_question(tmp_path):
    with FileLock.acquire(tmp_path / "lock"):
        with pytest.raises(BlockingIOError):
            FileLock.acquire(tmp_path / "lock", wait=True)
        assert is_file_locked(tmp_path / "lock")
        code = "import sys; from pathlib import Path; from common.file_lock import is_file_locked; sys.exit(is_file_locked(Path(sys.argv[1])))"
        assert subprocess.run([sys.executable, "-c", code, tmp_path / "lock"], cwd=ROOT).returncode == 1
    assert not is_file_locked(tmp_path / "lock")


def test_lock_is_not_inherited_by_a_forked_child(tmp_path):
    lock = FileLock.acquire(tmp_path / "lock")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has released
        os._exit(0)
    os.close(read)
    lock.release()
    assert not is_file_locked(tmp_path / "lock")
    os.close(write)
    os.waitpid(pid, 0)


def test_lock_that_shrinks_leaves_the_bytes_behind_it_to_others(tmp_path):
    with FileLock.acquire(tmp_path / "lock") as lock:
        lock.shrink(1)
        with start_holder(tmp_path / "lock", start=2, length=1) as other:
            other.communicate("\n")
    assert not is_file_locked(tmp_path / "lock")


def test_lock_question_creates_no_file(tmp_path):
    assert not is_file_locked(tmp_path / "lock") and not list(tmp_path.iterdir())


def test_lock_of_a_file_that_this_user_cannot_write_is_seen(tmp_path, monkeypatch):
    real_open = os.open

    def read_only(path, flags, *args):
        if flags & (os.O_WRONLY | os.O_RDWR):  # chmod has no effect for root
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *args)

    with start_holder(tmp_path / "lock") as other:
        monkeypatch.setattr(os, "open", read_only)
        assert is_file_locked(tmp_path / "lock") and lock_holder(tmp_path / "lock") == other.pid
        other.communicate("\n")
    assert not is_file_locked(tmp_path / "lock")


def test_lock_on_a_file_that_its_holder_deleted_is_taken_again(tmp_path, monkeypatch):
    """The holder deletes the file between open and lockf of this process: a lock on the deleted file would exclude no
    process.
    """
    opened = []

    def lockf(fd, *args):
        opened.append(fd)
        if len(opened) == 1:
            (tmp_path / "lock").unlink()
        fcntl_lockf(fd, *args)

    fcntl_lockf = fcntl.lockf
    monkeypatch.setattr("fcntl.lockf", lockf)
    with FileLock.acquire(tmp_path / "lock"):
        assert len(opened) == 2 and (tmp_path / "lock").is_file()


def test_lock_is_released_with_its_file(tmp_path):
    FileLock.acquire(tmp_path / "lock").release(delete=True)
    assert not list(tmp_path.iterdir())
    FileLock.acquire(tmp_path / "lock").release()
