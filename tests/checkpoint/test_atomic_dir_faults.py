"""Killed at every call, refused by the disk at every call, no room, no right to write: the checkpoint before is still there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common import filesystem
from common.filesystem import FileSystem
from runner.checkpoint import atomic_dir

ROOT = Path(__file__).parents[2]
CALLS = ("mkdir", "open", "read", "write", "fsync", "close", "rename", "unlink", "rmdir", "free")
SAVES = 4


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where the system offers that: thousands of fsyncs take minutes on a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def contents(step: int) -> dict[str, bytes]:
    return {"model": bytes([step]) * 20_000, "state": b"%d" % step * 700}


def save(folder: Path, step: int) -> None:
    atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", contents(step), {"step": step})


def keep_house(folder: Path, step: int) -> None:
    atomic_dir.write_pointer(folder, "latest", f"step-{step:08d}")
    atomic_dir.prune_dirs(folder, 2, protect=set())
    filesystem.write_json(folder.parent / "run.json", {"step": step})


def good_steps(folder: Path) -> dict[int, dict[str, bytes]]:
    names = sorted(path.name for path in folder.glob("step-*") if atomic_dir.verify_dir(path) is None)
    return {int(name[5:]): {file: (folder / name / file).read_bytes() for file in contents(1)} for name in names}


def litter(folder: Path) -> list[str]:
    return [path.name for path in (*folder.glob(".tmp-*"), *folder.glob(".del-*"))]


class Tripwire(FileSystem):
    """Counts the calls and lets `spring` loose at number `at`. A write is half done by then, a close is done."""

    def __init__(self, at: int, spring):
        self.at, self.spring, self.calls = at, spring, []

    def __getattribute__(self, name):
        call = super().__getattribute__(name)
        return self._wired(name, call) if name in CALLS else call

    def _wired(self, name, call):
        def wired(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) - 1 != self.at:
                return call(*args, **kwargs)
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            if name == "close":
                call(*args)
            self.spring(name)

        return wired


def calls_of(work, monkeypatch) -> list[str]:
    tripwire = Tripwire(-1, None)
    monkeypatch.setattr(filesystem, "fs", tripwire)
    work()
    monkeypatch.undo()
    return tripwire.calls


# --- killed ---------------------------------------------------------------------------------------------------------


def work(folder: Path, promises: int) -> None:
    """Carry on from whatever stands in `folder` to the last save; one byte goes to `promises` for each commit."""
    folder.mkdir(exist_ok=True)
    atomic_dir.remove_temp(folder)
    found, _ = atomic_dir.newest_valid(folder)
    for step in range(int(found.name[5:]) + 1 if found else 1, SAVES + 1):
        save(folder, step)
        os.write(promises, bytes([step]))
        keep_house(folder, step)


def killed_at(call: int, folder: Path, promises: int) -> int:
    """The wait status of a child that works in `folder` and is killed at that call."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        filesystem.fs, filesystem.CHUNK_BYTES = Tripwire(call, lambda name: os.kill(os.getpid(), signal.SIGKILL)), 8_000
        work(folder, promises)
        os._exit(0)
    finally:
        os._exit(99)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the child runs nothing but our few calls, then dies
def test_a_kill_at_any_call_costs_nothing_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "CHUNK_BYTES", 8_000)
    spare = os.open(os.devnull, os.O_WRONLY)
    calls = calls_of(lambda: work(tmp_path / "reference", spare), monkeypatch)
    reference = good_steps(tmp_path / "reference")
    assert len(calls) >= 100 and {"mkdir", "write", "fsync", "rename", "unlink", "rmdir"} <= set(calls)
    for at, name in enumerate(calls):
        folder, note = tmp_path / f"at{at}", tmp_path / f"at{at}.promises"
        promises = os.open(note, os.O_WRONLY | os.O_CREAT)
        status = killed_at(at, folder, promises)
        os.close(promises)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"call {at} ({name}): the child ended with {status}"
        found, passed = atomic_dir.newest_valid(folder)
        promised = max(note.read_bytes(), default=0)
        assert (int(found.name[5:]) if found else 0) >= promised, f"killed at call {at} ({name})"
        assert not passed, f"killed at call {at} ({name}): {passed}"
        assert all(files == contents(step) for step, files in good_steps(folder).items())
        work(folder, spare)  # the relaunch
        keep_house(folder, SAVES)
        assert good_steps(folder) == reference and not litter(folder), f"killed at call {at} ({name})"
    os.close(spare)


# --- refused by the disk --------------------------------------------------------------------------------------------


