"""Local ranks, each replaced by a few lines of Python: exit codes, logs, restarts, signals, and the messages of
torchrun.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import (
    INTERRUPTED,
    USER_ERROR,
    AlreadyReported,
    Interrupted,
    StopRequested,
    TrainingError,
    report_user_error,
)
from runner.config.compose import compose_config
from runner.engine.device import cpu, distributed
from runner.engine.device.distributed import RENDEZVOUS_ENV
from runner.engine.device.signals import SignalForwarder, StopFlag
from runner.launch import local_ranks, subprocesses, torchrun, train_process
from runner.run_dir.metadata import RunMetadata

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, signal, sys, time
os.chdir(os.path.dirname(sys.argv[1]))
def record(**fields):
    with open('run.json') as file: fields = json.load(file) | fields
    with open('.tmp-record', 'w') as file: json.dump(fields, file)
    os.replace('.tmp-record', 'run.json')
def on_signal(act):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP): signal.signal(number, act)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
    open('ready' + os.environ['RANK'], 'w').close()
def wait(*names):
    while not all(map(os.path.exists, names)): time.sleep(0.01)
"""
GOOD = "record(status='completed', metrics={'loss': 1.5})"
PRINTS = "print('output of rank one')"
SAVES_ON_SIGNAL = "on_signal(lambda *_: (record(status='interrupted', step=7), sys.exit(75)))\ntime.sleep(60)"
EXITS_ON_SIGNAL = "on_signal(lambda *_: sys.exit(75))\ntime.sleep(60)"
HANGS = "time.sleep(60)"
BUG = "raise KeyError('lost')"
KILLED = "os.kill(os.getpid(), 9)"
USER_ERROR_EXIT = (
    "print('error: a row is wrong\\n  where: rows.jsonl:3\\n  fix:   mend it', file=sys.stderr); sys.exit(2)"
)
DIVERGED = "record(status='failed', outcome='diverged', error='3 steps in a row were not finite'); sys.exit(1)"
STACKS = "print('Timeout (0:00:01)!\\nThread 0x1 (most recent call first):\\n  File loop.py, line 7', file=sys.stderr, flush=True)\n"


