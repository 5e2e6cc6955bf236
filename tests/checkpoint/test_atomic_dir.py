"""Atomic folders read back: every changed bit is detected, the newest valid folder is found, and enough valid ones are
kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import filesystem
from runner.checkpoint import atomic_dir

FILES = {
    "model.safetensors": random.Random(1).randbytes(9_000),
    "optimizer.safetensors": random.Random(2).randbytes(18_000),
    "state.json": b'{"step": 1}' * 90,
}
NAMES = [*FILES, atomic_dir.MANIFEST_FILE]


def save(folder: Path, step: int) -> Path:
    atomic_dir.write_atomic_dir(
        folder, f"step-{step:08d}", {name: bytes([step]) + data for name, data in FILES.items()}, {"step": step}
    )
    return folder / f"step-{step:08d}"


def save_steps(folder: Path, count: int) -> None:
    for step in range(1, count + 1):
        save(folder, step)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(name[5:]) for name in os.listdir(folder) if name.startswith("step-"))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two valid step folders: (older, newer)."""
    return save(tmp_path, 1), save(tmp_path, 2)


# --- writing --------------------------------------------------------------------------------------------------------


def test_write_atomic_dir_stores_files_and_a_manifest_of_checksums(tmp_path: Path) -> None:
    contents = {
        "a": b"bytes",
        "b": bytearray(b"array"),
        "c": memoryview(b"view"),
        "d": [b"in ", b"parts"],
        "e": b"",
    }
    atomic_dir.write_atomic_dir(tmp_path / "parent", "step-00000007", contents, {"step": 7, "note": "ü"})
    folder = tmp_path / "parent" / "step-00000007"
    stored = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != atomic_dir.MANIFEST_FILE}
    assert stored == {"a": b"bytes", "b": b"array", "c": b"view", "d": b"in parts", "e": b""}
    manifest = json.loads((folder / atomic_dir.MANIFEST_FILE).read_text())
    assert (manifest["step"], manifest["note"]) == (7, "ü")
    assert manifest["files"]["a"] == {"size": 5, "sha256": hashlib.sha256(b"bytes").hexdigest()}
    assert atomic_dir.verify_dir(folder) is None and atomic_dir.newest_valid(folder.parent) == (folder, [])


def test_write_atomic_dir_keeps_a_valid_folder_and_replaces_an_invalid_one(two: tuple[Path, Path]) -> None:
    older, newer = two
    inode = newer.stat().st_ino
    atomic_dir.write_atomic_dir(newer.parent, newer.name, {"model": b"other"}, {})
    assert newer.stat().st_ino == inode and not (newer / "model").exists()
    (newer / "state.json").unlink()
    save(newer.parent, 2)
    assert atomic_dir.verify_dir(newer) is None and sorted(os.listdir(newer.parent)) == [older.name, newer.name]


def test_write_atomic_dir_leaves_nothing_if_a_content_cannot_be_made(tmp_path: Path) -> None:
    def out_of_memory() -> Iterator[bytes]:
        yield b"2"
        raise MemoryError

    with pytest.raises(MemoryError):
        atomic_dir.write_atomic_dir(tmp_path, "step-00000001", {"a": b"1", "b": out_of_memory()}, {})
    assert not os.listdir(tmp_path)


# --- verification ---------------------------------------------------------------------------------------------------


def test_newest_valid_is_none_without_step_folders(tmp_path: Path) -> None:
    assert atomic_dir.newest_valid(tmp_path) == atomic_dir.newest_valid(tmp_path / "absent") == (None, [])


def test_newest_valid_ignores_other_names(two: tuple[Path, Path], tmp_path: Path) -> None:
    for name in (
        "step-3",
        "step-00000009.bak",
        "step-00000009\n",
        "step-٠٠٠٠٠٠٠٩",
        ".tmp-step-00000009-1-aa",
        "Step-00000009",
    ):
        shutil.copytree(two[1], tmp_path / name)
    assert atomic_dir.newest_valid(tmp_path) == (two[1], [])


