"""A disk that is full, broken or read-only, and numbers that are not finite: the run goes on with what is good, or ends and says why."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import safetensors.torch
from trainee import STEPS, config, litter, record_of, room, steps_of, train, trained

from common import filesystem
from common.filesystem import FileSystem
from runner.engine import loop
from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.metadata import RunMetadata


class Faulty(FileSystem):
    """Refuses one call for everything that belongs to the saves of these steps, the checkpoints and nothing else, so many times."""

    def __init__(self, call: str, number: int, steps: tuple[int, ...], times: int = 1000) -> None:
        def faulty(fd: int, *args):
            nonlocal times
            if times and any(f".tmp-step-{step:08d}" in os.readlink(f"/proc/self/fd/{fd}") for step in steps):
                times -= 1
                raise OSError(number, os.strerror(number))
            return getattr(FileSystem, call)(fd, *args)

        setattr(self, call, faulty)


def watch_record(note: Path) -> None:
    """In the child: after each update of run.json, what it says of trouble, as a line of `note`."""
    update = RunMetadata.update

    def updated(record: RunMetadata, **fields) -> None:
        update(record, **fields)
        with open(note, "a") as lines:
            lines.write(json.dumps(record_of(record.folder)["degraded"]) + "\n")

    RunMetadata.update = updated


@pytest.mark.parametrize("call, number", [("write", errno.ENOSPC), ("fsync", errno.EIO)], ids=["no room", "broken"])
def test_saves_that_fail_cost_nothing_but_themselves(call, number, tmp_path):
    def spoil():
        filesystem.fs = Faulty(call, number, steps=(3, 4))
        watch_record(place / "degraded")

    with room(tmp_path) as place:
        cfg = config(place, f"train.keep_checkpoints={STEPS}", "train.max_failed_saves=3")
        assert train(cfg, place / "whole") == 0
        assert train(cfg, place / "run", spoil) == 0
        assert steps_of(place / "run") == [step for step in range(1, STEPS + 1) if step not in (3, 4)]
        assert diff_run_dirs(place / "whole", place / "run") == [] and not litter(place / "run")
        warnings = [line for line in (place / "run" / "train.log").read_text().splitlines() if line.startswith("warning: step-")]
        assert [line.split()[1] for line in warnings] == ["step-00000003", "step-00000004"]
        for line in warnings:
            assert os.strerror(number) in line and re.search(r"it needs [1-9][\d,]+ bytes, [1-9][\d,]+ bytes are free in .*checkpoints", line), line
        told = [json.loads(line) for line in (place / "degraded").read_text().splitlines()]
        trouble = [at for at, line in enumerate(told) if line]
        assert trouble and told[-1] is None and trouble == list(range(trouble[0], trouble[-1] + 1)), told  # from the first failed save to the next good one
        assert "step-00000003" in told[trouble[0]]
        assert (record_of(place / "run")["status"], record_of(place / "run")["degraded"]) == ("completed", None)


def test_a_disk_that_stays_full_ends_the_run_and_the_checkpoint_before_is_whole(tmp_path):
    def spoil():
        filesystem.fs = Faulty("write", errno.ENOSPC, steps=tuple(range(6, STEPS + 1)))

    with room(tmp_path) as place:
        cfg = config(place, "train.max_failed_saves=3")
        assert train(cfg, place / "whole") == 0
        assert train(cfg, place / "run", spoil) == 1
        assert steps_of(place / "run")[-1] == 5 and not litter(place / "run")
        record = record_of(place / "run")
        assert record["status"] == "failed" and "3 saves in a row failed" in record["error"] and "bytes are free" in record["degraded"]
        assert "Traceback" not in (place / "said").read_text()
        assert train(cfg, place / "run") == 0  # there is room again
        assert diff_run_dirs(place / "whole", place / "run") == [] and record_of(place / "run")["degraded"] is None


def stop_at(step: int) -> None:
    """In the child: a SIGTERM while it trains this step."""
    train_step = loop.train_step

    def stopped(run, *args):
        if run.progress.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, *args)

    loop.train_step = stopped


@pytest.mark.parametrize("last", [7, STEPS], ids=["asked to stop", "at the end"])
def test_a_last_save_that_fails_is_tried_again(last, tmp_path):
    def spoil():
        filesystem.fs = Faulty("write", errno.EIO, steps=(last,), times=1)
        stop_at(last) if last < STEPS else None

    with room(tmp_path) as place:
        cfg = config(place, "train.save_every=5", "train.max_failed_saves=3")
        assert train(cfg, place / "run", spoil) == (75 if last < STEPS else 0)
        assert (steps_of(place / "run")[-1], record_of(place / "run")["degraded"]) == (last, None)


@pytest.mark.parametrize("last", [7, STEPS], ids=["asked to stop", "at the end"])
def test_who_cannot_save_the_last_step_does_not_say_so(last, tmp_path):
    def spoil():
        filesystem.fs = Faulty("write", errno.ENOSPC, steps=(last,))
        stop_at(last) if last < STEPS else None

    with room(tmp_path) as place:
        cfg = config(place, "train.save_every=5", "train.max_failed_saves=3")
        assert train(cfg, place / "run", spoil) == 1
        record = record_of(place / "run")
        assert record["status"] == "failed" and "3 saves in a row failed" in record["error"]
        assert steps_of(place / "run")[-1] == last - last % 5 - (5 if last % 5 == 0 else 0)


def small_disk(folder: Path, size: str) -> str | None:
    """In the child: a file system of its own on `folder`. What forbids it, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    apart, private = 0x20000, 0x44000  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    if libc.unshare(apart) or libc.mount(None, b"/", None, private, None) or libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
        return os.strerror(ctypes.get_errno())
    return None


