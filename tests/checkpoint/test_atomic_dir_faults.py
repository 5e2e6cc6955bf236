"""Atomic folders under faults: a kill or a write error at every system call, and disks that are full or read-only."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import filesystem
from common.filesystem import FileSystem
from runner.checkpoint import atomic_dir

ROOT = Path(__file__).parents[2]
CALLS = ("mkdir", "open", "read", "write", "fsync", "close", "rename", "unlink", "rmdir", "free")
SAVES = 4


def contents(step: int) -> dict[str, bytes]:
    return {"model": bytes([step]) * 20_000, "state": b"%d" % step * 700}  # 20,700 bytes


def save(folder: Path, step: int) -> None:
    atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", contents(step), {"step": step})


def after_save(folder: Path, step: int) -> None:
    """What a run writes after each save."""
    atomic_dir.write_pointer(folder, "latest", f"step-{step:08d}")
    atomic_dir.prune_dirs(folder, 2, protect=set())
    filesystem.write_json(folder.parent / "run.json", {"step": step})


def read_valid(folder: Path) -> dict[int, dict[str, bytes]]:
    names = sorted(path.name for path in folder.glob("step-*") if atomic_dir.verify_dir(path) is None)
    return {int(name[5:]): {file: (folder / name / file).read_bytes() for file in contents(1)} for name in names}


def temp_files(folder: Path) -> list[str]:
    return [path.name for path in (*folder.glob(".tmp-*"), *folder.glob(".del-*"))]


class FaultyCall(FileSystem):
    """Records the names of all calls and runs `fault(name)` at call number `index`.

    By then a write is half done and a close is done.
    """

    def __init__(self, index: int, fault: Callable[[str], None] | None = None) -> None:
        self.index, self.fault, self.calls = index, fault, []

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        return self._with_fault(name, call) if name in CALLS else call

    def _with_fault(self, name: str, call: Callable) -> Callable:
        def faulty(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) - 1 != self.index:
                return call(*args, **kwargs)
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            if name == "close":
                call(*args)
            self.fault(name)

        return faulty


def record_calls(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recorder = FaultyCall(-1)
    monkeypatch.setattr(filesystem, "fs", recorder)
    work()
    monkeypatch.undo()
    return recorder.calls


def raise_os_error(number: int) -> Callable[[str], None]:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault


# --- kills ----------------------------------------------------------------------------------------------------------


def save_remaining(folder: Path, committed: int) -> None:
    """Continue from the newest valid folder to the last save; write one byte to the file descriptor `committed` after
    each commit.
    """
    folder.mkdir(exist_ok=True)
    atomic_dir.remove_temp(folder)
    newest, _ = atomic_dir.newest_valid(folder)
    for step in range(int(newest.name[5:]) + 1 if newest else 1, SAVES + 1):
        save(folder, step)
        os.write(committed, bytes([step]))
        after_save(folder, step)


def kill_at_call(index: int, folder: Path, committed: int) -> int:
    """Return the wait status of a child that runs `save_remaining` and is killed at call number `index`."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        filesystem.fs, filesystem.CHUNK_BYTES = (
            FaultyCall(index, lambda name: os.kill(os.getpid(), signal.SIGKILL)),
            8_000,
        )
        save_remaining(folder, committed)
        os._exit(0)
    finally:
        os._exit(99)


# the child makes a few system calls, then dies
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 20], ids=["every call", "every 20th"])
def test_kill_at_any_call_loses_no_committed_folder(
    stride: int, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "CHUNK_BYTES", 8_000)
    devnull = os.open(os.devnull, os.O_WRONLY)
    calls = record_calls(lambda: save_remaining(memory_dir / "reference", devnull), monkeypatch)
    reference = read_valid(memory_dir / "reference")
    assert len(calls) >= 100 and {"mkdir", "write", "fsync", "rename", "unlink", "rmdir"} <= set(calls)
    for index in range(0, len(calls), stride):
        folder, where = memory_dir / f"killed{index}", f"killed at call {index} ({calls[index]})"
        committed = os.open(memory_dir / f"committed{index}", os.O_WRONLY | os.O_CREAT)
        status = kill_at_call(index, folder, committed)
        os.close(committed)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
            f"{where}: the child ended with {status}"
        )
        newest, skipped = atomic_dir.newest_valid(folder)
        assert not skipped, f"{where}: {skipped}"
        assert (int(newest.name[5:]) if newest else 0) >= max(
            (memory_dir / f"committed{index}").read_bytes(), default=0
        ), where
        assert all(files == contents(step) for step, files in read_valid(folder).items()), where
        save_remaining(folder, devnull)
        after_save(folder, SAVES)
        assert read_valid(folder) == reference and not temp_files(folder), where
    os.close(devnull)


# --- write errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
def test_error_at_any_call_of_a_save_keeps_the_previous_folder(
    number: int, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory_dir, 1)
    calls = record_calls(lambda: save(memory_dir, 2), monkeypatch)
    atomic_dir.discard_dir(memory_dir / "step-00000002")
    for index, name in enumerate(calls):
        monkeypatch.setattr(filesystem, "fs", FaultyCall(index, raise_os_error(number)))
        with pytest.raises(atomic_dir.SaveError) as caught:
            save(memory_dir, 2)
        monkeypatch.undo()
        assert (
            caught.value.errno == number
            and caught.value.need == 20_700
            and f"{atomic_dir.space_for(20_700):,} bytes" in str(caught.value)
        )
        assert read_valid(memory_dir)[1] == contents(1) and not temp_files(memory_dir), f"call {index} ({name})"
        if (memory_dir / "step-00000002").exists():  # an error after the rename: complete, though not promised
            assert read_valid(memory_dir)[2] == contents(2)
            atomic_dir.discard_dir(memory_dir / "step-00000002")


