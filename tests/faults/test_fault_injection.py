"""faults.py: it injects what it says, continues as a user would, and finds each kind of broken promise."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from trainee import OVERRIDES, write_rows

from common.errors import UserError
from data.store.cache import is_own_cache
from runner.engine import loop
from runner.engine.device import cpu
from runner.fault_injection.harness import (
    FAULT_KINDS,
    FaultsConfig,
    check_harness_overrides,
    complete,
    estimate,
    fault_table,
    make_folder,
    run_faults,
)
from runner.fault_injection.kinds import INJECT
from runner.fault_injection.probes import DiskFault, DiskHook, WorkerProbe
from runner.fault_injection.rig import (
    FaultResult,
    Rig,
    Trial,
    UninterruptedRun,
    import_heavy_libraries,
    launch_fork,
    run_reference,
)

SHORT = [override for override in OVERRIDES if not override.startswith(("train.epochs", "train.sample_every"))] + [
    "train.max_steps=5",
    "train.sample_every=2",
]


def config(**changed: object) -> FaultsConfig:
    values = {
        "cold": 0,
        "fault_seed": 1,
        "only": None,
        "folder": None,
        "to": None,
        "acknowledge_within": 30.0,
        "timeout": 120.0,
    }
    return FaultsConfig(**{**dict.fromkeys(FAULT_KINDS, 0), **values, **changed})


@pytest.mark.parametrize("first, times", [(1, 1), (3, 2), (2, 1 << 30)])
def test_disk_hook_fails_the_named_calls_and_counts_all(tmp_path: Path, first: int, times: int) -> None:
    """Six calls: open and write through os, open and write through open(), rename, mkdir."""
    folder = tmp_path / "run"
    folder.mkdir()
    hook = DiskHook(folder, DiskFault(first, times, errno.ENOSPC))

    def calls() -> int:
        hook.install()
        failed = []
        (tmp_path / "other.txt").write_text("not counted")
        for number, call in enumerate(
            [
                lambda: os.close(os.open(folder / "a", os.O_WRONLY | os.O_CREAT)),
                lambda: os.mkdir(folder / "b"),
                lambda: os.rename(folder / "before", folder / "c"),
                lambda: (folder / "d").mkdir(),
            ],
            start=1,
        ):
            try:
                call()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed.append(number)
        print(json.dumps(failed))
        return 0

    (folder / "before").write_text("")
    launch = launch_fork(calls, tmp_path / "output.txt")
    launch.wait(60)
    assert (launch.code, hook.calls) == (0, 4)
    assert json.loads(launch.text()) == [number for number in range(1, 5) if first <= number < first + times]


def test_disk_hook_reaches_the_writes_of_open(tmp_path: Path) -> None:
    hook = DiskHook(tmp_path, DiskFault(2, 1, errno.EIO))  # the second call: the first is the opening

    def write() -> int:
        hook.install()
        try:
            (tmp_path / "file").write_text("x")
        except OSError as error:
            return error.errno or 0
        return 0

    launch = launch_fork(write, tmp_path.parent / "output.txt")
    launch.wait(60)
    assert launch.code == errno.EIO and hook.calls == 3  # closing the file writes again


def test_full_disk_does_not_refuse_to_delete(tmp_path: Path) -> None:
    hook = DiskHook(tmp_path / "run", DiskFault(1, 1 << 30, errno.ENOSPC))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("x")

    def delete() -> int:
        hook.install()
        os.unlink(tmp_path / "run" / "file")
        return 0

    launch = launch_fork(delete, tmp_path / "output.txt")
    launch.wait(60)
    assert launch.code == 0 and not (tmp_path / "run" / "file").exists()


def test_launch_that_hangs_is_ended_and_its_processes_are_found(tmp_path: Path) -> None:
    def hang() -> int:
        if os.fork():
            (tmp_path / "forked").touch()
        signal.pause()
        return 0

    launch = launch_fork(hang, tmp_path / "output.txt")
    assert launch.wait(60, until=(tmp_path / "forked").exists)
    launch.wait(0.1)
    assert launch.is_hanging and launch.code == -signal.SIGKILL
    assert len(launch.left_processes(0.1)) == 1
    assert launch.left_processes(60) == []


def test_launches_have_one_number_of_threads_while_trainings_begin(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cpu.RunningTrainings, "threads_of_others", lambda self: [1])
    monkeypatch.setattr(cpu, "default_threads", lambda: 2)
    monkeypatch.setattr(cpu, "_chosen", None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    import_heavy_libraries()
    assert cpu.choose_threads() is None, "its own number would give a launch other bits than the undisturbed run"


def test_launch_ends_although_a_pool_of_threads_was_not_shut_down(tmp_path: Path) -> None:
    """The compiler of torch has one."""
    pools = []

    def compute() -> int:
        pools.append(ThreadPoolExecutor(1))
        return pools[0].submit(int, "7").result()

    launch = launch_fork(compute, tmp_path / "output.txt")
    launch.wait(60)
    assert launch.code == 7 and not launch.is_hanging


def test_launch_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    read, write = os.pipe()  # open as long as the launch of the launch

    def hang() -> int:
        signal.pause()
        return 0

    def start() -> int:
        launch_fork(hang, tmp_path / "inner.txt")
        os.close(write)
        (tmp_path / "started").touch()
        return hang()

    outer = launch_fork(start, tmp_path / "outer.txt")
    os.close(write)
    assert outer.wait(60, until=(tmp_path / "started").exists)
    outer.send(signal.SIGKILL)
    assert select.select([read], [], [], 60)[0] and os.read(read, 1) == b""
    outer.wait(60)
    os.close(read)


def test_promises_that_are_not_kept_are_counted(tmp_path: Path) -> None:
    results = [
        FaultResult("kills", 1, injected=True, codes=[-9, 0]),
        FaultResult("kills", 2, injected=True, codes=[-9, 0], bits=["model.safetensors"]),
    ]
    results += [
        FaultResult("signals", 1, injected=True, acknowledged=0.25, codes=[75, 0]),
        FaultResult("disk", 1, codes=[0], leftovers=["x", "y"]),
    ]
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in fault_table(results).splitlines()
    }
    assert (
        rows["kills"][:2] == ["2 of 2", ""] and rows["kills"][5] == "1" and results[1].broken == ["model.safetensors"]
    )
    assert rows["signals"][1] == "0.25 s" and rows["disk"][0] == "0 of 1" and rows["disk"][8] == "1"


@pytest.mark.parametrize("override", ["resume=last", "hydra.run.dir=x", "data.cache=y"])
def test_settings_of_the_harness_are_refused(override: str) -> None:
    with pytest.raises(UserError, match="places the runs itself"):
        check_harness_overrides([override])


def test_faults_are_named_drawn_and_estimated(tmp_path: Path) -> None:
    assert config(kills=1, workers=2).faults() == [("kills", 1), ("workers", 1), ("workers", 2)]
    assert config(only="disk-7").faults() == [("disk", 7)]
    assert [config(only="kills-3", cold=2).is_cold("kills", number) for number in (2, 3)] == [True, False], (
        "the same as without only="
    )
    assert estimate(config(kills=10), 2.0) > estimate(config(kills=5), 2.0) > 10
    with pytest.raises(UserError, match="KIND-NUMBER"):
        config(only="disk")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not empty"):
        make_folder(config(kills=1, folder=str(tmp_path)))
    rig = Rig([], tmp_path, 1.0)
    draws = [
        Trial(rig, "kills", number, seed, draw).rng.random() for number in (1, 2) for seed in (1, 2) for draw in (0, 1)
    ]
    assert len(set(draws)) == 8 and Trial(rig, "kills", 2, 2, 1).rng.random() == draws[-1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, UninterruptedRun]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("faults")
    write_rows(folder)
    rig = Rig([*SHORT, f"data.path={folder / 'rows.jsonl'}"], folder, 120)
    return rig, run_reference(rig)


@pytest.mark.slow
@pytest.mark.parametrize("kind, number", [("kills", 2), ("disk", 1), ("flips", 1), ("signals", 1), ("signals", 5)])
def test_run_survives_one_fault_of_each_kind(measured: tuple[Rig, UninterruptedRun], kind: str, number: int) -> None:
    rig, reference = measured
    trial = Trial(rig, kind, number, seed=1)
    INJECT[kind](trial, reference)
    complete(trial, reference, acknowledge_within=300)
    assert trial.result.broken == [], trial.result
    assert not trial.folder.exists()


@pytest.mark.slow
def test_faults_that_break_promises_are_found(
    measured: tuple[Rig, UninterruptedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that depends on how often it was launched, and that dies of a signal with a traceback."""
    rig, reference = measured
    monkeypatch.setattr(loop, "lr_at", lambda step, total, lr, schedule: lr * (1 + os.getpid() % 7))
    monkeypatch.setattr(loop, "save_and_interrupt", lambda state: 1 / 0)
    trial = Trial(rig, "signals", 2, seed=1)
    INJECT["signals"](trial, reference)
    complete(trial, reference, acknowledge_within=300)
    assert trial.result.bits and trial.result.tracebacks and trial.result.exits, trial.result
    assert trial.folder.exists()


