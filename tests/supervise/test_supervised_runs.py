"""train.supervise=true with training processes that are a few lines of Python: restarts, limits, signals, hangs, and
the records of incidents.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import AlreadyReported, Interrupted, TrainingError, UserError
from runner.config.compose import compose_config
from runner.config.unread import check_typed_are_read
from runner.launch import local_ranks, run, subprocesses
from runner.launch.failures import FailureKind
from runner.launch.supervisor import Supervisor
from runner.run_dir.metadata import RunMetadata

HEAD = """
import json, os, signal, sys, time
os.chdir(os.path.dirname(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
attempt = json.load(open('run.json'))['attempt']
train = json.load(open(sys.argv[1]))['train']
def record(**fields):
    with open('run.json') as file: fields = json.load(file) | fields
    with open('.tmp-record', 'w') as file: json.dump(fields, file)
    os.replace('.tmp-record', 'run.json')
def save(step): os.makedirs(f'checkpoints/step-{step:08d}', exist_ok=True)
"""
GOOD = "record(status='completed', metrics={'loss': 1.5}, step=9)\n"
KILLED = "os.kill(os.getpid(), 9)\n"
SEGFAULT = "os.kill(os.getpid(), 11)\n"
FAILED = "record(status='failed', outcome='failed', error='KeyError: lost'); sys.exit(1)\n"
DIVERGED = "record(status='failed', outcome='diverged', error='3 steps were not finite'); sys.exit(1)\n"
NO_MEMORY = "record(status='failed', outcome='failed', error='OutOfMemoryError: CUDA out of memory'); sys.exit(1)\n"
REFUSED = "print('error: a row is wrong\\n  where: rows.jsonl:3\\n  fix:   mend it', file=sys.stderr); sys.exit(2)\n"
HANGS = "import faulthandler; faulthandler.enable(open(os.environ['RUNNER_STACKS'], 'w'))\ndef wait_for_ever(): time.sleep(60)\nwait_for_ever()\n"
SAVES_ON_SIGNAL = """
def stop(*_): record(status='interrupted', step=7); sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP): signal.signal(number, stop)
open('ready', 'w').close()
time.sleep(60)
"""


def at(**scripts: str) -> str:
    """Return a script that runs `scripts["first"]` at the first attempt, ..., `scripts["then"]` at all others."""
    numbers = {"first": 1, "second": 2, "third": 3}
    branches = "".join(
        f"if attempt == {numbers[name]}:\n    " + code.replace("\n", "\n    ").rstrip() + "\n"
        for name, code in scripts.items()
        if name in numbers
    )
    return branches + scripts["then"]


@pytest.fixture(scope="module")
def config() -> Any:
    config = compose_config(
        ["device=cpu", "train.supervise=true", "supervise.delay=0", "train.batch_size=8", "train.accumulation_steps=3"]
    )
    return dataclasses.replace(config, init_from="scratch")


@pytest.fixture
def supervise(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """`supervise(script, **settings)` returns the loss, or raises."""
    spawn = subprocesses.spawn

    def run(script: str, ranks: int = 1, **settings: Any) -> float:
        monkeypatch.setattr(
            local_ranks.subprocesses,
            "spawn",
            lambda program, environment, out: spawn(["-c", HEAD + script, *program[1:]], environment, out),
        )
        changed = dataclasses.replace(config, supervise=dataclasses.replace(config.supervise, **settings))
        with RunMetadata.open(tmp_path / "run") as metadata:
            metadata.mark_running()
            return local_ranks.train_on_ranks(changed, metadata, ranks)

    return run


def incidents(tmp_path: Path) -> list[dict]:
    file = tmp_path / "run" / "incidents.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_json(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "run.json").read_text())


def test_supervised_run_without_a_fault_leaves_no_record(supervise: Any, tmp_path: Path) -> None:
    assert supervise(GOOD) == 1.5
    assert incidents(tmp_path) == [] and run_json(tmp_path)["attempt"] == 1
    assert not [path.name for path in (tmp_path / "run").glob(".tmp-*") if path.name != ".tmp-record"]


@pytest.mark.parametrize(
    ("fault", "kind", "end"),
    [
        (KILLED, "killed", "SIGKILL"),
        pytest.param(SEGFAULT, "crash", "SIGSEGV", marks=pytest.mark.slow),
        pytest.param(FAILED, "error", 1, marks=pytest.mark.slow),
        pytest.param(NO_MEMORY, "out_of_memory", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(7)\n", "error", 7, marks=pytest.mark.slow),
    ],
)
def test_supervised_run_is_restarted_after(
    supervise: Any, tmp_path: Path, fault: str, kind: str, end: int | str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text("".join(f"step {n}\n" for n in range(40)))
    assert supervise(at(first="save(4)\n" + fault, then=GOOD)) == 1.5
    (incident,) = incidents(tmp_path)
    assert [incident[name] for name in ("kind", "attempt", "step", "rank")] == [kind, 1, 4, 0]
    assert (incident["signal"] or incident["exit_code"]) == end
    assert (
        incident["action"] == "restart 1 of 3 from step 4"
        and incident["last_lines"][-1] == "step 39"
        and len(incident["last_lines"]) == 12
    )
    fields = run_json(tmp_path)
    assert (fields["status"], fields["attempt"]) == ("completed", 2)


@pytest.mark.slow
def test_supervised_run_stops_when_the_fault_comes_back_at_the_same_step(supervise: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="SIGKILL"):
        supervise("save(4)\n" + KILLED, max_restarts=2)
    assert [incident["action"] for incident in incidents(tmp_path)] == [
        "restart 1 of 2 from step 4", "restart 2 of 2 from step 4", "no restart: 2 restarts without a newer checkpoint than step 4",
    ]  # fmt: skip
    assert run_json(tmp_path)["status"] == "failed"


@pytest.mark.slow
def test_supervised_run_with_progress_is_restarted_without_limit(supervise: Any, tmp_path: Path) -> None:
    assert supervise("save(attempt)\nif attempt < 5: " + KILLED + GOOD, max_restarts=1) == 1.5
    assert [incident["action"] for incident in incidents(tmp_path)] == [
        f"restart 1 of 1 from step {step}" for step in (1, 2, 3, 4)
    ]


def test_supervised_run_that_diverges_is_not_restarted(supervise: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        supervise(DIVERGED)
    assert [(one["kind"], one["action"]) for one in incidents(tmp_path)] == [
        ("diverged", "no restart: a diverged run diverges again")
    ]
    assert run_json(tmp_path)["outcome"] == "diverged"


@pytest.mark.slow
def test_supervised_run_that_is_refused_is_not_restarted(supervise: Any, tmp_path: Path) -> None:
    with pytest.raises(AlreadyReported):
        supervise(REFUSED)
    assert incidents(tmp_path) == [] and run_json(tmp_path)["attempt"] == 1


@pytest.mark.slow
def test_restart_that_is_refused_is_a_failure_of_a_run_that_has_trained(supervise: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="restart was refused"):
        supervise(at(first=KILLED, then=REFUSED))
    fields = run_json(tmp_path)
    assert (fields["status"], fields["attempt"], len(incidents(tmp_path))) == ("failed", 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), 15)\n", "os._exit(143)\n"])
def test_stop_request_to_the_training_process_alone_ends_the_run(supervise: Any, tmp_path: Path, fault: str) -> None:
    with pytest.raises(Interrupted, match="step 4"):
        supervise("save(4)\n" + fault)
    assert run_json(tmp_path)["status"] == "interrupted" and [one["kind"] for one in incidents(tmp_path)] == ["stopped"]


def signal_when(condition: Callable[[], bool], number: int) -> threading.Thread:
    def send() -> None:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_supervisor_is_forwarded_and_ends_it(supervise: Any, tmp_path: Path, number: int) -> None:
    thread = signal_when((tmp_path / "run" / "ready").exists, number)
    with pytest.raises(Interrupted, match="step 7"):
        supervise(SAVES_ON_SIGNAL)
    thread.join()
    assert incidents(tmp_path) == []


def test_signal_between_a_failure_and_the_restart_ends_the_run(supervise: Any, tmp_path: Path) -> None:
    thread = signal_when(lambda: bool(incidents(tmp_path)), signal.SIGTERM)
    started = time.monotonic()
    with pytest.raises(Interrupted, match="step 4"):
        supervise("save(4)\n" + KILLED, delay=300)
    thread.join()
    assert time.monotonic() - started < 60 and run_json(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_hang_writes_the_stacks_and_is_restarted(supervise: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert supervise(at(first=HANGS, then=GOOD), hang_timeout=3 / 60) == 1.5
    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["signal"]) == ("hang", "SIGABRT")
    assert any("in wait_for_ever" in line for line in incident["stacks"])
    shown = capfd.readouterr().err
    assert (
        "in wait_for_ever" in shown
        and "docs/guide/troubleshooting.md#hang" in shown
        and "no sign of life for 0.05 minutes" in incident["error"]
    )


@pytest.mark.slow
def test_hang_that_ignores_the_request_for_stacks_is_killed(
    supervise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ranks, "HANG_GRACE", 0.3)
    assert (
        supervise(
            at(first="signal.signal(signal.SIGABRT, signal.SIG_IGN)\ntime.sleep(60)\n", then=GOOD), hang_timeout=3 / 60
        )
        == 1.5
    )
    assert [(one["kind"], one["signal"]) for one in incidents(tmp_path)] == [("hang", "SIGKILL")]


@pytest.mark.slow
def test_hang_of_one_of_two_ranks_is_named(supervise: Any, tmp_path: Path) -> None:
    beats = "file = open(os.environ['RUNNER_HEARTBEAT'], 'r+b', buffering=0)\nfor n in range(600): file.seek(0); file.write((n + 1).to_bytes(8, 'little')); time.sleep(0.05)\n"
    script = at(first="if os.environ['RANK'] == '1': time.sleep(60)\n" + beats, then=GOOD)
    assert supervise(script, ranks=2, hang_timeout=3 / 60) == 1.5
    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["rank"]) == ("hang", 1) and incident["error"].startswith(
        "rank 1: no sign of life"
    )


@pytest.mark.slow
def test_lack_of_memory_halves_the_micro_batch_only_if_asked_for(supervise: Any, tmp_path: Path) -> None:
    fails = (
        "if train['batch_size'] > 2: "
        + NO_MEMORY
        + "record(rows=[train['batch_size'], train['accumulation_steps']])\n"
        + GOOD
    )
    assert supervise(fails, halve_batch=True) == 1.5
    assert run_json(tmp_path)["rows"] == [2, 12]
    assert [one["action"] for one in incidents(tmp_path)] == [
        "restart 1 of 3 from the start, train.batch_size=4 train.accumulation_steps=6",
        "restart 2 of 3 from the start, train.batch_size=2 train.accumulation_steps=12",
    ]
    with pytest.raises(UserError):  # the run is completed
        supervise(fails)


@pytest.mark.parametrize(
    ("size", "accumulation", "adapted", "advised"),
    [
        (8, 3, ", train.batch_size=4 train.accumulation_steps=6", "train.batch_size=4 train.accumulation_steps=6 needs less"),
        (15, 1, ", train.batch_size=5 train.accumulation_steps=3", "train.batch_size=5 train.accumulation_steps=3 needs less"),
        (
            13, 1, ", train.batch_size=1 train.accumulation_steps=13",
            "train.batch_size=1 train.accumulation_steps=13 (or train.batch_size=7 train.accumulation_steps=2: 14 rows per step instead of 13) needs less",
        ),
        (1, 4, "", "train.activation_checkpointing=full needs less"),
    ],
)  # fmt: skip
def test_lack_of_memory_keeps_the_rows_of_a_step_for_odd_micro_batches(
    config: Any, tmp_path: Path, size: int, accumulation: int, adapted: str, advised: str
) -> None:
    train = dataclasses.replace(config.train, batch_size=size, accumulation_steps=accumulation)
    for halves in (True, False):
        changed = dataclasses.replace(
            config, train=train, supervise=dataclasses.replace(config.supervise, halve_batch=halves)
        )
        with RunMetadata.open(tmp_path / f"run-{halves}") as metadata:
            supervisor = Supervisor(changed, metadata)
        assert supervisor._adapt(FailureKind.OUT_OF_MEMORY) == (adapted if halves else "")
        assert halves or advised in supervisor._advice(FailureKind.OUT_OF_MEMORY)
        after = supervisor.config.train
        assert after.batch_size * after.accumulation_steps == size * accumulation


@pytest.mark.slow
def test_lack_of_memory_leaves_the_micro_batch_unless_asked_for(
    supervise: Any, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert (
        supervise(at(first=NO_MEMORY, then="record(rows=[train['batch_size'], train['accumulation_steps']])\n" + GOOD))
        == 1.5
    )
    assert run_json(tmp_path)["rows"] == [8, 3]
    shown = capfd.readouterr().err
    assert (
        "train.batch_size=4 train.accumulation_steps=6 needs less" in shown
        and "docs/guide/troubleshooting.md#out-of-memory" in shown
    )


@pytest.mark.slow
def test_incidents_on_a_disk_that_refuses_them_do_not_stop_the_supervisor(
    supervise: Any, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert supervise(at(first="os.symlink('/dev/full', 'incidents.jsonl')\n" + KILLED, then=GOOD)) == 1.5
    assert "incidents.jsonl cannot be written" in capfd.readouterr().err


def test_supervision_under_torchrun_is_refused_by_name(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="torchrun") as caught:
        run.check_inputs(config)
    assert caught.value.setting == "train.supervise=true"


def test_settings_of_supervision_without_it_are_refused(config: Any) -> None:
    unsupervised = dataclasses.replace(config, train=dataclasses.replace(config.train, supervise=False))
    for override in (
        "supervise.delay=1",
        "supervise.max_restarts=2",
        "supervise.hang_timeout=1",
        "supervise.halve_batch=true",
    ):
        check_typed_are_read([override], [config])
        with pytest.raises(UserError, match="is not read"):
            check_typed_are_read([override], [unsupervised])
    with pytest.raises(UserError, match="max_restarts must be at least 1"):
        dataclasses.replace(config.supervise, max_restarts=0)