def test_verify_dir_accepts_a_copied_folder(two: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(two[1], tmp_path / "copy" / two[1].name)
    assert atomic_dir.newest_valid(tmp_path / "copy") == (tmp_path / "copy" / two[1].name, [])


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


def swap_with_next_file(path: Path, older: Path) -> None:
    other = path.with_name(NAMES[(NAMES.index(path.name) + 1) % len(NAMES)])
    content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    other.write_bytes(content)


def copy_from_older(path: Path, older: Path) -> None:
    shutil.copy(older / path.name, path)


def append(path: Path, older: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def replace_by_link(path: Path, older: Path) -> None:
    shutil.move(path, path.parents[1] / "moved")
    path.symlink_to(path.parents[1] / "moved")


def replace_by_pipe(path: Path, older: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path, older: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    truncate,
    empty,
    delete,
    flip_a_bit,
    fill_with_zeros,
    swap_with_next_file,
    copy_from_older,
    append,
    replace_by_link,
    replace_by_pipe,
    replace_by_folder,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_newest_valid_skips_a_damaged_folder_and_names_the_file(
    damage: Callable[[Path, Path], None], name: str, two: tuple[Path, Path]
) -> None:
    older, newer = two
    damage(newer / name, older)
    newest, skipped = atomic_dir.newest_valid(older.parent)
    assert newest == older and [step for step, _ in skipped] == [newer.name]
    assert any(file in skipped[0][1] for file in NAMES), f"the reason names no file: {skipped[0][1]}"
    if (damage, name) == (copy_from_older, atomic_dir.MANIFEST_FILE):  # an intact manifest, of other files
        assert skipped == [
            (newer.name, f"MANIFEST.json: it is that of {older.name!r}: the folder was renamed, or the file copied")
        ]


def test_verify_dir_detects_each_of_100_flipped_bits(two: tuple[Path, Path]) -> None:
    folder, rng = two[1], random.Random(7)
    for _ in range(100):
        path = folder / rng.choices(NAMES, [(folder / name).stat().st_size for name in NAMES])[0]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        assert atomic_dir.verify_dir(folder), f"a flipped bit in {path.name} was not detected"
        path.write_bytes(good)
    assert atomic_dir.verify_dir(folder) is None


def test_verify_dir_detects_a_change_of_any_manifest_byte(two: tuple[Path, Path]) -> None:
    path = two[1] / atomic_dir.MANIFEST_FILE
    good = path.read_bytes()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
        assert atomic_dir.verify_dir(two[1]), f"byte {index} was not detected"


def test_verify_dir_ignores_a_foreign_file(two: tuple[Path, Path]) -> None:
    for name in (".DS_Store", ".nfs0001", "extra"):
        (two[1] / name).write_bytes(b"")
    assert atomic_dir.verify_dir(two[1]) is None and atomic_dir.foreign_names(two[1]) == [
        ".DS_Store",
        ".nfs0001",
        "extra",
    ]


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: b"", lambda text: text[:-2] + b"x\n"])
def test_read_verified_refuses_a_changed_file(two: tuple[Path, Path], change: Callable[[bytes], bytes]) -> None:
    file = next(path for path in two[1].iterdir() if path.name != atomic_dir.MANIFEST_FILE)
    assert atomic_dir.read_verified(two[1], file.name, 1 << 20) == file.read_bytes()
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match="wrong checksum"):
        atomic_dir.read_verified(two[1], file.name, 1 << 20)


def test_newest_valid_does_not_follow_a_linked_folder(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "step-00000003").symlink_to(two[1])
    assert atomic_dir.newest_valid(tmp_path) == (two[1], [("step-00000003", "not a folder")])


@pytest.mark.parametrize(
    "files",
    [
        {"../../x": {"size": 1, "sha256": "0"}},
        {"a/b": {"size": 1, "sha256": "0"}},
        {".hidden": {"size": 1, "sha256": "0"}},
        [],
        {"a": 5},
        {"a": {"size": "x"}},
    ],
)
def test_verify_dir_refuses_a_hostile_manifest_with_a_correct_checksum(files: object, two: tuple[Path, Path]) -> None:
    def dump(body: dict) -> bytes:
        return json.dumps(body, sort_keys=True, indent=1).encode()

    body = {"files": files}
    (two[1] / atomic_dir.MANIFEST_FILE).write_bytes(dump({**body, "sha256": hashlib.sha256(dump(body)).hexdigest()}))
    assert str(atomic_dir.verify_dir(two[1])).startswith(atomic_dir.MANIFEST_FILE)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b"1" * 100_000, b'{"sha256": NaN}', b"\xff\xfe", b"[]", b"null", b'"sha256"'], ids=range(7)
)
def test_verify_dir_refuses_a_file_that_is_no_manifest(raw: bytes, two: tuple[Path, Path]) -> None:
    (two[1] / atomic_dir.MANIFEST_FILE).write_bytes(raw)
    assert atomic_dir.verify_dir(two[1]) == f"{atomic_dir.MANIFEST_FILE}: not a manifest"


