"""Runs on a full, broken or read-only disk, and with numbers that are not finite: training continues, or ends with the
reason.
"""

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
from trainee import (
    STEPS,
    last_logged_step,
    make_config,
    memory_dir,
    read_output,
    read_run_json,
    saved_steps,
    temp_files,
    train,
)

from common import filesystem
from common.filesystem import FileSystem
from runner.engine import loop
from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.metadata import RunMetadata


class FaultyDisk(FileSystem):
    """Fails `call` with the error `number` for the checkpoints of some steps, at most `times` times."""

    def __init__(self, call: str, number: int, steps: tuple[int, ...], times: int = 1000) -> None:
        def faulty(fd: int, *args):
            nonlocal times
            if times and any(f".tmp-step-{step:08d}" in os.readlink(f"/proc/self/fd/{fd}") for step in steps):
                times -= 1
                raise OSError(number, os.strerror(number))
            return getattr(FileSystem, call)(fd, *args)

        setattr(self, call, faulty)


def record_degraded(path: Path) -> None:
    """In the child: append run.json's field `degraded` to `path` after each update."""
    update = RunMetadata.update

    def recording_update(metadata: RunMetadata, **fields) -> None:
        update(metadata, **fields)
        with open(path, "a") as lines:
            lines.write(json.dumps(read_run_json(metadata.folder)["degraded"]) + "\n")

    RunMetadata.update = recording_update


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, number",
    [
        pytest.param("write", errno.ENOSPC, id="full disk"),
        pytest.param("fsync", errno.EIO, id="broken disk", marks=pytest.mark.slow),
    ],
)
def test_failed_saves_are_reported_and_training_continues(call: str, number: int, tmp_path: Path) -> None:
    def break_disk() -> None:
        filesystem.fs = FaultyDisk(call, number, steps=(3, 4))
        record_degraded(folder / "degraded")

    with memory_dir(tmp_path) as folder:
        config, run_dir = (
            make_config(folder, f"train.keep_checkpoints={STEPS}", "train.max_failed_saves=3"),
            folder / "run",
        )
        assert train(config, folder / "uninterrupted") == 0
        assert train(config, run_dir, break_disk) == 0
        deleted = [1] if number == errno.ENOSPC else []  # the oldest makes space; step 2 is the newest valid one
        assert saved_steps(run_dir) == [step for step in range(1, STEPS + 1) if step not in (3, 4, *deleted)]
        assert diff_run_dirs(folder / "uninterrupted", run_dir) == [] and not temp_files(run_dir)
        warnings = [
            line for line in (run_dir / "train.log").read_text().splitlines() if line.startswith("warning: step-")
        ]
        assert [line.split()[1] for line in warnings] == ["step-00000003", "step-00000004"]
        for line in warnings:
            assert os.strerror(number) in line and re.search(
                r"it needs [1-9][\d,]+ bytes, [1-9][\d,]+ bytes are free in .*checkpoints", line
            ), line
        degraded = [json.loads(line) for line in (folder / "degraded").read_text().splitlines()]
        indices = [index for index, reason in enumerate(degraded) if reason]
        # from the first failed save to the next good one
        assert indices == list(range(indices[0], indices[-1] + 1)) and degraded[-1] is None, degraded
        assert "step-00000003" in degraded[indices[0]]
        assert (read_run_json(run_dir)["status"], read_run_json(run_dir)["degraded"]) == ("completed", None)


@pytest.mark.slow
def test_run_ends_on_a_full_disk_and_resumes_from_the_last_save(tmp_path: Path) -> None:
    def fill_disk() -> None:
        filesystem.fs = FaultyDisk("write", errno.ENOSPC, steps=tuple(range(6, STEPS + 1)))

    with memory_dir(tmp_path) as folder:
        config, run_dir = make_config(folder, "train.max_failed_saves=3"), folder / "run"
        assert train(config, folder / "uninterrupted") == 0
        assert train(config, run_dir, fill_disk) == 1
        assert saved_steps(run_dir)[-1] == 5 and not temp_files(run_dir)
        fields = read_run_json(run_dir)
        assert (
            fields["status"] == "failed"
            and "3 consecutive saves failed" in fields["error"]
            and "bytes are free" in fields["degraded"]
        )
        assert "Traceback" not in read_output(run_dir)
        assert train(config, run_dir) == 0
        assert diff_run_dirs(folder / "uninterrupted", run_dir) == [] and read_run_json(run_dir)["degraded"] is None


