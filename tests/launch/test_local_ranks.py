"""The ranks of a run, with a few lines of Python in the place of each: how they end, and what the run makes of it."""

from __future__ import annotations

import dataclasses
import json
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

from common.errors import AlreadyReported, Interrupted, TrainingError, report_user_error
from common.exit_codes import USER_ERROR
from runner.config.compose import compose_config
from runner.launch import local_ranks, subprocesses, torchrun, train_process
from runner.launch.signals import StopFlag
from runner.run_dir.metadata import RunMetadata

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, signal, sys, time
os.chdir(os.path.dirname(sys.argv[1]))
def says(**fields):
    with open('run.json') as file: fields = json.load(file) | fields
    with open('.tmp-said', 'w') as file: json.dump(fields, file)
    os.replace('.tmp-said', 'run.json')
def hears(act):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, act)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    open('ready' + os.environ['RANK'], 'w').close()
def wait(*names):
    while not all(map(os.path.exists, names)): time.sleep(0.01)
"""
GOOD = "says(status='completed', metrics={'loss': 1.5})"
DONE = "print('rank one was here')"
SAVES = "hears(lambda *_: (says(status='interrupted', step=7), sys.exit(75)))\ntime.sleep(60)"
LEAVES = "hears(lambda *_: sys.exit(75))\ntime.sleep(60)"
DEAF = "time.sleep(60)"
BUG = "raise KeyError('lost')"
KILLED = "os.kill(os.getpid(), 9)"
REFUSED = "print('error: a row is wrong\\n  where: rows.jsonl:3\\n  fix:   mend it', file=sys.stderr); sys.exit(2)"
DIVERGED = "says(status='failed', error='3 steps in a row were not finite'); sys.exit(1)"
STACKS = "print('Timeout (0:00:01)!\\nThread 0x1 (most recent call first):\\n  File loop.py, line 7', file=sys.stderr, flush=True)\n"


def fake(scripts: list[str]) -> Callable[..., subprocess.Popen]:
    begin = subprocesses.spawn

    def fake(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
        return begin(["-c", HEAD + scripts[int(environment["RANK"])], *program[1:]], environment, out)

    return fake


@pytest.fixture(scope="module")
def config() -> Any:
    return compose_config(["distributed=ddp", "device=cpu"])


@pytest.fixture
def run(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(script of rank 0, script of rank 1, ...)`: the loss, or what is raised."""
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 1.0)

    def run(*scripts: str, max_restarts: int = 0) -> float:
        monkeypatch.setattr(local_ranks.subprocesses, "begin", fake(list(scripts)))
        restarting = dataclasses.replace(config, distributed=dataclasses.replace(config.distributed, max_restarts=max_restarts))
        with RunMetadata.open(tmp_path / "run") as record:
            record.running()
            return local_ranks.train_on_ranks(restarting, record, len(scripts))

    return run


def said(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "run.json").read_text())


def log(tmp_path: Path) -> str:
    return (tmp_path / "run" / "logs" / "rank1.log").read_text()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_ranks_that_end_well_leave_the_loss_their_logs_and_nothing_else(run: Any, tmp_path: Path) -> None:
    assert run(GOOD, DONE) == 1.5
    assert said(tmp_path)["status"] == "completed"
    title, line = log(tmp_path).splitlines()
    assert title.startswith("--- attempt 1, rank 1 of 2, ") and line == "rank one was here"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "logs", "run.json"}


def test_each_rank_finds_in_its_environment_which_it_is(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RUNNER_MEETING", "OMP_NUM_THREADS", "HYDRA_FULL_ERROR")
    run(GOOD, f"json.dump({{name: os.environ.get(name) for name in {names}}}, open('seen.json', 'w'))")
    seen = json.loads((tmp_path / "run" / "seen.json").read_text())
    assert seen.pop("RUNNER_MEETING").startswith(f"file://{tmp_path / 'run' / '.tmp-meeting-'}")
    assert seen == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "HYDRA_FULL_ERROR": None}