@pytest.mark.slow
def test_command_that_fails_undisturbed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exit code 2"):
        run_faults(config(kills=1, folder=str(tmp_path / "faults")), [*SHORT, "data.path=/nowhere.jsonl"])


def test_worker_probe_knows_the_data_workers_and_stops_the_named_one(tmp_path: Path) -> None:
    probe = WorkerProbe()

    def main() -> int:
        probe.install(2, signal.SIGKILL)
        for name in ("tokenizing process 0 of 1", "data worker 0 of 2", "data worker 1 of 2"):
            multiprocessing.get_context("fork").Process(target=signal.pause, name=name, daemon=True).start()
        signal.pause()
        return 0

    launch = launch_fork(main, tmp_path / "output.txt")
    launch.wait(1.0, until=lambda: False)
    assert len(probe.alive()) == 1
    assert launch.left_processes(0.1) and not launch.left_processes(60)


def test_cleared_cache_of_the_harness_is_one_that_a_resume_uses(tmp_path: Path) -> None:
    """Where it was missing, a resume used the cache of the program, and the harness reported the changed setting as
    different bits.
    """
    rig = Rig([], tmp_path, 1.0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "old").touch()
    rig.clear_cache()
    assert is_own_cache(tmp_path / "cache") and not any((tmp_path / "cache").iterdir())