def test_error_while_pruning_deletes_no_folder_that_is_kept(memory_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_three(folder: Path) -> Path:
        folder.mkdir()
        for step in (1, 2, 3):
            save(folder, step)
        return folder

    reference = save_three(memory_dir / "reference")
    calls = record_calls(lambda: after_save(reference, 3), monkeypatch)
    for index, name in enumerate(calls):
        folder = save_three(memory_dir / f"call{index}")
        monkeypatch.setattr(filesystem, "fs", FaultyCall(index, raise_os_error(errno.EIO)))
        try:
            after_save(folder, 3)
        except OSError:
            pass  # no error is raised where reading a folder failed: it does not count as valid then
        monkeypatch.undo()
        assert {2, 3} <= read_valid(folder).keys(), f"call {index} ({name})"
        atomic_dir.remove_temp(folder)
        after_save(folder, 3)
        assert read_valid(folder) == {2: contents(2), 3: contents(3)} and not temp_files(folder)


def test_newest_valid_skips_a_folder_that_cannot_be_read(memory_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(memory_dir, 1)
    save(memory_dir, 2)
    calls = record_calls(lambda: atomic_dir.verify_dir(memory_dir / "step-00000002"), monkeypatch)
    for index, name in enumerate(calls):
        monkeypatch.setattr(filesystem, "fs", FaultyCall(index, raise_os_error(errno.EIO)))
        newest, skipped = atomic_dir.newest_valid(memory_dir)
        monkeypatch.undo()
        assert newest == memory_dir / "step-00000001" and skipped[0][0] == "step-00000002", f"call {index} ({name})"
        assert os.strerror(errno.EIO) in skipped[0][1]


# --- full and read-only disks ---------------------------------------------------------------------------------------


def test_save_without_enough_free_space_is_refused_before_writing(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FaultyCall(-1)
    monkeypatch.setattr(recorder, "free", lambda folder: 1_000_000, raising=False)
    monkeypatch.setattr(filesystem, "fs", recorder)
    with pytest.raises(atomic_dir.SaveError) as caught:
        save(memory_dir, 1)
    assert (caught.value.errno, caught.value.need) == (errno.ENOSPC, 20_700)
    assert "1,000,000 bytes are free" in str(caught.value)
    assert not {"mkdir", "write", "rename"} & set(recorder.calls) and not os.listdir(memory_dir)


def run_program(program: str, *args: object) -> dict:
    """Run `program` in its own process, which may limit itself; return the JSON object that it prints last."""
    prelude = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\nfrom test_atomic_dir_faults import *\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + program, *map(str, args)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def print_big_save(folder: Path) -> None:
    """Print as JSON how a save of 3 MB fails in `folder`."""
    try:
        atomic_dir.write_atomic_dir(folder, "step-00000009", {"model": bytes(3_000_000)}, {})
    except atomic_dir.SaveError as error:
        newest, skipped = atomic_dir.newest_valid(folder)
        print(
            json.dumps(
                {"errno": error.errno, "newest": newest and newest.name, "skipped": skipped, "temp": temp_files(folder)}
            )
        )


@pytest.mark.slow
def test_save_beyond_the_file_size_limit_keeps_the_previous_folder(memory_dir: Path) -> None:
    save(memory_dir, 1)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    failure = run_program(limit + "print_big_save(Path(sys.argv[1]))", memory_dir)
    assert failure == {"errno": errno.EFBIG, "newest": "step-00000001", "skipped": [], "temp": []}


SMALL_DISK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x44000, None) or libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", 0, b"size=2m"):
    print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
    sys.exit()
save(Path(sys.argv[1]), 1)
"""
# the disk fills up between the check and the write
WRONG_FREE_SPACE = "FileSystem.free = staticmethod(lambda folder: 1 << 40)\n"
READ_ONLY = "libc.mount(None, sys.argv[1].encode(), None, 0x21, None)\n"
DISKS = {
    "full": ("", errno.ENOSPC),
    "full after the check": (WRONG_FREE_SPACE, errno.ENOSPC),
    "read-only": (WRONG_FREE_SPACE + READ_ONLY, errno.EROFS),
}


@pytest.mark.parametrize("setup, number", DISKS.values(), ids=DISKS)
def test_save_on_a_small_disk_keeps_the_previous_folder(setup: str, number: int, memory_dir: Path) -> None:
    failure = run_program(SMALL_DISK + setup + "print_big_save(Path(sys.argv[1]))", memory_dir)
    if "refused" in failure:
        pytest.skip(f"no permission to mount a disk: {failure['refused']}")
    assert failure == {"errno": number, "newest": "step-00000001", "skipped": [], "temp": []}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_save_into_a_read_only_folder_keeps_the_previous_one(memory_dir: Path) -> None:
    save(memory_dir, 1)
    memory_dir.chmod(0o555)
    failure = run_program("print_big_save(Path(sys.argv[1]))", memory_dir)
    memory_dir.chmod(0o755)
    assert failure == {"errno": errno.EACCES, "newest": "step-00000001", "skipped": [], "temp": []}
