"""Errors of the disk at every kind of call of a small run: retried, or reported with an exit code that is true; a
resume continues to the same bits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
from fault_counts import faults
from trainee import launch, make_config, memory_dir, read_run_json, saved_steps, temp_files, train, wait_for_exit

from common import filesystem
from common.file_lock import NO_LOCKS_PROMISE
from common.filesystem import NO_FOLDER_SYNC_PROMISE, FileSystem
from models.formats.load import load_weights
from runner.engine.verify_resume import diff_run_dirs
from runner.fault_injection.probes import DiskFault, DiskHook

STEPS = 3
SETTINGS = (f"train.max_steps={STEPS}", "train.eval_every=2", "train.sample_every=2")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
POINTERS = ("best", "latest")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", (0, 0))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with memory_dir(tmp_path) as folder:
        yield folder


def inject(hook: DiskHook) -> None:
    """In the child: the fault of `hook`, also for the writer of safetensors, which is no Python: it writes
    model/model.safetensors.
    """
    hook.install()
    save = safetensors.torch.save_file

    def save_file(tensors: dict, path: Path, **options: object) -> None:
        try:
            os.truncate(path, 0)  # a call that is counted
        except OSError as error:
            raise safetensors.SafetensorError(
                f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            ) from None
        save(tensors, path, **options)

    safetensors.torch.save_file = save_file


def problems_of_completed(run_dir: Path, reference: Path) -> list[str]:
    """Return what exit code 0 promises and is not there."""
    problems = diff_run_dirs(reference, run_dir) + temp_files(run_dir)
    fields, expected = read_run_json(run_dir), read_run_json(reference)
    problems += [
        f"run.json: {name}"
        for name in ("status", "degraded", "export", "step", "checkpoint")
        if fields[name] != expected[name]
    ]
    problems += [] if saved_steps(run_dir)[-1] == STEPS else ["the last checkpoint"]
    checkpoints = run_dir / "checkpoints"
    problems += [
        name for name in POINTERS if (checkpoints / name).read_text() != (reference / "checkpoints" / name).read_text()
    ]
    problems += [] if load_weights(run_dir / "model").keys() == load_weights(reference / "model").keys() else ["model/"]
    lost = Counter(logged_steps(reference)) - Counter(logged_steps(run_dir))
    return problems + [f"train.log: {line}" for line in lost]


def logged_steps(run_dir: Path) -> list[str]:
    """Lines of steps, validations and samples in train.log, without numbers that depend on time; other lines, as of
    slow data, come by chance.
    """
    return re.findall(
        r"^(?:step [0-9]+/[0-9]+ .*?[|] (?:loss|validation)|sample at step [0-9]+)",
        (run_dir / "train.log").read_text(),
        re.MULTILINE,
    )


def fail_first_sync_of_each_file(done: Path) -> None:
    """In the child: the first fsync of each file or folder that the run writes fails, and is recorded in `done`."""
    failed: set[str] = set()

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        parts = [
            re.sub(r"^\.tmp-(.*?)(-[0-9]+-[0-9a-f]{8})?$", r"\1", part) for part in path.split("/run/")[-1].split("/")
        ]
        name = "/".join(parts[:2] if parts[0] == "checkpoints" else parts[:1])
        if "/run/" in path and name not in failed:
            failed.add(name)
            done.write_text(" ".join(sorted(failed)))
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        original(fd)

    original = os.fsync
    os.fsync = fsync
    FileSystem.fsync = staticmethod(fsync)


@pytest.mark.slow
def test_run_whose_files_each_fail_once_is_complete(folder: Path) -> None:
    config = make_config(folder, *SETTINGS)
    assert train(config, folder / "reference") == 0
    assert train(config, folder / "run", lambda: fail_first_sync_of_each_file(folder / "failed")) == 0
    steps = {f"checkpoints/step-{step:08d}" for step in range(1, STEPS + 1)}
    expected = {
        *steps,
        "checkpoints/best",
        "checkpoints/latest",
        "metrics.jsonl",
        "samples.jsonl",
        "run.json",
        "model",
        "tokenizer",
    }
    assert expected <= set((folder / "failed").read_text().split())
    assert problems_of_completed(folder / "run", folder / "reference") == []


def weaken_file_system() -> None:
    """In the child: no locks, and no sync of folders."""

    def refuse_lock(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def sync_files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    filesystem.WEAKER_PROMISES.clear()
    fcntl.lockf = refuse_lock
    os.fsync = sync_files_only
    FileSystem.fsync = staticmethod(sync_files_only)


@pytest.mark.slow
def test_run_on_a_file_system_without_locks_completes_and_warns_once(folder: Path) -> None:
    config, run_dir = make_config(folder, *SETTINGS), folder / "run"
    assert train(config, run_dir, weaken_file_system) == 0
    promises = [NO_FOLDER_SYNC_PROMISE, NO_LOCKS_PROMISE]
    assert (
        read_run_json(run_dir)["weaker_promises"] == promises
        and saved_steps(run_dir)[-1] == STEPS
        and not temp_files(run_dir)
    )
    lines = (run_dir / "train.log").read_text().splitlines()
    assert [lines.count(f"warning: {promise}") for promise in promises] == [1, 1]
    assert not list(run_dir.glob(".lock.owner*"))


def run_with_fault(config, run_dir: Path, fault: DiskFault) -> Callable[[], int | None]:
    """Start a run; return the function that waits for its exit code."""
    run_dir.parent.mkdir()
    return partial(wait_for_exit, launch(config, run_dir, lambda: inject(DiskHook(run_dir, fault))))


@pytest.mark.slow(long=True)
def test_disk_faults_at_many_calls_end_with_true_exit_codes(folder: Path) -> None:
    count = faults(12, full=60)  # each of ERRORS once and from then on
    config, hook, reference = make_config(folder, *SETTINGS), DiskHook(folder / "reference"), folder / "reference"
    assert train(config, reference, lambda: inject(hook)) == 0
    numbers = [2 + number * (hook.calls - 2) // count for number in range(count)]  # the first call creates the lock
    assert len({*numbers}) == count
    disk_faults = [
        DiskFault(first, 1 if index % 3 else 10**6, ERRORS[index % 4]) for index, first in enumerate(numbers)
    ]
    problems: list[str] = []
    codes: dict[int, int] = {}
    for pair in (list(enumerate(disk_faults))[start : start + 2] for start in range(0, count, 2)):
        runs = [(fault, folder / f"fault{index}" / "run") for index, fault in pair]
        exits = [run_with_fault(config, run_dir, fault) for fault, run_dir in runs]
        for (fault, run_dir), wait in zip(runs, exits, strict=True):
            code = wait()
            codes[code] = codes.get(code, 0) + 1
            problems += [
                f"{fault}, exit code {code}: {problem}"
                for problem in problems_after(code, fault, config, run_dir, reference)
            ]
            shutil.rmtree(run_dir.parent)
    print("exit codes", codes)
    assert problems == [] and codes[0] >= count // 2 and codes[1] >= count // 6


def problems_after(code: int, fault: DiskFault, config, run_dir: Path, reference: Path) -> Iterator[str]:
    output = (run_dir.parent / "output.txt").read_text()
    if "Traceback" in output:
        yield f"traceback: {output[-1000:]}"
    if code == 0:
        yield from problems_of_completed(run_dir, reference)
    elif code not in (1, 2) or not re.search("^error: .*bytes are free", output, re.MULTILINE):
        yield f"no clear error: {output[-1000:]}"
    if code == 2 and fault.times == 1 and run_dir.exists():
        yield f"left behind: {os.listdir(run_dir)}"
    log = run_dir / "train.log"
    reported = map(int, re.findall(r"saved step-([0-9]+) in", log.read_text() if log.exists() else ""))
    if code and max(saved_steps(run_dir), default=0) < max(reported, default=0):
        yield "a save that was reported is not there"
    if code and (again := train(config, run_dir)):
        yield f"resume ended with {again}: {(run_dir.parent / 'output.txt').read_text()[-1000:]}"
    elif code:
        yield from diff_run_dirs(reference, run_dir)
