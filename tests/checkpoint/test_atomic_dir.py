"""Reading back: whatever differs by one bit is found, the newest good folder serves, and enough good ones stay."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common import filesystem
from runner.checkpoint import atomic_dir
from runner.checkpoint.async_writer import AsyncWriter

ROOT = Path(__file__).parents[2]
FILES = {"model.safetensors": random.Random(1).randbytes(9_000), "optimizer.safetensors": random.Random(2).randbytes(18_000), "state.json": b'{"step": 1}' * 90}
NAMES = [*FILES, atomic_dir.MANIFEST_FILE]


def save(folder: Path, step: int) -> Path:
    atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", {name: bytes([step]) + data for name, data in FILES.items()}, {"step": step})
    return folder / f"step-{step:08d}"


@pytest.fixture
def two(tmp_path):
    """Two good step folders: (older, newer)."""
    return save(tmp_path, 1), save(tmp_path, 2)


# --- what was written comes back ------------------------------------------------------------------------------------


def test_a_folder_holds_its_files_and_says_what_they_are(tmp_path):
    pieces = {"a": b"bytes", "b": bytearray(b"array"), "c": memoryview(b"view"), "d": lambda: b"asked for late", "e": b""}
    atomic_dir.write_atomic_dir(tmp_path / "made" / "here", "step-00000007", pieces, {"step": 7, "note": "ü"})
    folder = tmp_path / "made" / "here" / "step-00000007"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != atomic_dir.MANIFEST_FILE} == {
        "a": b"bytes",
        "b": b"array",
        "c": b"view",
        "d": b"asked for late",
        "e": b"",
    }
    manifest = json.loads((folder / atomic_dir.MANIFEST_FILE).read_text())
    assert (manifest["step"], manifest["note"]) == (7, "ü")
    assert manifest["files"]["a"] == {"size": 5, "sha256": hashlib.sha256(b"bytes").hexdigest()}
    assert atomic_dir.verify_dir(folder) is None and atomic_dir.newest_valid(folder.parent) == (folder, [])


def test_a_folder_can_be_moved_and_copied(two, tmp_path):
    shutil.copytree(tmp_path, tmp_path / "copy" / "step-x", ignore=shutil.ignore_patterns("copy"))
    assert atomic_dir.newest_valid(tmp_path / "copy" / "step-x")[0].name == "step-00000002"


def test_a_good_folder_is_left_as_it_is_and_a_bad_one_replaced(two):
    older, newer = two
    before = newer.stat().st_ino
    atomic_dir.write_atomic_dir(newer.parent, newer.name, {"model": b"other"}, {})
    assert newer.stat().st_ino == before and not (newer / "model").exists()
    (newer / "state.json").unlink()
    save(newer.parent, 2)
    assert atomic_dir.verify_dir(newer) is None and sorted(os.listdir(newer.parent)) == [older.name, newer.name]


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path):
    def no_memory() -> bytes:
        raise MemoryError

    with pytest.raises(MemoryError):
        atomic_dir.write_atomic_dir(tmp_path, "step-00000001", {"a": b"1", "b": no_memory}, {})
    assert not os.listdir(tmp_path)


def test_an_empty_place_has_no_newest(tmp_path):
    assert atomic_dir.newest_valid(tmp_path) == atomic_dir.newest_valid(tmp_path / "absent") == (None, [])


def test_only_step_folders_are_looked_at(two, tmp_path):
    for name in ("step-3", "step-00000009.bak", "step-00000009\n", "step-٠٠٠٠٠٠٠٩", ".tmp-step-00000009-1-aa", "Step-00000009"):
        shutil.copytree(two[1], tmp_path / name)
    assert atomic_dir.newest_valid(tmp_path) == (two[1], [])


# --- what was damaged is found --------------------------------------------------------------------------------------


def truncate(path: Path, older: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path, older: Path) -> None:
    os.truncate(path, 0)


def delete(path: Path, older: Path) -> None:
    path.unlink()


def flip_a_bit(path: Path, older: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def fill_with_zeros(path: Path, older: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap_with_its_neighbour(path: Path, older: Path) -> None:
    other = path.with_name(NAMES[(NAMES.index(path.name) + 1) % len(NAMES)])
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


def take_the_older_one(path: Path, older: Path) -> None:
    shutil.copy(older / path.name, path)


def append(path: Path, older: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def link(path: Path, older: Path) -> None:
    shutil.move(path, path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def make_a_pipe(path: Path, older: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_a_folder(path: Path, older: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage", [truncate, empty, delete, flip_a_bit, fill_with_zeros, swap_with_its_neighbour, take_the_older_one, append, link, make_a_pipe, make_a_folder]
)
def test_damage_is_found_and_the_one_before_serves(damage, name, two):
    older, newer = two
    damage(newer / name, older)
    found, passed = atomic_dir.newest_valid(older.parent)
    if (damage, name) == (take_the_older_one, atomic_dir.MANIFEST_FILE):  # a whole manifest, of other files
        assert passed == [(newer.name, "model.safetensors: the checksum differs")]
    assert found == older and [step for step, _ in passed] == [newer.name]
    assert any(word in passed[0][1] for word in NAMES), f"the reason names no file: {passed[0][1]}"


def test_of_200_flipped_bits_each_is_found(two):
    folder, chance = two[1], random.Random(7)
    for _ in range(200):
        path = folder / chance.choices(NAMES, [(folder / name).stat().st_size for name in NAMES])[0]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        assert atomic_dir.verify_dir(folder), f"a flip in {path.name} went unseen"
        path.write_bytes(good)
    assert atomic_dir.verify_dir(folder) is None


def test_every_byte_of_the_manifest_counts(two):
    path = two[1] / atomic_dir.MANIFEST_FILE
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert atomic_dir.verify_dir(two[1]), f"byte {at} went unseen"


def test_a_file_too_many_is_found(two):
    (two[1] / "extra").write_bytes(b"")
    assert atomic_dir.verify_dir(two[1]) == "unexpected: 'extra'"


def test_a_linked_folder_is_not_followed(two, tmp_path):
    (tmp_path / "step-00000003").symlink_to(two[1])
    assert atomic_dir.newest_valid(tmp_path) == (two[1], [("step-00000003", "not a folder")])


@pytest.mark.parametrize(
    "body",
    [
        {"files": {"../../x": {"size": 1, "sha256": "0"}}},
        {"files": {"a/b": {"size": 1, "sha256": "0"}}},
        {"files": {".hidden": {"size": 1, "sha256": "0"}}},
        {"files": []},
        {"files": {"a": 5}},
        {"files": {"a": {"size": "x", "sha256": ""}}},
        {},
    ],
)
def test_a_hostile_manifest_is_refused_though_its_checksum_is_right(body, two):
    (two[1] / atomic_dir.MANIFEST_FILE).write_bytes(atomic_dir._dump_manifest(body))
    assert atomic_dir.verify_dir(two[1]).startswith(atomic_dir.MANIFEST_FILE)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"1" * 100_000, b'{"sha256": NaN}', b"\xff\xfe", b"[]", b"null", b'"sha256"'])
def test_a_manifest_that_is_none_is_refused(raw, two):
    (two[1] / atomic_dir.MANIFEST_FILE).write_bytes(raw)
    assert atomic_dir.verify_dir(two[1]) == f"{atomic_dir.MANIFEST_FILE}: not a manifest"


def test_a_gigabyte_of_manifest_is_not_read(two):
    os.truncate(two[1] / atomic_dir.MANIFEST_FILE, 1 << 30)
    started = time.monotonic()
    assert "are believed" in atomic_dir.verify_dir(two[1])
    assert time.monotonic() - started < 1


# --- enough good ones stay ------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    return sorted(int(name[5:]) for name in os.listdir(folder) if name.startswith("step-"))


def fill(folder: Path, count: int) -> None:
    for step in range(1, count + 1):
        save(folder, step)


def test_the_newest_and_the_protected_stay(tmp_path):
    fill(tmp_path, 6)
    assert atomic_dir.prune_dirs(tmp_path, 2, {"step-00000002"}) == ["step-00000004", "step-00000003", "step-00000001"]
    assert steps(tmp_path) == [2, 5, 6] and all(atomic_dir.verify_dir(path) is None for path in tmp_path.iterdir())


@pytest.mark.parametrize("keep", [-1, 0, 1, 2])
def test_two_good_ones_stay_whatever_is_asked(keep, tmp_path):
    fill(tmp_path, 4)
    atomic_dir.prune_dirs(tmp_path, keep, set())
    assert steps(tmp_path) == [3, 4]


def test_bad_ones_do_not_count_and_are_not_deleted(tmp_path):
    fill(tmp_path, 5)
    for step in (5, 4):
        flip_a_bit(tmp_path / f"step-{step:08d}" / "model.safetensors", tmp_path)
    atomic_dir.prune_dirs(tmp_path, 2, set())
    assert steps(tmp_path) == [2, 3, 4, 5]


def test_a_checkpoint_that_goes_bad_between_two_prunings_stops_counting(tmp_path):
    fill(tmp_path, 3)
    atomic_dir.prune_dirs(tmp_path, 3, set())  # all three were read and found good
    flip_a_bit(tmp_path / "step-00000003" / "model.safetensors", tmp_path)
    atomic_dir.prune_dirs(tmp_path, 2, set())
    assert steps(tmp_path) == [1, 2, 3]


def test_pruning_begins_with_the_oldest(tmp_path, monkeypatch):
    class Breaks(filesystem.FileSystem):
        @staticmethod
        def rename(old, new):
            if Path(old).name == "step-00000002":
                raise OSError(errno.EIO, "broken")
            os.rename(old, new)

    fill(tmp_path, 5)
    monkeypatch.setattr(filesystem, "fs", Breaks())
    with pytest.raises(OSError):
        atomic_dir.prune_dirs(tmp_path, 2, set())
    assert steps(tmp_path) == [2, 3, 4, 5]


def test_pruning_reads_what_another_process_wrote_once_and_our_own_never(tmp_path, monkeypatch):
    asked = []
    verify = atomic_dir.verify_dir
    monkeypatch.setattr(atomic_dir, "verify_dir", lambda folder: asked.append(folder.name) or verify(folder))
    for step in range(1, 6):
        save(tmp_path, step)
        atomic_dir.prune_dirs(tmp_path, 3, set())
    assert asked == []
    atomic_dir._verified.clear()
    atomic_dir.prune_dirs(tmp_path, 3, set())
    atomic_dir.prune_dirs(tmp_path, 3, set())
    assert sorted(asked) == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_our_own_is_read_again_once_it_was_touched(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / "model").write_bytes(b"short")
    atomic_dir.prune_dirs(tmp_path, 2, set())
    assert steps(tmp_path) == [2, 3, 4]


def test_a_file_may_come_in_pieces(tmp_path):
    entry = filesystem.write_new_file(tmp_path / "pieces", [b"one", memoryview(b"two"), bytearray(b""), b"three"])
    assert entry == filesystem.write_new_file(tmp_path / "whole", b"onetwothree") and (tmp_path / "pieces").read_bytes() == b"onetwothree"


def test_sweeping_takes_litter_only(two, tmp_path):
    (tmp_path / ".tmp-step-00000003-1-aa" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000003-1-aa" / "deep" / "file").write_bytes(b"half")
    (tmp_path / ".tmp-step-00000003-1-aa" / "link").symlink_to(two[0])
    (tmp_path / ".del-step-00000000-1-aa").mkdir()
    (tmp_path / ".tmp-latest-1-aa").write_bytes(b"")
    atomic_dir.write_pointer(tmp_path, "latest", two[1].name)
    assert atomic_dir.remove_temp(tmp_path) == [".del-step-00000000-1-aa", ".tmp-latest-1-aa", ".tmp-step-00000003-1-aa"]
    assert sorted(os.listdir(tmp_path)) == ["latest", two[0].name, two[1].name] and atomic_dir.verify_dir(two[0]) is None


def test_a_hint_is_never_the_authority(two, tmp_path):
    atomic_dir.write_pointer(tmp_path, "latest", "step-00000099")
    assert atomic_dir.newest_valid(tmp_path) == (two[1], []) and atomic_dir.read_pointer(tmp_path, "latest") == "step-00000099"
    assert atomic_dir.read_pointer(tmp_path, "best") is None
    for lie in ("../../etc", "step-1", "x" * 5_000, "\udcff"):
        (tmp_path / "best").write_bytes(lie.encode("utf-8", "surrogatepass"))
        assert atomic_dir.read_pointer(tmp_path, "best") is None


def test_json_is_replaced_whole(tmp_path):
    filesystem.write_json(tmp_path / "run.json", {"error": "no such file: b\udcff 文"})
    assert json.loads((tmp_path / "run.json").read_text()) == {"error": "no such file: b\udcff 文"}
    with pytest.raises(ValueError):
        filesystem.write_json(tmp_path / "run.json", {"loss": float("nan")})
    (tmp_path / "in the way").mkdir()
    for refused in (lambda: filesystem.write_json(tmp_path / "in the way", {}), lambda: atomic_dir.write_pointer(tmp_path, "in the way", "step-00000001")):
        with pytest.raises(OSError):
            refused()
    assert sorted(os.listdir(tmp_path)) == ["in the way", "run.json"]


# --- the writer -----------------------------------------------------------------------------------------------------


def test_the_writer_works_beside_its_caller_and_one_job_at_a_time(tmp_path):
    writer, gate, order = AsyncWriter(), threading.Event(), []
    assert writer.submit("first", lambda: (gate.wait(10), order.append(1))) < 1
    assert writer.poll() == [] and order == []
    threading.Timer(0.2, gate.set).start()
    waited = writer.submit("second", lambda: order.append(2) or "done")
    assert waited > 0.1 and order[0] == 1, "the second save waits for the first, and says how long"
    first, second = writer.wait()
    assert (
        order == [1, 2]
        and (first.name, second.name, second.result) == ("first", "second", "done")
        and first.error is second.error is None
        and first.seconds > 0.1
    )
    assert writer.poll() == []


def test_the_writer_hands_errors_over(tmp_path):
    def fail():
        raise OSError(errno.EIO, "gone")

    writer = AsyncWriter()
    writer.submit("bad", fail)
    writer.submit("good", lambda: None)
    assert [(outcome.name, type(outcome.error)) for outcome in writer.wait()] == [("bad", OSError), ("good", type(None))]


def test_leaving_the_program_does_not_lose_the_last_save(tmp_path):
    program = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from runner.engine import durable
from runner.checkpoint.async_writer import Writer
def late():
    time.sleep(0.3)
    return bytes(9000)
Writer().submit("last", lambda: durable.write_folder(Path(sys.argv[1]), "step-00000001", {{"model": late}}, {{}}))
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, "")
    assert atomic_dir.newest_valid(tmp_path)[0].name == "step-00000001"