def stop_at(step: int) -> None:
    """In the child: send SIGTERM at the end of this step."""
    train_step = loop.train_step

    def stopping_step(state, *args):
        output = train_step(state, *args)
        if state.progress.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return output

    loop.train_step = stopping_step


@pytest.mark.parametrize(
    "last, times",
    [
        pytest.param(7, 1, id="interrupted, one error"),
        pytest.param(7, 1000, id="interrupted, many errors", marks=pytest.mark.slow),
        pytest.param(STEPS, 1, id="completed, one error", marks=pytest.mark.slow),
        pytest.param(STEPS, 1000, id="completed, many errors", marks=pytest.mark.slow),
    ],
)
def test_last_save_is_retried_until_it_succeeds_or_the_run_fails(last: int, times: int, tmp_path: Path) -> None:
    def break_disk() -> None:
        filesystem.fs = FaultyDisk("write", errno.EIO, steps=(last,), times=times)
        if last < STEPS:
            stop_at(last)

    with memory_dir(tmp_path) as folder:
        config, run_dir = make_config(folder, "train.save_every=5", "train.max_failed_saves=3"), folder / "run"
        code = train(config, run_dir, break_disk)
        fields = read_run_json(run_dir)
        if times == 1:
            assert (code, saved_steps(run_dir)[-1], fields["degraded"]) == (75 if last < STEPS else 0, last, None)
        else:
            assert (code, fields["status"], saved_steps(run_dir)[-1]) == (1, "failed", last - last % 5)
            assert "3 consecutive saves failed" in fields["error"]