def test_the_cores_of_a_job_are_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert [local_ranks.threads_per_rank(count) for count in (2, 3, 16)] == ["4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert local_ranks.threads_per_rank(2) == "4"
    monkeypatch.setenv(subprocesses.THREADS_ENV, "4")  # a sweep of two jobs at a time has set it
    assert local_ranks.threads_per_rank(2) == "2"


def test_a_rank_that_raises_ends_the_others_and_its_traceback_is_told_with_its_number(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(TrainingError, match="^rank 1: KeyError: 'lost'$"):
        run(LEAVES, BUG, LEAVES)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank ")]
    assert told[0] == "[rank 1] Traceback (most recent call last):" and told[-1] == "[rank 1] KeyError: 'lost'"
    assert (said(tmp_path)["status"], said(tmp_path)["error"]) == ("failed", "rank 1: KeyError: 'lost'")


@pytest.mark.parametrize("victim, scripts", [(1, (DEAF, KILLED)), (0, (KILLED, LEAVES))])
def test_a_rank_that_is_killed_fails_the_run_whoever_it_was(run: Any, tmp_path: Path, victim: int, scripts: tuple[str, ...]) -> None:
    with pytest.raises(TrainingError, match=rf"^rank {victim}: killed by SIGKILL \(out of memory, or kill -9\)$"):
        run(*scripts)
    assert said(tmp_path)["status"] == "failed" and said(tmp_path)["error"].startswith(f"rank {victim}: killed")


def test_the_one_that_was_killed_is_named_and_not_those_that_missed_it(run: Any) -> None:
    misses = "hears(lambda *_: None)\nwait('gone')\ntime.sleep(0.02)\nsys.exit('error: lost a peer')"
    with pytest.raises(TrainingError, match="^rank 2: killed by SIGKILL"):
        run(misses, misses, "wait('ready0', 'ready1'); open('gone', 'w').close(); " + KILLED)


def test_a_refusal_is_said_once_and_by_the_first_rank(run: Any, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(AlreadyReported) as refusal:
        run(f"time.sleep(0.3); {REFUSED}", REFUSED)
    assert report_user_error(refusal.value) == USER_ERROR
    assert capfd.readouterr().err.splitlines() == ["error: a row is wrong", "  where: rows.jsonl:3", "  fix:   mend it"]


LATE = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from runner.launch import rank
class Late:
    def flush(self):
        os.kill(os.getpid(), 15)
        time.sleep(0.1)
sys.stdout = Late()
threading.Thread(target=time.sleep, args=(9,), daemon=True).start()  # torch has such: what the main thread blocks reaches them
rank.run = lambda file, parent, stop: 2
rank.run_and_end(lambda: rank.main(None, 0))
"""


def test_a_rank_leaves_with_its_own_code_though_it_is_told_to_leave_meanwhile() -> None:
    assert subprocess.run([sys.executable, "-c", LATE]).returncode == 2


@pytest.mark.parametrize(("last", "code"), [("return 75", 75), ("sys.exit(2)", 2), ("return None", 0), ("raise KeyError('gone')", 1)])
def test_a_rank_ends_with_its_code_and_all_it_has_said_and_never_comes_to_the_end_that_python_makes(last: str, code: int) -> None:
    lines = ["import atexit, sys", "from runner.launch.subprocesses import run_and_end", "def main():", "    print('said')", f"    {last}"]
    program = "\n".join([*lines, "atexit.register(print, 'late')", "run_and_end(main)"])
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "said\n")
    assert ("KeyError: 'gone'" in ended.stderr) == (code == 1)


def test_what_another_rank_alone_refuses_is_said_too(run: Any, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(AlreadyReported):
        run(LEAVES, REFUSED)
    assert capfd.readouterr().err.splitlines()[0] == "[rank 1] error: a row is wrong"


LATE_BY = "hears(lambda *_: None); open('going', 'w').close(); time.sleep({})\n"
ALONE = "wait('going'); says(status='failed', error='another rank does not answer'); sys.exit(69)"


@pytest.mark.parametrize("late", [0.0, 0.5])
@pytest.mark.parametrize(
    ("end", "cause"), [(KILLED, "killed by SIGKILL (out of memory, or kill -9)"), (BUG, "KeyError: 'lost'"), ("os._exit(3)", "exit code 3")]
)
def test_a_rank_that_is_left_alone_is_not_to_blame_though_it_may_end_first(end: str, cause: str, late: float, run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as failed:
        run(ALONE, LATE_BY.format(late) + end)
    assert str(failed.value) == f"rank 1: {cause}" == said(tmp_path)["error"]


def test_what_we_end_ourselves_is_not_to_blame(run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="^rank 0: another rank does not answer"):
        run(ALONE, LATE_BY.format(60))


def test_a_rank_that_is_left_alone_waits_for_the_refusal_of_another(run: Any) -> None:
    with pytest.raises(AlreadyReported):
        run(ALONE, LATE_BY.format(0.5) + REFUSED)


@pytest.mark.parametrize(("error", "code"), [("[gloo/pair.cc:553] Connection closed by peer", 69), ("size mismatch", 1)])
def test_a_rank_says_by_its_code_whether_another_has_gone(error: str, code: int, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_run(*args: Any, **words: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr("runner.engine.build.build_run", build_run)
    with RunMetadata.open(tmp_path / "run") as record:
        record.running()
        assert train_process.train_as_rank(config, record, StopFlag()) == code
    assert (said(tmp_path)["status"], "another rank does not answer" in said(tmp_path)["error"]) == ("failed", code == 69)


def test_a_proof_that_fails_is_on_record_for_whoever_tells_it(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("runner.engine.verify_resume.verify_resume", lambda config, folder: ["the loss differs"])
    proving = dataclasses.replace(config, train=dataclasses.replace(config.train, verify_resume=True))
    with RunMetadata.open(tmp_path / "run") as record:
        record.running()
        assert train_process.train_as_rank(proving, record, StopFlag()) == 1
    assert said(tmp_path)["status"] == "failed" and said(tmp_path)["error"].endswith("the loss differs")
    assert "error: " not in capfd.readouterr().err


def test_the_first_rank_tells_by_itself_what_the_disk_does_not_take(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def fail(*args: Any, **words: Any) -> None:
        raise OSError(28, "No space left on device")

    with RunMetadata.open(tmp_path / "run") as record:
        record.running()
        monkeypatch.setattr("runner.run_dir.metadata.write_json", fail)
        monkeypatch.setattr("runner.engine.build.build_run", fail)
        assert train_process.train_as_rank(config, record, StopFlag()) == 1
    assert "error: OSError: [Errno 28] No space left on device" in capfd.readouterr().err.splitlines()


def test_where_all_ranks_fail_alike_none_is_named(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(TrainingError, match="^3 steps in a row were not finite$"):
        run(DIVERGED, "print('error: 3 steps in a row were not finite'); sys.exit(1)", max_restarts=3)
    assert "[rank" not in capfd.readouterr().err
    assert said(tmp_path)["attempt"] == 1, "it would diverge again"


def test_ranks_that_waited_in_vain_show_where_each_of_them_stood(run: Any, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "FAILURE_GRACE", 60.0)
    monkeypatch.setattr(local_ranks, "HANG_GRACE", 0.2)
    with pytest.raises(TrainingError, match=r"^no step for 10 minutes \(distributed.timeout\); rank 2 gave up first"):
        run(DEAF, STACKS + DEAF, STACKS + "wait('logs/rank1.log'); time.sleep(0.3); print('error: Timed out waiting'); sys.exit(1)")
    told = capfd.readouterr().err
    assert "[rank 1]   File loop.py, line 7" in told and "[rank 2] Timeout (0:00:01)!" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_the_run_can_be_continued(run: Any, tmp_path: Path, number: int) -> None:
    def send() -> None:
        until(lambda: all((tmp_path / "run" / f"ready{rank}").exists() for rank in (0, 1, 2)))
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    with pytest.raises(Interrupted) as stopped:
        run(SAVES, LEAVES, LEAVES, max_restarts=3)
    assert str(stopped.value) == "stopped after step 7, saved" and stopped.value.folder == tmp_path / "run"
    assert said(tmp_path)["attempt"] == 1


def test_a_signal_that_comes_before_a_rank_can_hear_is_kept_for_it(run: Any, tmp_path: Path) -> None:
    def send() -> None:
        until((tmp_path / "run" / "starting").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(Interrupted):
        run("open('starting', 'w').close(); time.sleep(0.5)\n" + SAVES, "time.sleep(0.5)\n" + LEAVES)


def test_a_failed_run_is_started_again_as_often_as_is_said(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    twice = "tries = json.load(open('run.json'))['attempt']\nif tries < 3: raise KeyError(tries)\n"
    assert run(GOOD, twice, max_restarts=2) == 1.5
    assert (said(tmp_path)["attempt"], said(tmp_path)["status"]) == (3, "completed")
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert lines == [f"rank 1: KeyError: {n}; restart {n} of 2 from the last checkpoint" for n in (1, 2)]
    assert [line.split(",")[0] for line in log(tmp_path).splitlines() if line.startswith("---")] == [f"--- attempt {n}" for n in (1, 2, 3)]


def test_after_the_last_restart_the_run_has_failed(run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="^rank 1: KeyError"):
        run(LEAVES, BUG, max_restarts=1)
    assert (said(tmp_path)["attempt"], said(tmp_path)["status"]) == (2, "failed")


PARENT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
import test_local_ranks
from runner.launch import ranks
from runner.config.compose import compose
from runner.run_dir.metadata import Record
ranks.processes.begin = test_ranks.fake(sys.argv[2:])
with Record.open(Path(sys.argv[1])) as record:
    record.running()
    ranks.train_on_ranks(compose(['distributed=ddp', 'device=cpu']), record, len(sys.argv) - 2)
"""


def parent(folder: Path, *scripts: str, **streams: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PARENT, str(folder), *scripts], **streams)


def pids(folder: Path) -> list[int]:
    until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
    return [rank["pid"] for rank in json.loads((folder / ".owner.json").read_text())["ranks"]]


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    stubborn = "hears(lambda *_: open('heard' + os.environ['RANK'], 'w').close())\nwhile True: time.sleep(60)"
    child = parent(tmp_path / "run", stubborn, stubborn)
    left = pids(tmp_path / "run")
    child.send_signal(signal.SIGINT)
    until(lambda: all((tmp_path / "run" / f"heard{rank}").exists() for rank in (0, 1)))
    time.sleep(0.3)  # longer than the echo of one signal
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 128 + signal.SIGTERM
    assert all(map(is_gone, left))


def test_ranks_whose_parent_is_killed_save_and_leave_and_hold_the_folder_until_then(tmp_path: Path) -> None:
    slow = "def leave(*_):\n    open('saving', 'w').close(); wait('saved'); sys.exit(75)\nhears(leave)\nwhile True: time.sleep(60)"
    child = parent(tmp_path / "run", slow.replace("open('saving', 'w').close(); ", ""), slow)
    left = pids(tmp_path / "run")
    with pytest.raises(ValueError, match=f"being trained by process {child.pid} on "):
        RunMetadata.open(tmp_path / "run", resume=True)
    child.kill()
    child.wait()
    until((tmp_path / "run" / "saving").exists)
    assert not any(map(is_gone, left))
    (tmp_path / "run" / "saved").touch()
    until(lambda: all(map(is_gone, left)))


def test_the_first_rank_speaks_to_the_terminal_as_we_do(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = parent(
        tmp_path / "run", "print('a terminal:', sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty())\n" + GOOD, DONE, stdout=theirs, stderr=theirs
    )
    assert child.wait(20) == 0
    assert os.read(ours, 1000).decode().strip() == "a terminal: True True False"


@pytest.mark.parametrize(
    "environment, words, fix",
    [
        ({}, ["distributed=ddp", "distributed.nnodes=2", "distributed.nproc=4"], "on every node: torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d"),
        ({"WORLD_SIZE": "2"}, [], "add distributed=ddp or distributed=fsdp"),
        ({"WORLD_SIZE": "2"}, ["distributed=ddp", "distributed.nproc=4"], "torchrun --nnodes=1 --nproc-per-node=4 runner/train.py"),
        ({"WORLD_SIZE": "1"}, ["distributed=ddp", "distributed.nproc=2"], "distributed.nproc=auto distributed.nnodes=1"),
        ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, ["distributed=fsdp", "distributed.nproc=4"], "distributed.nproc=auto distributed.nnodes=2"),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, ["distributed=ddp", "distributed.nnodes=3"], "torchrun --nnodes=3 --nproc-per-node=<GPUs of a node>"),
    ],
)
def test_words_that_do_not_fit_the_processes_are_refused_with_the_line_to_type(
    environment: dict[str, str], words: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"} | environment if environment else {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as refusal:
        torchrun.check_world(compose_config(words).distributed)
    assert fix in refusal.value.args[2]


def test_words_that_fit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun.check_world(compose_config(["distributed=ddp", "distributed.nproc=2"]).distributed)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (["distributed=ddp"], ["distributed=fsdp", "distributed.nproc=2", "distributed.nnodes=2"]):
        torchrun.check_world(compose_config(words).distributed)


def test_under_torchrun_a_sweep_trains_one_job_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun.check_sweep_launcher("joblib", {})
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    torchrun.check_sweep_launcher("local", {"workers": None, "devices": None})
    for name, options in (("joblib", {}), ("local", {"workers": 2, "devices": None}), ("local", {"workers": None, "devices": [0, 1]})):
        with pytest.raises(ValueError):
            torchrun.check_sweep_launcher(name, options)


class Store(dict):
    """torchrun's, as far as we use it."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]  # torch's store gives no second choice
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`under_torchrun(rank)`: we are that one of two; returns the store."""
    store = Store()
    monkeypatch.setattr(torchrun, "_store", lambda: store)
    monkeypatch.setattr(torchrun, "die_with_parent", lambda parent: lambda: None)
    monkeypatch.setattr(torchrun, "_messages_sent", 0)
    monkeypatch.setattr(torchrun, "_jobs_announced", 0)

    def be(rank: int, **environment: str) -> Store:
        for name, value in ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"} | environment).items():
            monkeypatch.setenv(name, value)
        return store

    return be


def test_however_the_first_rank_ends_the_others_leave(under_torchrun: Any) -> None:
    store = under_torchrun(0)
    for number in range(2):
        with pytest.raises(SystemExit), torchrun.releasing_workers():
            sys.exit(2)
        assert json.loads(store[f"0/{number}"]) == {"leave": True}
    under_torchrun(1)
    assert torchrun.worker_main() == 0


def test_a_rank_that_is_told_to_stop_once_the_first_has_left_was_not_interrupted(under_torchrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = under_torchrun(0)
    with torchrun.releasing_workers():
        pass
    under_torchrun(1)
    monkeypatch.setattr(store, "check", lambda keys: os.kill(os.getpid(), signal.SIGTERM) or True, raising=False)
    assert torchrun.worker_main() == 0


def test_a_job_runs_on_every_rank_and_none_outlives_the_first(under_torchrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, started = under_torchrun(0), []
    assert torchrun.begin_job() == {"RUNNER_JOB": "job1"}
    torchrun.end_job()
    with torchrun.releasing_workers():
        assert torchrun.begin_job() == {"RUNNER_JOB": "job2"}
    under_torchrun(1)
    begin = subprocesses.spawn

    def job(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
        started.append(begin(["-c", "import time; time.sleep(60)"], environment, out))
        assert environment["RUNNER_JOB"] == f"job{len(started)}"
        return started[-1]

    monkeypatch.setattr(torchrun, "spawn", job)
    monkeypatch.setattr(torchrun, "JOB_GRACE", 0.1)
    assert torchrun.worker_main() == 0
    assert [process.returncode for process in started] == [-9, -9]
    under_torchrun(1, RUNNER_JOB="job2")
    store["0/job2/0"] = b'{"leave": true}'
    assert torchrun.worker_main() == 0, "a job hears what is said to it, and not what is said to the sweep"


def test_whoever_waits_and_is_asked_to_stop_has_its_job_save(under_torchrun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    under_torchrun(0)
    torchrun.begin_job()
    under_torchrun(1)
    script = f"import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(75))\nopen({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(60)"
    started = []
    begin = subprocesses.spawn
    monkeypatch.setattr(torchrun, "spawn", lambda program, environment, out: started.append(begin(["-c", script], environment, out)) or started[-1])

    def send() -> None:
        until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert torchrun.worker_main() == 75 and started[0].returncode == 75


def test_only_a_restart_continues_what_was_before(under_torchrun: Any, tmp_path: Path) -> None:
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