def test_verify_dir_does_not_read_a_manifest_of_a_gigabyte(two: tuple[Path, Path]) -> None:
    os.truncate(two[1] / atomic_dir.MANIFEST_FILE, 1 << 30)
    assert "1,073,741,824 bytes, at most 1,048,576 are read" in str(atomic_dir.verify_dir(two[1]))


# --- pruning --------------------------------------------------------------------------------------------------------


def test_prune_dirs_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    save_steps(tmp_path, 6)
    assert atomic_dir.prune_dirs(tmp_path, 2, {"step-00000002"}) == ["step-00000004", "step-00000003", "step-00000001"]
    assert saved_steps(tmp_path) == [2, 5, 6] and all(
        atomic_dir.verify_dir(path) is None for path in tmp_path.iterdir()
    )


@pytest.mark.parametrize("keep", [-1, 0, 1, 2])
def test_prune_dirs_keeps_at_least_two_valid_folders(keep: int, tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    atomic_dir.prune_dirs(tmp_path, keep, set())
    assert saved_steps(tmp_path) == [3, 4]


def test_prune_dirs_neither_counts_nor_deletes_invalid_folders(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    for step in (5, 4):
        flip_a_bit(tmp_path / f"step-{step:08d}" / "model.safetensors", tmp_path)
    atomic_dir.prune_dirs(tmp_path, 2, set())
    assert saved_steps(tmp_path) == [2, 3, 4, 5]


def test_prune_dirs_detects_damage_since_the_last_pruning(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    atomic_dir.prune_dirs(tmp_path, 3, set())  # all three are valid
    flip_a_bit(tmp_path / "step-00000003" / "model.safetensors", tmp_path)
    atomic_dir.prune_dirs(tmp_path, 2, set())
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_prune_dirs_deletes_the_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingRename(filesystem.FileSystem):
        @staticmethod
        def rename(old: Path, new: Path) -> None:
            if old.name == "step-00000002":
                raise OSError(errno.EIO, "broken disk")
            os.rename(old, new)

    save_steps(tmp_path, 5)
    monkeypatch.setattr(filesystem, "fs", FailingRename())
    with pytest.raises(OSError):
        atomic_dir.prune_dirs(tmp_path, 2, set())
    assert saved_steps(tmp_path) == [2, 3, 4, 5]


def test_prune_dirs_reads_folders_of_other_processes_once_and_its_own_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, verify = [], atomic_dir.verify_dir
    monkeypatch.setattr(atomic_dir, "verify_dir", lambda folder: verified.append(folder.name) or verify(folder))
    for step in range(1, 6):
        save(tmp_path, step)
        atomic_dir.prune_dirs(tmp_path, 3, set())
    assert verified == []
    shutil.copytree(tmp_path, tmp_path / "copy")  # as if another process had written them
    atomic_dir.prune_dirs(tmp_path / "copy", 3, set())
    atomic_dir.prune_dirs(tmp_path / "copy", 3, set())
    assert sorted(verified) == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_remove_temp_removes_temporary_files_only(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000003-1-aa" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000003-1-aa" / "deep" / "file").write_bytes(b"half")
    (tmp_path / ".tmp-step-00000003-1-aa" / "link").symlink_to(two[0])
    (tmp_path / ".del-step-00000000-1-aa").mkdir()
    (tmp_path / ".tmp-latest-1-aa").write_bytes(b"")
    atomic_dir.write_pointer(tmp_path, "latest", two[1].name)
    assert atomic_dir.remove_temp(tmp_path) == [
        ".del-step-00000000-1-aa",
        ".tmp-latest-1-aa",
        ".tmp-step-00000003-1-aa",
    ]
    assert (
        sorted(os.listdir(tmp_path)) == ["latest", two[0].name, two[1].name] and atomic_dir.verify_dir(two[0]) is None
    )


def test_newest_valid_does_not_trust_pointers(two: tuple[Path, Path], tmp_path: Path) -> None:
    atomic_dir.write_pointer(tmp_path, "latest", "step-00000099")
    assert (tmp_path / "latest").read_text() == "step-00000099\n" and atomic_dir.newest_valid(tmp_path) == (two[1], [])