def spawn_scripts(scripts: list[str]) -> Callable[..., subprocess.Popen]:
    spawn = subprocesses.spawn

    def spawn_script(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
        return spawn(["-c", HEAD + scripts[int(environment["RANK"])], *program[1:]], environment, out)

    return spawn_script


@pytest.fixture(scope="module")
def config() -> Any:
    return compose_config(["distributed=ddp", "device=cpu"])


@pytest.fixture
def run(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(script of rank 0, script of rank 1, ...)` returns the loss, or raises."""
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 1.0)

    def run(*scripts: str, max_restarts: int = 0) -> float:
        monkeypatch.setattr(local_ranks.subprocesses, "spawn", spawn_scripts(list(scripts)))
        restarting = dataclasses.replace(
            config, distributed=dataclasses.replace(config.distributed, max_restarts=max_restarts)
        )
        with RunMetadata.open(tmp_path / "run") as metadata:
            metadata.mark_running()
            return local_ranks.train_on_ranks(restarting, metadata, len(scripts))

    return run


def run_json(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "run.json").read_text())


def log(tmp_path: Path) -> str:
    return (tmp_path / "run" / "logs" / "rank1.log").read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_ranks_that_complete_leave_loss_and_logs_only(run: Any, tmp_path: Path) -> None:
    assert run(GOOD, PRINTS) == 1.5
    assert run_json(tmp_path)["status"] == "completed"
    header, line = log(tmp_path).splitlines()
    assert header.startswith("--- attempt 1, rank 1 of 2, ") and line == "output of rank one"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "logs", "run.json"}


def test_rank_environment_has_rank_world_size_and_threads(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", RENDEZVOUS_ENV, "OMP_NUM_THREADS", "HYDRA_FULL_ERROR")
    run(GOOD, f"json.dump({{name: os.environ.get(name) for name in {names}}}, open('seen.json', 'w'))")
    seen = json.loads((tmp_path / "run" / "seen.json").read_text())
    assert seen.pop(RENDEZVOUS_ENV).startswith(f"file://{tmp_path / 'run' / '.tmp-rendezvous-'}")
    assert seen == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "HYDRA_FULL_ERROR": None,
    }


def test_threads_per_rank_divide_the_cores_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert [cpu.threads_per_rank(count) for count in (2, 3, 16)] == ["4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cpu.threads_per_rank(2) == "4"
    monkeypatch.setenv(cpu.THREADS_ENV, "4")  # a sweep of two jobs at a time has set it
    assert cpu.threads_per_rank(2) == "2"


def test_rank_that_raises_ends_the_others_and_its_traceback_is_printed(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(TrainingError, match="^rank 1: KeyError: 'lost'$"):
        run(EXITS_ON_SIGNAL, BUG, EXITS_ON_SIGNAL)
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank ")]
    assert printed[0] == "[rank 1] Traceback (most recent call last):" and printed[-1] == "[rank 1] KeyError: 'lost'"
    assert (run_json(tmp_path)["status"], run_json(tmp_path)["error"]) == ("failed", "rank 1: KeyError: 'lost'")


@pytest.mark.slow
@pytest.mark.parametrize("victim, scripts", [(1, (HANGS, KILLED)), (0, (KILLED, EXITS_ON_SIGNAL))])
def test_rank_that_is_killed_fails_the_run(run: Any, tmp_path: Path, victim: int, scripts: tuple[str, ...]) -> None:
    with pytest.raises(TrainingError, match=rf"^rank {victim}: killed by SIGKILL \(out of memory, or kill -9\)$"):
        run(*scripts)
    assert run_json(tmp_path)["status"] == "failed" and run_json(tmp_path)["error"].startswith(f"rank {victim}: killed")


def test_failure_names_the_killed_rank_and_not_its_peers(run: Any) -> None:
    misses = "on_signal(lambda *_: None)\nwait('gone')\ntime.sleep(0.02)\nsys.exit('error: lost a peer')"
    with pytest.raises(TrainingError, match="^rank 2: killed by SIGKILL"):
        run(misses, misses, "wait('ready0', 'ready1'); open('gone', 'w').close(); " + KILLED)


def test_user_error_of_all_ranks_is_printed_once_by_rank_0(run: Any, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(AlreadyReported) as raised:
        run(f"time.sleep(0.3); {USER_ERROR_EXIT}", USER_ERROR_EXIT)
    assert report_user_error(raised.value) == USER_ERROR
    assert capfd.readouterr().err.splitlines() == ["error: a row is wrong", "  where: rows.jsonl:3", "  fix:   mend it"]


SIGNAL_DURING_EXIT = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from runner.launch import worker
class SignalOnFlush:
    def flush(self):
        os.kill(os.getpid(), 15)
        time.sleep(0.1)
sys.stdout = SignalOnFlush()
threading.Thread(target=time.sleep, args=(9,), daemon=True).start()  # like threads of torch, it receives what the main thread blocks
worker.run_rank = lambda config_file, parent, stop: 2
worker.run_then_hard_exit(lambda: worker.main(None, 0))
"""


@pytest.mark.slow
def test_rank_exit_code_is_kept_when_a_signal_arrives_during_exit() -> None:
    assert subprocess.run([sys.executable, "-c", SIGNAL_DURING_EXIT]).returncode == 2


@pytest.mark.parametrize(
    ("last", "code"), [("return 75", 75), ("sys.exit(2)", 2), ("return None", 0), ("raise KeyError('gone')", 1)]
)
def test_hard_exit_keeps_code_and_output_and_skips_atexit(last: str, code: int) -> None:
    lines = [
        "import atexit, sys",
        "from common.errors import run_then_hard_exit",
        "def main():",
        "    print('output')",
        f"    {last}",
    ]
    program = "\n".join([*lines, "atexit.register(print, 'late')", "run_then_hard_exit(main)"])
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "output\n")
    assert ("KeyError: 'gone'" in ended.stderr) == (code == 1)


def test_user_error_of_rank_1_is_printed_as_rank_0_prints_it(run: Any, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(AlreadyReported):
        run(EXITS_ON_SIGNAL, USER_ERROR_EXIT)
    assert capfd.readouterr().err.splitlines() == ["error: a row is wrong", "  where: rows.jsonl:3", "  fix:   mend it"]


EXITS_LATE = "on_signal(lambda *_: None); open('exiting', 'w').close(); time.sleep({})\n"
LOSES_PEER = "wait('exiting'); record(status='failed', error='another rank does not answer'); sys.exit(69)"


@pytest.mark.parametrize(
    ("end", "cause", "late"),
    [
        (KILLED, "killed by SIGKILL (out of memory, or kill -9)", 0.0),
        (KILLED, "killed by SIGKILL (out of memory, or kill -9)", 0.5),
        (BUG, "KeyError: 'lost'", 0.5),
        ("os._exit(3)", "exit code 3", 0.0),
    ],
)
def test_failure_names_the_cause_and_not_the_rank_that_lost_its_peer(
    end: str, cause: str, late: float, run: Any, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError) as failed:
        run(LOSES_PEER, EXITS_LATE.format(late) + end)
    assert str(failed.value) == f"rank 1: {cause}" == run_json(tmp_path)["error"]


def test_failure_names_the_rank_that_did_not_end(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 0.3)
    with pytest.raises(
        TrainingError,
        match=r"^rank 1: hangs before its first step \(pid \d+, no progress\), .*; rank 0 says: another rank does not answer",
    ):
        run(LOSES_PEER, EXITS_LATE.format(60))


def test_failure_names_the_rank_that_never_met_the_others(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 0.3)
    timed_out = LOSES_PEER.replace("answer'", "answer (Wait timeout)'")
    with pytest.raises(
        TrainingError,
        match=r"^rank 1: hangs before its first step .*; rank 0 waited for 10 minutes \(distributed.timeout\)",
    ):
        run(timed_out, EXITS_LATE.format(60))


def test_rank_that_ends_because_another_failed_is_no_stop_request(run: Any, tmp_path: Path) -> None:
    loses_peer = "wait('ready1'); time.sleep(0.2); record(status='failed', error='another rank does not answer (Wait timeout)'); sys.exit(69)"
    with pytest.raises(TrainingError, match="^rank 0: another rank does not answer"):
        run(loses_peer, EXITS_ON_SIGNAL)
    assert run_json(tmp_path)["outcome"] == "failed"


def test_rank_that_loses_a_stopped_one_is_interrupted_too(run: Any, tmp_path: Path) -> None:
    """`ended`: rank 1 exists until its launcher has seen its exit code."""
    ended = "wait('pid'); pid = open('pid').read()\nwhile os.path.exists(f'/proc/{pid}'): time.sleep(0.01)\n"
    is_stopped = "open('.pid', 'w').write(str(os.getpid())); os.rename('.pid', 'pid'); os._exit(75)"
    with pytest.raises(Interrupted):
        run(ended + LOSES_PEER.replace("wait('exiting'); ", ""), is_stopped)
    assert (run_json(tmp_path)["status"], run_json(tmp_path)["error"]) == ("interrupted", None)


def test_failure_waits_for_a_user_error_after_a_lost_peer(run: Any) -> None:
    with pytest.raises(AlreadyReported):
        run(LOSES_PEER, EXITS_LATE.format(0.5) + USER_ERROR_EXIT)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("[gloo/pair.cc:553] Connection closed by peer", 69),
        ("connectFullMesh failed: Connection refused", 69),
        ("connectFullMesh failed: no route", 1),
        ("Wait timeout", 69),
        ("size mismatch", 1),
    ],
)
def test_rank_exit_code_tells_whether_a_peer_was_lost(
    error: str, code: int, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_run(*args: Any, **options: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr("runner.engine.build.build_run", build_run)
    with RunMetadata.open(tmp_path / "run") as metadata:
        metadata.mark_running()
        assert train_process.train_as_rank(config, metadata, StopFlag()) == code
    assert (run_json(tmp_path)["status"], "another rank does not answer" in run_json(tmp_path)["error"]) == (
        "failed",
        code == 69,
    )


def test_stop_while_torch_is_imported_leaves_its_exit_functions_silent(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_run(*args: Any, **options: Any) -> None:
        raise StopRequested

    monkeypatch.setattr("runner.engine.build.build_run", build_run)
    torch_logger = logging.getLogger("torch")
    # as until the end of the import; Hydra's level of the root is INFO
    monkeypatch.setattr(torch_logger, "level", logging.NOTSET)
    with RunMetadata.open(tmp_path / "run") as metadata:
        metadata.mark_running()
        assert train_process.train_as_rank(config, metadata, StopFlag()) == INTERRUPTED
    assert torch_logger.level == logging.WARNING


def test_rank_without_others_stops_in_training_and_not_in_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with train.supervise=true: that thread ended the run 0.2 s after the signal, without a save, and gave signs of
    life for a run that hung.
    """
    met = threading.Event()
    monkeypatch.setattr(distributed, "RENDEZVOUS_DONE", met)
    for name, value in {RENDEZVOUS_ENV: "file:///nowhere", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_distributed(compose_config(["device=cpu"]).distributed, "cpu")
    assert met.is_set()


def test_failed_verify_resume_is_recorded_in_run_json(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr("runner.engine.verify_resume.verify_resume", lambda config, folder: ["the loss differs"])
    verifying = dataclasses.replace(config, train=dataclasses.replace(config.train, verify_resume=True))
    with RunMetadata.open(tmp_path / "run") as metadata:
        metadata.mark_running()
        assert train_process.train_as_rank(verifying, metadata, StopFlag()) == 1
    assert run_json(tmp_path)["status"] == "failed" and run_json(tmp_path)["error"].endswith("the loss differs")
    assert "error: " not in capfd.readouterr().err


def test_rank_0_prints_its_error_when_the_disk_is_full(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with RunMetadata.open(tmp_path / "run") as metadata:
        metadata.mark_running()
        monkeypatch.setattr("runner.run_dir.metadata.write_json", fail)
        monkeypatch.setattr("runner.engine.build.build_run", fail)
        assert train_process.train_as_rank(config, metadata, StopFlag()) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [
        line for line in lines if line.startswith("error: a file could not be written or read: No space left on device")
    ], lines


def test_failure_names_no_rank_when_all_fail_alike(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(TrainingError, match="^3 steps in a row were not finite$"):
        run(DIVERGED, "print('error: 3 steps in a row were not finite'); sys.exit(1)", max_restarts=3)
    assert "[rank" not in capfd.readouterr().err
    assert run_json(tmp_path)["attempt"] == 1, "a diverged run is not restarted"


@pytest.mark.slow
def test_ranks_that_time_out_print_the_stack_of_each(
    run: Any, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 60.0)
    monkeypatch.setattr(local_ranks, "HANG_GRACE", 0.2)
    monkeypatch.setattr(local_ranks, "STACKS_GRACE", 0.2)
    timed_out = (
        STACKS
        + "wait('logs/rank1.log'); time.sleep(0.3); record(status='failed', error='Timed out waiting'); sys.exit(69)"
    )
    with pytest.raises(
        TrainingError,
        match=r"^rank 1: hangs before its first step \(pid \d+, no progress\), the stacks are printed above; rank 0 waited for 10 minutes \(distr",
    ):
        run(timed_out, STACKS + HANGS, timed_out)
    printed = capfd.readouterr().err
    assert "[rank 1]   File loop.py, line 7" in printed and "[rank 2] Timeout (0:00:01)!" in printed


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)),
    ],
)
def test_signal_reaches_every_rank_and_interrupts_the_run(
    run: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    forwards, forward_to = threading.Event(), SignalForwarder.forward_to
    monkeypatch.setattr(SignalForwarder, "forward_to", lambda *args: (forward_to(*args), forwards.set()))

    def send() -> None:
        wait_until(lambda: all((tmp_path / "run" / f"ready{rank}").exists() for rank in (0, 1, 2)))
        assert forwards.wait(120)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    with pytest.raises(Interrupted) as stopped:
        run(SAVES_ON_SIGNAL, EXITS_ON_SIGNAL, EXITS_ON_SIGNAL, max_restarts=3)
    assert (
        capfd.readouterr().err
        == f"\n{signal.Signals(number).name}: stopping after this micro-batch, then saving; again to stop now\n"
    )
    assert str(stopped.value) == "stopped after step 7, saved" and stopped.value.folder == tmp_path / "run"
    assert run_json(tmp_path)["attempt"] == 1


@pytest.mark.slow
def test_stop_of_ranks_that_have_not_met_ends_one_that_never_comes(run: Any, tmp_path: Path) -> None:
    def send() -> None:
        wait_until(lambda: all((tmp_path / "run" / f"ready{rank}").exists() for rank in (0, 1, 2)))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(Interrupted, match="stopped before the first step"):
        run(EXITS_ON_SIGNAL, "on_signal(lambda *_: None)\nwhile True: time.sleep(60)", EXITS_ON_SIGNAL)
    assert run_json(tmp_path)["status"] == "interrupted"


def test_signal_before_a_rank_has_handlers_is_delivered_later(run: Any, tmp_path: Path) -> None:
    def send() -> None:
        wait_until((tmp_path / "run" / "starting").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(Interrupted):
        run("open('starting', 'w').close(); time.sleep(0.5)\n" + SAVES_ON_SIGNAL, "time.sleep(0.5)\n" + EXITS_ON_SIGNAL)


@pytest.mark.slow
def test_restarts_repeat_up_to_max_restarts(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    fails_twice = "tries = json.load(open('run.json'))['attempt']\nif tries < 3: raise KeyError(tries)\n"
    assert run(GOOD, fails_twice, max_restarts=2) == 1.5
    assert (run_json(tmp_path)["attempt"], run_json(tmp_path)["status"]) == (3, "completed")
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert lines == [f"rank 1: KeyError: {n}; restart {n} of 2 from the start" for n in (1, 2)]
    assert [line.split(",")[0] for line in log(tmp_path).splitlines() if line.startswith("---")] == [
        f"--- attempt {n}" for n in (1, 2, 3)
    ]


@pytest.mark.slow
def test_restarts_end_in_failure_after_the_last(run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="^rank 1: KeyError"):
        run(EXITS_ON_SIGNAL, BUG, max_restarts=1)
    assert (run_json(tmp_path)["attempt"], run_json(tmp_path)["status"]) == (2, "failed")


LAUNCHER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
import test_local_ranks
from runner.launch import local_ranks
from runner.config.compose import compose_config
from runner.run_dir.metadata import RunMetadata
local_ranks.subprocesses.spawn = test_local_ranks.spawn_scripts(sys.argv[2:])
with RunMetadata.open(Path(sys.argv[1])) as metadata:
    metadata.mark_running()
    local_ranks.train_on_ranks(compose_config(['distributed=ddp', 'device=cpu']), metadata, len(sys.argv) - 2)
"""


def launcher(folder: Path, *scripts: str, **streams: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder), *scripts], **streams)


def rank_pids(folder: Path) -> list[int]:
    wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
    return [rank["pid"] for rank in json.loads((folder / ".owner.json").read_text())["ranks"]]


@pytest.mark.slow
def test_second_signal_kills_launcher_and_ranks(tmp_path: Path) -> None:
    ignoring = "on_signal(lambda *_: open('received' + os.environ['RANK'], 'w').close())\nwhile True: time.sleep(60)"
    child = launcher(tmp_path / "run", ignoring, ignoring)
    ranks = rank_pids(tmp_path / "run")
    child.send_signal(signal.SIGINT)
    wait_until(lambda: all((tmp_path / "run" / f"received{rank}").exists() for rank in (0, 1)))
    time.sleep(0.3)  # longer than DUPLICATE_SIGNAL_WINDOW
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 128 + signal.SIGTERM
    assert all(map(is_gone, ranks))


@pytest.mark.slow
def test_ranks_save_and_hold_the_lock_when_the_launcher_is_killed(tmp_path: Path) -> None:
    slow = "def save(*_):\n    open('saving', 'w').close(); wait('saved'); sys.exit(75)\non_signal(save)\nwhile True: time.sleep(60)"
    child = launcher(tmp_path / "run", slow.replace("open('saving', 'w').close(); ", ""), slow)
    ranks = rank_pids(tmp_path / "run")
    with pytest.raises(ValueError, match=f"being trained by process {child.pid} on "):
        RunMetadata.open(tmp_path / "run", resume=True)
    child.kill()
    child.wait()
    wait_until((tmp_path / "run" / "saving").exists)
    assert not any(map(is_gone, ranks))
    (tmp_path / "run" / "saved").touch()
    wait_until(lambda: all(map(is_gone, ranks)))


@pytest.mark.slow
def test_rank_0_writes_to_the_terminal(tmp_path: Path) -> None:
    reader, terminal = pty.openpty()
    child = launcher(
        tmp_path / "run",
        "print('a terminal:', sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty())\n" + GOOD,
        PRINTS,
        stdout=terminal,
        stderr=terminal,
    )
    assert child.wait(20) == 0
    assert os.read(reader, 1000).decode().strip() == "a terminal: True True False"


@pytest.mark.parametrize(
    "environment, overrides, fix",
    [
        (
            {},
            ["distributed=ddp", "distributed.nnodes=2", "distributed.nproc=4"],
            "on every node: torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d",
        ),
        ({"WORLD_SIZE": "2"}, [], "add distributed=ddp or distributed=fsdp"),
        (
            {"WORLD_SIZE": "2"},
            ["distributed=ddp", "distributed.nproc=4"],
            "torchrun --nnodes=1 --nproc-per-node=4 runner/train.py",
        ),
        (
            {"WORLD_SIZE": "1"},
            ["distributed=ddp", "distributed.nproc=2"],
            "distributed.nproc=auto distributed.nnodes=1",
        ),
        (
            {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"},
            ["distributed=fsdp", "distributed.nproc=4"],
            "distributed.nproc=auto distributed.nnodes=2",
        ),
        (
            {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            ["distributed=ddp", "distributed.nnodes=3"],
            "torchrun --nnodes=3 --nproc-per-node=<GPUs per node>",
        ),
    ],
)
def test_torchrun_world_that_does_not_fit_is_refused_with_the_command(
    environment: dict[str, str], overrides: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"} | environment if environment else {}
    ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        torchrun.check_world(compose_config(overrides).distributed)
    assert fix in raised.value.args[2]


@pytest.mark.slow
def test_torchrun_world_that_fits_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun.check_world(compose_config(["distributed=ddp", "distributed.nproc=2"]).distributed)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for overrides in (["distributed=ddp"], ["distributed=fsdp", "distributed.nproc=2", "distributed.nnodes=2"]):
        torchrun.check_world(compose_config(overrides).distributed)


def test_torchrun_sweep_needs_the_local_launcher_and_one_job_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun.check_sweep_launcher("submitit", {})
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    torchrun.check_sweep_launcher("local", {"workers": None, "devices": None})
    for name, options in (
        ("submitit", {}),
        ("local", {"workers": 2, "devices": None}),
        ("local", {"workers": None, "devices": [0, 1]}),
    ):
        with pytest.raises(ValueError):
            torchrun.check_sweep_launcher(name, options)


class Store(dict):
    """The methods of torchrun's store that are used."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]  # torch's method has no default
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`under_torchrun(rank)` makes this process that rank of two; returns the store."""
    store = Store()
    monkeypatch.setattr(torchrun, "_store", lambda: store)
    monkeypatch.setattr(subprocesses, "die_with_parent", lambda parent: lambda: None)
    monkeypatch.setattr(torchrun, "_messages_sent", 0)
    monkeypatch.setattr(torchrun, "_jobs_announced", 0)

    def set_rank(rank: int, **environment: str) -> Store:
        for name, value in (
            {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
            | environment
        ).items():
            monkeypatch.setenv(name, value)
        return store

    return set_rank


def test_torchrun_workers_exit_however_rank_0_ends(under_torchrun: Any) -> None:
    store = under_torchrun(0)
    for number in range(2):
        with pytest.raises(SystemExit), torchrun.releasing_workers():
            sys.exit(2)
        assert json.loads(store[f"0/{number}"]) == {"exit": True}
    under_torchrun(1)
    assert torchrun.worker_main() == 0


def test_torchrun_worker_stopped_after_rank_0_exited_returns_0(
    under_torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = under_torchrun(0)
    with torchrun.releasing_workers():
        pass
    under_torchrun(1)
    monkeypatch.setattr(store, "check", lambda keys: os.kill(os.getpid(), signal.SIGTERM) or True, raising=False)
    assert torchrun.worker_main() == 0


def test_torchrun_job_runs_on_every_rank_and_ends_with_rank_0(
    under_torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, started = under_torchrun(0), []
    assert torchrun.begin_job() == {"RUNNER_JOB": "job1"}
    with torchrun.releasing_workers():
        assert torchrun.begin_job() == {"RUNNER_JOB": "job2"}
    under_torchrun(1)
    spawn = subprocesses.spawn

    def job(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
        assert all(process.returncode is not None for process in started), "the former job has ended"
        started.append(spawn(["-c", "import time; time.sleep(60)"], environment, out))
        assert environment["RUNNER_JOB"] == f"job{len(started)}"
        return started[-1]

    monkeypatch.setattr(subprocesses, "spawn", job)
    monkeypatch.setattr(torchrun, "JOB_GRACE", 0.1)
    assert torchrun.worker_main() == 0
    assert [process.returncode for process in started] == [-9, -9]
    under_torchrun(1, RUNNER_JOB="job2")
    store["0/job2/0"] = b'{"exit": true}'
    assert torchrun.worker_main() == 0, "a job reads its own messages, not those of the sweep"


def test_torchrun_worker_forwards_a_signal_to_its_job(
    under_torchrun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    under_torchrun(0)
    torchrun.begin_job()
    under_torchrun(1)
    script = f"import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(75))\nopen({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(60)"
    started = []
    spawn = subprocesses.spawn
    monkeypatch.setattr(
        subprocesses,
        "spawn",
        lambda program, environment, out: started.append(spawn(["-c", script], environment, out)) or started[-1],
    )

    def send() -> None:
        wait_until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert torchrun.worker_main() == 75 and started[0].returncode == 75


def test_torchrun_restart_continues_the_previous_directory(under_torchrun: Any, tmp_path: Path) -> None:
    under_torchrun(0)
    assert torchrun.previous_run_dir() is None
    torchrun.set_restart_dir(tmp_path)
    assert torchrun.previous_run_dir() is None
    under_torchrun(0, TORCHELASTIC_RESTART_COUNT="1")
    assert torchrun.previous_run_dir() == tmp_path
    under_torchrun(0, TORCHELASTIC_RESTART_COUNT="1", RUNNER_JOB="job1")
    torchrun.set_restart_dir(tmp_path / "job")
    assert torchrun.previous_run_dir() is None
    under_torchrun(1, TORCHELASTIC_RESTART_COUNT="1")
    assert torchrun.previous_run_dir() is None


def test_failure_reason_has_the_whole_message_and_its_setting() -> None:
    lines = ["error: cannot resume:", "    rows_per_step: 2 -> 1", "  where: step-00000001", "  fix:   resume=RUN"]
    assert subprocesses.failure_reason(2, {}, lines) == "cannot resume: rows_per_step: 2 -> 1 (step-00000001)"
    assert subprocesses.failure_reason(2, {}, ["error: no such file", "more"]) == "no such file"