def mount_small_disk(folder: Path, size: str) -> str | None:
    """In the child: mount a file system of its own on `folder`; return the error if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive_private = 0x20000, 0x44000  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    if (
        libc.unshare(new_namespace)
        or libc.mount(None, b"/", None, recursive_private, None)
        or libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode())
    ):
        return os.strerror(ctypes.get_errno())
    return None


def fill_completely(path: Path) -> None:
    with open(path, "wb", buffering=0) as filler:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while filler.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


@pytest.mark.slow
def test_run_loses_nothing_while_the_disk_is_full_for_some_steps(tmp_path: Path) -> None:
    """All writes fail, also those of metrics.jsonl, train.log and run.json."""

    def run_on_small_disk() -> None:
        if error := mount_small_disk(folder / "small", "24m"):
            (folder / "not permitted").write_text(error)
            os._exit(0)
        step_with_retries, close = loop.step_with_retries, RunMetadata.close

        def step(state, *args):
            result = step_with_retries(state, *args)
            if state.progress.step == 5:
                # a save that ends later deletes an old checkpoint: the disk has space again
                state.checkpoints.wait_for_save()
                fill_completely(folder / "small" / "filler")
            if state.progress.step == 9:
                (folder / "while full").write_text(
                    json.dumps([saved_steps(state.run_dir), temp_files(state.run_dir), last_logged_step(state.run_dir)])
                )
                (folder / "small" / "filler").unlink()
            return result

        def close_and_report(metadata) -> None:  # the disk disappears with this process
            run_dir = metadata.folder
            result = [
                saved_steps(run_dir),
                temp_files(run_dir),
                diff_run_dirs(folder / "uninterrupted", run_dir),
                metadata.fields,
            ]
            (folder / "at the end").write_text(json.dumps(result))
            close(metadata)

        loop.step_with_retries, RunMetadata.close = step, close_and_report

    with memory_dir(tmp_path) as folder:
        (folder / "small").mkdir()
        config = make_config(folder, "train.keep_checkpoints=2", "train.max_failed_saves=9")
        assert train(config, folder / "uninterrupted") == 0
        code = train(config, folder / "small" / "run", run_on_small_disk)
        if (folder / "not permitted").exists():
            pytest.skip(f"no permission to mount a disk: {(folder / 'not permitted').read_text()}")
        assert code == 0, read_output(folder / "small" / "run")
        saved, temporary, logged = json.loads((folder / "while full").read_text())
        assert saved[-1] in (3, 4, 5) and not temporary and logged < 9, "the disk was not full"
        saved, temporary, differences, fields = json.loads((folder / "at the end").read_text())
        assert (saved[-1], temporary, differences) == (STEPS, [], [])
        assert (fields["status"], fields["degraded"]) == ("completed", None)


@pytest.mark.parametrize(
    "exists",
    [pytest.param(False, id="new run"), pytest.param(True, id="existing run", marks=pytest.mark.slow)],
)
def test_read_only_run_directory_is_refused_and_left_unchanged(exists: bool, tmp_path: Path) -> None:
    def drop_privileges() -> None:
        if os.geteuid() == 0:  # root may write anywhere
            os.setgid(65534), os.setuid(65534)

    def modification_times() -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_mtime_ns) for path in (run_dir, *run_dir.rglob("*")))

    with memory_dir(tmp_path) as folder:
        folder.chmod(0o755)
        config, run_dir = make_config(folder), folder / "run"
        if exists:
            assert train(config, run_dir) == 0
        run_dir.mkdir(exist_ok=True)
        for path in (run_dir, *run_dir.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = modification_times()
        assert train(config, run_dir, drop_privileges) == 2
        assert modification_times() == before
        output = read_output(run_dir)
        fix = "continue there: resume=DIR" if exists else "hydra.run.dir=DIR"  # a run that is resumed stays where it is
        assert "Permission denied" in output and str(run_dir) in output and fix in output


def make_loss_nan(*steps: int) -> None:
    """In the child: the loss after each of these steps is NaN."""
    start_or_resume = loop.start_or_resume

    def start(state) -> None:
        start_or_resume(state)
        loss = state.objective.loss

        def nan_loss(model, batch):
            parts = loss(model, batch)
            return {**parts, "loss": parts["loss"] * (math.nan if state.progress.step in steps else 1)}

        state.objective.loss = nan_loss

    loop.start_or_resume = start


def saved_numbers_are_finite(run_dir: Path) -> bool:
    """Return whether all tensors of all checkpoints are finite, and no state.json contains NaN or Infinity."""
    checkpoints = list((run_dir / "checkpoints").glob("step-*"))
    tensors = [
        tensor
        for folder in checkpoints
        for path in folder.glob("*.safetensors")
        for tensor in safetensors.torch.load_file(path).values()
    ]
    texts = [(folder / "state.json").read_text() for folder in checkpoints]
    return (
        bool(tensors)
        and all(bool(tensor.isfinite().all()) for tensor in tensors)
        and not any("NaN" in text or "Infinity" in text for text in texts)
    )


@pytest.mark.parametrize("precision", [pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16")])
def test_checkpoints_contain_no_nan_after_steps_with_nan_loss(precision: str, tmp_path: Path) -> None:
    with memory_dir(tmp_path) as folder:
        config = make_config(
            folder, f"train.keep_checkpoints={STEPS}", f"precision={precision}", "train.max_nonfinite_steps=3"
        )
        assert train(config, folder / "run", lambda: make_loss_nan(2, 7, 8)) == 0
        assert len(saved_steps(folder / "run")) == STEPS and saved_numbers_are_finite(folder / "run")
        assert train(config, folder / "diverged", lambda: make_loss_nan(4, 5, 6)) == 1
        fields = read_run_json(folder / "diverged")
        assert (fields["status"], fields["outcome"]) == ("failed", "diverged") and saved_numbers_are_finite(
            folder / "diverged"
        )


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """E.g. after a memory error: the loss may be finite still."""

    def break_weight() -> None:
        train_step = loop.train_step

        def broken_step(state, *args):
            if state.progress.step == 5:
                state.model.model.embed_tokens.weight.data[6000] = math.inf
            return train_step(state, *args)

        loop.train_step = broken_step

    with memory_dir(tmp_path) as folder:
        config = make_config(folder, "train.keep_checkpoints=2", "train.max_nonfinite_steps=9", "train.sample_every=0")
        assert train(config, folder / "run", break_weight) == 1
        assert saved_steps(folder / "run")[-1] == 5 and saved_numbers_are_finite(folder / "run")
        assert "embed_tokens.weight" in read_run_json(folder / "run")["error"]
