"""A damaged metrics.jsonl: readable records of this run are kept, the file is archived, and what was lost is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.tracking.jsonl import JsonlLog, SavedLogs

STEPS = 6  # of the checkpoint; the log has two more


def record(step: int, loss: float | None = None, kind: str = "train", attempt: int = 1) -> dict[str, object]:
    return {"kind": kind, "step": step, "loss": 1 / step if loss is None else loss, "attempt": attempt}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, SavedLogs]:
    """A log of eight steps, and what a checkpoint after six of them knows."""
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path, 1, SavedLogs())
    for step in range(1, STEPS + 1):
        log.append(record(step))
    losses = [1 / step for step in range(3, STEPS + 1)]
    proof = SavedLogs(STEPS, losses, {"metrics": log.checksum()}, {"metrics": log.position()})
    for step in (STEPS + 1, STEPS + 2):
        log.append(record(step))
    log.close()
    return path, proof


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_foreign(path: Path) -> None:
    path.write_text("".join(json.dumps(record(step, loss=9.0)) + "\n" for step in range(1, 30)))


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, tuple[Callable[[Path], object], list[int], str]] = {
    "missing": (Path.unlink, [], "missing"),
    "empty": (lambda path: os.truncate(path, 0), [], "0 bytes, but"),
    "short at a line": (
        lambda path: edit(path, lambda text: b"".join(text.splitlines(keepends=True)[:2])),
        [1, 2],
        "bytes, but",
    ),
    "short in a line": (lambda path: os.truncate(path, 100), [1], "bytes, but"),
    "half line in the middle": (
        lambda path: edit(path, lambda text: text[:80] + text[100:]),
        [1, 3, 4, 5, 6],
        "changed",
    ),
    "zeros": (lambda path: edit(path, lambda text: text[:70] + bytes(60) + text[130:]), [1, 4, 5, 6], "changed"),
    "not UTF-8": (lambda path: edit(path, lambda text: b"\xff\xfe\n" + text), [1, 2, 3, 4, 5, 6], "changed"),
    "a line twice": (
        lambda path: edit(path, lambda text: text.splitlines(keepends=True)[0] + text),
        [1, 2, 3, 4, 5, 6],
        "changed",
    ),
    "a line of another run": (
        lambda path: edit(path, lambda text: text.replace(b'"loss": 0.25', b'"loss": 0.35')),
        [1, 2, 3, 5, 6],
        "changed",
    ),
    "another run": (write_foreign, [], "changed"),
    "deep JSON": (lambda path: edit(path, lambda text: b"[" * 100_000 + b"\n" + text), [1, 2, 3, 4, 5, 6], "changed"),
}


@pytest.mark.parametrize("damage, kept, state", DAMAGES.values(), ids=DAMAGES)
def test_damaged_log_keeps_the_readable_records_of_this_run(
    saved: tuple[Path, SavedLogs], damage: Callable[[Path], object], kept: list[int], state: str
) -> None:
    path, proof = saved
    damage(path)
    damaged = path.read_bytes() if path.exists() else b""
    log = JsonlLog(path, 2, proof)
    assert (
        steps_of(path) == kept
        and log.recovered
        and log.recovered.startswith("metrics.jsonl is")
        and state in log.recovered
    )
    copy = path.parent / "damaged" / "metrics.jsonl"
    whole = path.read_bytes() + b"".join(file.read_bytes() for file in path.parent.glob("metrics.attempt*.jsonl"))
    assert copy.exists() == (len(whole) != len(damaged)), "what is in no other file is kept"
    assert not copy.exists() or (copy.read_bytes() == damaged and "damaged/metrics.jsonl" in log.recovered)
    log.append(record(STEPS + 1, attempt=2))
    again = SavedLogs(STEPS + 1, [], {"metrics": log.checksum()}, {"metrics": log.position()})
    log.close()
    assert JsonlLog(path, 3, again).recovered is None, "the next checkpoint proves the repaired log"


def test_whole_log_is_cut_back_without_a_message(saved: tuple[Path, SavedLogs]) -> None:
    path, proof = saved
    assert JsonlLog(path, 2, proof).recovered is None and steps_of(path) == [1, 2, 3, 4, 5, 6]
    assert steps_of(path.with_name("metrics.attempt1.jsonl")) == [7, 8] and not (path.parent / "damaged").exists()


def test_log_of_an_earlier_version_without_a_checksum_is_used_as_it_is(saved: tuple[Path, SavedLogs]) -> None:
    path, proof = saved
    assert JsonlLog(path, 2, SavedLogs(STEPS, positions=proof.positions)).recovered is None


def test_kill_during_the_repair_repeats_no_archive(saved: tuple[Path, SavedLogs]) -> None:
    path, proof = saved
    DAMAGES["zeros"][0](path)
    damaged = path.read_bytes()
    JsonlLog(path, 2, proof)
    path.write_bytes(damaged)  # as if it had been killed before the file was replaced
    JsonlLog(path, 3, proof)
    assert [file.name for file in (path.parent / "damaged").iterdir()] == ["metrics.jsonl"]
    assert steps_of(path.with_name("metrics.attempt1.jsonl")) == [7, 8]


def test_copy_of_a_damaged_log_replaces_nothing(saved: tuple[Path, SavedLogs]) -> None:
    path, proof = saved
    copies = path.parent / "damaged"
    copies.mkdir()
    (copies / "metrics.jsonl").symlink_to("/etc/hostname")
    (copies / "metrics.jsonl.2").write_text("of an earlier launch")
    DAMAGES["not UTF-8"][0](path)
    JsonlLog(path, 2, proof)
    assert (copies / "metrics.jsonl").is_symlink() and (
        copies / "metrics.jsonl.2"
    ).read_text() == "of an earlier launch"
    assert (copies / "metrics.jsonl.3").is_file()