def refuse(number: int):
    def spring(name: str):
        raise OSError(number, os.strerror(number))

    return spring


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
def test_an_error_at_any_call_of_a_save_leaves_the_one_before_and_no_litter(number, tmp_path, monkeypatch):
    save(tmp_path, 1)
    calls = calls_of(lambda: save(tmp_path, 2), monkeypatch)
    atomic_dir.discard_dir(tmp_path / "step-00000002")
    for at, name in enumerate(calls):
        monkeypatch.setattr(filesystem, "fs", Tripwire(at, refuse(number)))
        with pytest.raises(atomic_dir.SaveError) as trouble:
            save(tmp_path, 2)
        monkeypatch.undo()
        assert trouble.value.errno == number and trouble.value.need == 20_700 and "20,700 bytes" in str(trouble.value)
        assert good_steps(tmp_path)[1] == contents(1) and not litter(tmp_path), f"call {at} ({name})"
        if (tmp_path / "step-00000002").exists():  # the error came after the rename: whole, if not promised
            assert good_steps(tmp_path)[2] == contents(2)
            atomic_dir.discard_dir(tmp_path / "step-00000002")


def test_an_error_while_keeping_house_deletes_nothing_that_was_to_stay(tmp_path, monkeypatch):
    def fill(folder: Path) -> Path:
        folder.mkdir()
        for step in (1, 2, 3):
            save(folder, step)
        return folder

    first = fill(tmp_path / "first")
    calls = calls_of(lambda: keep_house(first, 3), monkeypatch)
    for at, name in enumerate(calls):
        folder = fill(tmp_path / f"at{at}")
        monkeypatch.setattr(filesystem, "fs", Tripwire(at, refuse(errno.EIO)))
        try:
            keep_house(folder, 3)
        except OSError:
            pass  # or the fault fell into reading a checkpoint, which then is not counted as good
        monkeypatch.undo()
        assert {2, 3} <= good_steps(folder).keys(), f"call {at} ({name})"
        atomic_dir.remove_temp(folder)
        keep_house(folder, 3)
        assert good_steps(folder) == {2: contents(2), 3: contents(3)} and not litter(folder)


def test_what_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    calls = calls_of(lambda: atomic_dir.verify_dir(tmp_path / "step-00000002"), monkeypatch)
    for at, name in enumerate(calls):
        monkeypatch.setattr(filesystem, "fs", Tripwire(at, refuse(errno.EIO)))
        found, passed = atomic_dir.newest_valid(tmp_path)
        monkeypatch.undo()
        assert found == tmp_path / "step-00000001" and passed[0][0] == "step-00000002", f"call {at} ({name})"
        assert os.strerror(errno.EIO) in passed[0][1]


# --- no room --------------------------------------------------------------------------------------------------------


def test_too_little_room_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    tripwire = Tripwire(-1, None)
    monkeypatch.setattr(tripwire, "free", lambda folder: 1_000_000, raising=False)
    monkeypatch.setattr(filesystem, "fs", tripwire)
    with pytest.raises(atomic_dir.SaveError) as trouble:
        save(tmp_path, 1)
    assert (trouble.value.errno, trouble.value.need, trouble.value.free) == (errno.ENOSPC, 20_700, 1_000_000)
    assert "1,000,000 bytes are free" in str(trouble.value)
    assert not {"mkdir", "write", "rename"} & set(tripwire.calls) and not os.listdir(tmp_path)


def run_apart(program: str, *args: object) -> dict:
    """Run `program` in a process of its own, which may bind itself hand and foot; what it prints last is JSON."""
    prelude = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\nfrom test_atomic_dir_faults import *\n"
    done = subprocess.run([sys.executable, "-c", prelude + program, *map(str, args)], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BIG_SAVE = """
folder = Path(sys.argv[1])
try:
    durable.write_folder(folder, "step-00000009", {"model": bytes(3_000_000)}, {})
except durable.DiskTrouble as trouble:
    found, passed = durable.newest(folder)
    print(json.dumps({"errno": trouble.errno, "newest": found.name, "passed": passed, "litter": litter(folder), "free": trouble.free}))
"""


def test_a_limit_on_the_size_of_files(tmp_path):
    save(tmp_path, 1)
    found = run_apart("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))" + BIG_SAVE, tmp_path)
    assert (found["errno"], found["newest"], found["passed"], found["litter"]) == (errno.EFBIG, "step-00000001", [], [])


IN_A_SMALL_DISK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x44000, None) or libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", 0, b"size=2m"):
    print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
    sys.exit()
save(Path(sys.argv[1]), 1)
"""
LIE = "FileSystem.free = staticmethod(lambda folder: 1 << 40)"  # room vanishes between the check and the write
READ_ONLY = "libc.mount(None, sys.argv[1].encode(), None, 0x21, None)"


@pytest.mark.parametrize(
    "how, number", [("", errno.ENOSPC), (LIE, errno.ENOSPC), (LIE + "\n" + READ_ONLY, errno.EROFS)], ids=["full", "full all of a sudden", "read-only"]
)
def test_a_small_disk(how, number, tmp_path):
    found = run_apart(IN_A_SMALL_DISK + how + BIG_SAVE, tmp_path)
    if "refused" in found:
        pytest.skip(f"no right to mount a small disk here: {found['refused']}")
    assert (found["errno"], found["newest"], found["passed"], found["litter"]) == (number, "step-00000001", [], [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_folder(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    found = run_apart(BIG_SAVE, tmp_path)
    tmp_path.chmod(0o755)
    assert (found["errno"], found["newest"], found["litter"]) == (errno.EACCES, "step-00000001", [])