def test_a_disk_that_is_full_for_a_while(tmp_path):
    """Everything is refused, also metrics.jsonl, train.log and run.json; when there is room again nothing is missing."""

    def on_a_small_disk():
        if forbidden := small_disk(place / "small", "24m"):
            (place / "forbidden").write_text(forbidden)
            os._exit(0)
        take_step = loop.step_with_retries

        def filling(run, *args):
            result = take_step(run, *args)
            if run.progress.step == 5:
                fill(place / "small" / "filler")
            if run.progress.step == 9:
                (place / "before").write_text(json.dumps([steps_of(run.folder), litter(run.folder), trained(run.folder)]))
                (place / "small" / "filler").unlink()
            return result

        loop.step_with_retries = filling

    def keep_a_copy():
        """The disk goes with the child that has mounted it."""
        on_a_small_disk()
        close_record = RunMetadata.close

        def close(record):
            (place / "after").write_text(
                json.dumps([steps_of(record.folder), litter(record.folder), diff_run_dirs(place / "whole", record.folder), record.fields])
            )
            close_record(record)

        RunMetadata.close = close

    with room(tmp_path) as place:
        (place / "small").mkdir()
        cfg = config(place, "train.keep_checkpoints=2", "train.max_failed_saves=9")
        assert train(cfg, place / "whole") == 0
        code = train(cfg, place / "small" / "run", keep_a_copy)
        if (place / "forbidden").exists():
            pytest.skip(f"no right to mount a small disk here: {(place / 'forbidden').read_text()}")
        assert code == 0, (place / "small" / "said").read_text()
        saved, left, logged = json.loads((place / "before").read_text())
        assert saved[-1] in (3, 4, 5) and not left and logged < 9, "the disk was not full"
        saved, left, differ, record = json.loads((place / "after").read_text())
        assert (saved[-1], left, differ) == (STEPS, [], [])
        assert (record["status"], record["degraded"]) == ("completed", None)


def fill(path: Path) -> None:
    """To the last byte."""
    with open(path, "wb", buffering=0) as filler:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while filler.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("begun", [False, True], ids=["a new run", "a run that was begun"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(begun, tmp_path):
    def as_nobody():
        if os.geteuid() == 0:  # root may write anywhere
            os.setgid(65534), os.setuid(65534)

    with room(tmp_path) as place:
        place.chmod(0o755)
        cfg, folder = config(place), place / "run"
        if begun:
            assert train(cfg, folder) == 0
        folder.mkdir(exist_ok=True)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted((str(path), path.lstat().st_mtime_ns) for path in (folder, *folder.rglob("*")))
        assert train(cfg, folder, as_nobody) == 2
        assert sorted((str(path), path.lstat().st_mtime_ns) for path in (folder, *folder.rglob("*"))) == before
        said = (place / "said").read_text()
        assert "error: a run cannot live here: Permission denied" in said and str(folder) in said and "hydra.run.dir=DIR" in said


def poison(*steps: int) -> None:
    """In the child: the loss is NaN when the run stands at one of `steps`."""
    begin = loop.start_or_resume

    def begun(run):
        begin(run)
        honest = run.objective.loss

        def loss(model, batch):
            parts = honest(model, batch)
            return {**parts, "loss": parts["loss"] * (math.nan if run.progress.step in steps else 1)}

        run.objective.loss = loss

    loop.start_or_resume = begun


def all_finite(folder: Path) -> bool:
    """Every number of every checkpoint, and no NaN where JSON has no word for it."""
    files = [path for step in (folder / "checkpoints").glob("step-*") for path in step.glob("*.safetensors")]
    states = [path.read_text() for path in (folder / "checkpoints").glob("step-*/state.json")]
    return (
        bool(files)
        and all(bool(t.isfinite().all()) for path in files for t in safetensors.torch.load_file(path).values())
        and not any("NaN" in text or "Infinity" in text for text in states)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_number_that_is_not_finite_is_ever_saved(precision, tmp_path):
    with room(tmp_path) as place:
        cfg = config(place, f"train.keep_checkpoints={STEPS}", f"precision={precision}", "train.max_nonfinite_steps=3")
        assert train(cfg, place / "run", lambda: poison(2, 7, 8)) == 0
        assert len(steps_of(place / "run")) == STEPS and all_finite(place / "run")
        assert train(cfg, place / "lost", lambda: poison(4, 5, 6)) == 1
        assert record_of(place / "lost")["status"] == "failed" and all_finite(place / "lost")


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """However they came to be: a bad bit of memory, a bad file of weights."""

    def spoil():
        step = loop.train_step

        def spoilt(run, *args):
            if run.progress.step == 5:
                run.model.model.embed_tokens.weight.data[6000] = math.inf
            return step(run, *args)

        loop.train_step = spoilt

    with room(tmp_path) as place:
        cfg = config(place, "train.keep_checkpoints=2", "train.max_nonfinite_steps=9", "train.sample_every=0")
        assert train(cfg, place / "run", spoil) == 1
        assert steps_of(place / "run")[-1] == 5 and all_finite(place / "run")
        assert "embed_tokens.weight" in record_of(place / "run")["error"]
