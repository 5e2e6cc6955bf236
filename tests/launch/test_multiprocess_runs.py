"""train.py on two CPU ranks, started by distributed.nproc=2 and by torchrun: failures, kills, signals, restarts,
resume.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_counts import faults, only_full
from warm_programs import ForkedProcess, WarmPrograms

from runner.checkpoint import atomic_dir
from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.lock import is_locked

OVERRIDES = [
    "stage=pretrain", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=1", "model.head_dim=8", "model.intermediate_size=64", "model.max_position_embeddings=128",
    "model.dropout=0.1", "data.max_length=64", "data.val_path=null", "data.val_fraction=0.2", "train.batch_size=2", "train.max_steps=12", "train.log_every=1", "train.save_every=3",
    "train.eval_every=6", "train.sample_every=0", "device=cpu", "distributed=ddp", "distributed.nproc=2",
]  # fmt: skip
BY_NPROC, BY_TORCHRUN = "nproc", "torchrun"
TORCHRUN = [
    "--nnodes=1",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--no-python",
    sys.executable,
]
TIMEOUT = 400  # seconds; for a hang, not for a slow machine
slow = pytest.mark.slow


class Runs:
    """Launches in folder `root`; the output of the newest is in the file `output`."""

    def __init__(self, checkout: Path, root: Path, warm: WarmPrograms) -> None:
        self.train, self.root, self.warm = str(checkout / "runner" / "train.py"), root, warm
        self.output = root / "output"
        (root / "rows.jsonl").write_text(
            "".join(
                json.dumps({"text": f"{i} " + "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n"
                for i in range(40)
            )
        )

    def write_bad_rows(self) -> Path:
        """Return a file whose second row is refused when it is tokenised, after the ranks have started."""
        (self.root / "bad.jsonl").write_text('{"text": "the lake of Oru"}\n{"text": 3}\n')
        return self.root / "bad.jsonl"

    def overrides(self, name: str) -> list[str]:
        return [
            *OVERRIDES,
            f"data.path={self.root / 'rows.jsonl'}",
            f"data.cache={self.root / 'cache'}",
            f"hydra.run.dir={self.root / name}",
        ]

    def launch(
        self,
        *overrides: str,
        by: str = BY_NPROC,
        flags: tuple[str, ...] = (),
        fault: dict[str, Any] | None = None,
        cold: bool = False,
    ) -> subprocess.Popen | ForkedProcess:
        """Start the command, or torchrun, as a fork of a process that has imported torch; so are ranks and jobs.

        `cold`: all of them with their imports.
        """
        program, environment = [Path(self.train), *overrides], self.fault_environment(fault)
        if by == BY_TORCHRUN:
            program = [Path(__file__).with_name("torchrun.py"), *flags, *TORCHRUN, self.train, *overrides]
        if not cold:
            return self.warm.start(*program, cwd=self.root, out=self.output, env=environment)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with open(self.output, "w") as output:
            return subprocess.Popen(
                [sys.executable, *program], cwd=self.root, stdout=output, stderr=output, env=environment
            )

    def fault_environment(self, fault: dict[str, Any] | None) -> dict[str, str]:
        if fault is None:
            return {}
        return {
            "FAULT": json.dumps({"once": str(self.root / "once"), **fault}),
            "PYTHONPATH": str(Path(__file__).parents[1] / "faults" / "fault"),
        }

    def run(self, *overrides: str, **options: Any) -> int:
        return exit_code(self.launch(*overrides, **options))

    def run_json(self, name: str) -> dict:
        return json.loads((self.root / name / "run.json").read_text())

    def __truediv__(self, name: str) -> Path:
        return self.root / name


def exit_code(child: subprocess.Popen | ForkedProcess) -> int:
    try:
        return child.wait(TIMEOUT)
    finally:
        child.kill()


@pytest.fixture
def runs(checkout: Path, tmp_path: Path, warm_checkout: WarmPrograms) -> Runs:
    return Runs(checkout, tmp_path, warm_checkout)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ranks_of(folder: Path) -> list[int]:
    """Pids of the ranks, as .owner.json has them."""
    try:
        return [rank["pid"] for rank in json.loads((folder / ".owner.json").read_text()).get("ranks", [])]
    except (OSError, ValueError):
        return []


def has_stepped(folder: Path, step: int = 1) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


def processes_of(root: Path) -> list[str]:
    """Command lines of running processes that were started in `root`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if command and (str(root) in command or os.readlink(process / "cwd") == str(root)):
                    found.append(command)
            except OSError:
                continue
    return found


def newest(folder: Path) -> int:
    """Return the newest saved step; every checkpoint must be valid."""
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert [(name, reason) for name in names if (reason := atomic_dir.verify_dir(folder / "checkpoints" / name))] == []
    return int(names[-1][5:]) if names else 0


@slow
def test_two_ranks_train_one_run(runs: Runs) -> None:
    assert runs.run(*runs.overrides("run"), cold=True) == 0, runs.output.read_text()
    record = runs.run_json("run")
    assert (record["status"], record["step"], record["attempt"]) == ("completed", 12, 1)
    assert "x 2 ranks" in runs.output.read_text() and newest(runs / "run") == 12
    assert (runs / "run" / "logs" / "rank1.log").read_text().startswith("--- attempt 1, rank 1 of 2, ")
    assert [path.name for path in (runs / "run").iterdir() if path.name.startswith(".tmp-")] == []


@slow
def test_two_ranks_print_a_user_error_once_and_leave_nothing(runs: Runs) -> None:
    assert runs.run(*runs.overrides("run"), f"data.path={runs.write_bad_rows()}") == 2
    assert [line[:9] for line in runs.output.read_text().splitlines()] == ["error: te", "  where: ", "  fix:   "]
    assert not (runs / "run").exists()


@pytest.mark.slow(long=True)
def test_nproc_and_torchrun_resume_each_other_bitwise_equal(runs: Runs) -> None:
    assert runs.run(*runs.overrides("nproc")) == 0
    for name, first, then in (("both", BY_NPROC, BY_TORCHRUN), ("either", BY_TORCHRUN, BY_NPROC)):
        stop = {"rank": 0, "step": 5, "code": "os.kill(os.getpid(), 15)", "once": str(runs / f"once-{name}")}
        assert runs.run(*runs.overrides(name), by=first, fault=stop) == (75 if first == BY_NPROC else 1)
        assert (runs.run_json(name)["status"], newest(runs / name)) == ("interrupted", 5)
        assert runs.run(f"resume={runs / name}", by=then) == 0, runs.output.read_text()
        assert diff_run_dirs(runs / "nproc", runs / name) == []
    before = (runs / "either" / "run.json").read_bytes()
    assert runs.run(f"resume={runs / 'either'}", by=BY_TORCHRUN) == 0
    assert "already complete at step 12" in runs.output.read_text()
    assert (runs / "either" / "run.json").read_bytes() == before


@slow
@pytest.mark.parametrize("by", [pytest.param(BY_NPROC, marks=only_full), BY_TORCHRUN])
def test_sweep_jobs_use_all_ranks_and_can_be_extended(runs: Runs, by: str) -> None:
    overrides = [*runs.overrides("-")[:-1], "train.max_steps=4", f"hydra.sweep.dir={runs / 'sweep'}"]
    for sweep in (
        ["--multirun", *overrides, "optimizer.lr=1e-4,5e-4"],
        [f"resume={runs / 'sweep'}", "optimizer.lr=1e-4,1e-3"],
    ):
        assert runs.run(*sweep, by=by) == 0, runs.output.read_text()
    jobs = sorted(path.parent for path in (runs / "sweep").glob("*/run.json"))
    assert len(jobs) == 3 and all(json.loads((job / "run.json").read_text())["attempt"] == 1 for job in jobs)
    assert all("rank 1 of 2" in (job / "logs" / "rank1.log").read_text() for job in jobs)
    assert processes_of(runs.root) == []


@slow
@pytest.mark.parametrize("by", [BY_NPROC, pytest.param(BY_TORCHRUN, marks=only_full)])
def test_sweep_continues_after_a_job_fails_on_its_ranks(runs: Runs, by: str) -> None:
    overrides = [
        *runs.overrides("-")[:-1],
        "train.max_steps=4",
        "distributed=fsdp",
        f"hydra.sweep.dir={runs / 'sweep'}",
    ]
    fault = {"rank": 0, "step": 2, "code": "if state.cfg.seed == 2: os.kill(os.getpid(), 9)\nos.unlink(fault['once'])"}
    files = ",".join(map(str, [runs.write_bad_rows(), *[runs / "rows.jsonl"] * 2]))
    # the first is refused, the second is killed
    points = ["seed=1,2,3", f"data.path={files}", "sweep.zip=[seed,data.path]"]
    assert runs.run("--multirun", *overrides, *points, by=by, fault=fault) == 1, runs.output.read_text()
    jobs = json.loads((runs / "sweep" / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "failed", "completed"], jobs
    assert processes_of(runs.root) == []


@slow
@pytest.mark.parametrize(
    "overrides",
    [*(pytest.param(typed, marks=only_full) for typed in (["--help"], ["--cfg", "job"])), ["train.max_stps=3"]],
)
def test_torchrun_ranks_exit_after_help_config_or_user_error(runs: Runs, overrides: list[str]) -> None:
    assert runs.run(*overrides, by=BY_TORCHRUN) == (1 if "=" in overrides[0] else 0)
    text = runs.output.read_text()
    if "=" in overrides[0]:
        assert text.count("error: unknown setting") == 1 and re.search(
            r"Root Cause .*\n(.*\n)+ +rank +: 0 .*\n +exitcode +: 2", text
        )


@slow
@pytest.mark.parametrize(
    "rank, code, cause",
    [
        (1, "raise KeyError('lost')", "KeyError: 'lost'"),
        (0, "os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory, or kill -9)"),
        pytest.param(0, "raise KeyError('lost')", "KeyError: 'lost'", marks=only_full),
        pytest.param(1, "os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory, or kill -9)", marks=only_full),
    ],
)
def test_failed_rank_is_named_and_the_run_can_be_resumed(runs: Runs, rank: int, code: str, cause: str) -> None:
    fault = {"rank": rank, "step": 5, "code": code, "after": str(runs / "run" / "checkpoints" / "step-00000003")}
    assert runs.run(*runs.overrides("run"), fault=fault) == 1
    output = runs.output.read_text()
    assert f"error: rank {rank}: {cause}" in output and (
        runs.run_json("run")["status"],
        runs.run_json("run")["error"],
    ) == ("failed", f"rank {rank}: {cause}")
    assert len(re.findall("^error: ", output, re.MULTILINE)) == 1, output
    assert output.count("Traceback") == ("KeyError" in cause) and ("[rank 1] Traceback" in output) == (
        "KeyError" in cause and rank == 1
    )
    assert processes_of(runs.root) == [] and newest(runs / "run") == 3
    assert runs.run(f"resume={runs / 'run'}") == 0 and newest(runs / "run") == 12


@slow
def test_hanging_rank_times_out_and_every_stack_is_printed(runs: Runs) -> None:
    fault = {"rank": 1, "step": 5, "code": "import time; time.sleep(600)"}
    assert runs.run(*runs.overrides("run"), "distributed.timeout=0.15", fault=fault) == 1
    output = runs.output.read_text()
    assert re.search(r"^Timeout \(", output, re.MULTILINE) and re.search(
        r"^\[rank 1\] Timeout \(", output, re.MULTILINE
    )
    error = runs.run_json("run")["error"]
    assert re.match(
        r"rank 1: hangs in a training step, after step \d \(pid \d+, no progress for \d+ s\), the stacks are printed above; rank 0 waited for 0.15 minutes",
        error,
    ), error
    assert "Traceback" not in output and processes_of(runs.root) == [] and newest(runs / "run") == 3


@slow
def test_restart_continues_from_the_last_checkpoint(runs: Runs) -> None:
    assert runs.run(*runs.overrides("whole"), "distributed.max_restarts=2") == 0
    fault = {"rank": 1, "step": 5, "code": "os.kill(os.getpid(), 9)"}
    assert runs.run(*runs.overrides("run"), "distributed.max_restarts=2", fault=fault) == 0
    assert re.search(
        r"rank 1: killed by SIGKILL \(out of memory, or kill -9\).*; restart 1 of 2 from step [1-5]\b",
        runs.output.read_text(),
    ), runs.output.read_text()
    assert runs.run_json("run")["attempt"] == 2 and diff_run_dirs(runs / "whole", runs / "run") == []


@slow
@pytest.mark.parametrize("overrides", [["run"], pytest.param(["sweep"], marks=only_full)])
def test_torchrun_restart_continues_its_run_or_sweep(runs: Runs, overrides: list[str]) -> None:
    assert runs.run(*runs.overrides("whole"), "seed=1") == 0
    fault = {"rank": 1, "step": 5, "code": "os.kill(os.getppid() if 'RUNNER_JOB' in os.environ else os.getpid(), 9)"}
    target = (
        runs.overrides("run")
        if overrides == ["run"]
        else ["--multirun", *runs.overrides("-")[:-1], f"hydra.sweep.dir={runs / 'sweep'}"]
    )
    options = {"by": BY_TORCHRUN, "flags": ("--max-restarts=1",), "fault": fault}
    assert runs.run(*target, "seed=1", **options) == 0, runs.output.read_text()
    folder = runs / "run" if overrides == ["run"] else next((runs / "sweep").glob("*/run.json")).parent
    assert json.loads((folder / "run.json").read_text())["attempt"] == 2 and diff_run_dirs(runs / "whole", folder) == []


@slow
@pytest.mark.parametrize("by", [BY_NPROC, BY_TORCHRUN])
def test_sigterm_to_the_launcher_saves_and_exits(runs: Runs, by: str) -> None:
    child = runs.launch(*runs.overrides("run"), "train.max_steps=100000", "train.save_every=0", by=by)
    wait_until(lambda: has_stepped(runs / "run"))
    child.terminate()
    assert child.wait(TIMEOUT) == (75 if by == BY_NPROC else 1) and "runner/train.py resume=" in runs.output.read_text()
    record = runs.run_json("run")
    assert (
        record["status"] == "interrupted"
        and record["step"] == newest(runs / "run") > 0
        and processes_of(runs.root) == []
    )


@slow
@pytest.mark.parametrize("by", [BY_NPROC, BY_TORCHRUN])
def test_killed_launcher_leaves_no_process_and_a_resumable_run(runs: Runs, by: str) -> None:
    child = runs.launch(
        *runs.overrides("run"), "train.max_steps=100000", "train.save_every=0", "data.num_workers=1", by=by
    )
    wait_until(lambda: has_stepped(runs / "run"))
    refused = subprocess.run(
        [sys.executable, runs.train, f"resume={runs / 'run'}"], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert refused.returncode == 2 and "being trained by process" in refused.stderr
    child.kill()
    child.wait()
    wait_until(lambda: not is_locked(runs / "run"))
    wait_until(lambda: not processes_of(runs.root))
    step = newest(runs / "run")
    assert step > 0
    assert runs.run(f"resume={runs / 'run'}", f"train.max_steps={step + 2}") == 0, runs.output.read_text()
    assert newest(runs / "run") == step + 2


@slow
def test_two_torchruns_like_two_nodes_train_one_run(runs: Runs) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=lm1",
    )
    overrides = [override for override in runs.overrides("run") if not override.startswith("distributed.nproc=")]
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        runs.train,
        *overrides,
        "distributed.nproc=1",
        "distributed.nnodes=2",
    ]
    nodes = [subprocess.Popen(program, cwd=runs.root, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]
    assert [node.wait(TIMEOUT) for node in nodes] == [0, 0]
    assert runs.run_json("run")["step"] == 12 and "rank 1 of 2" in (runs / "run" / "logs" / "rank1.log").read_text()


def attempt_of(folder: Path) -> int:
    """The newest attempt that has made a step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["attempt"] if lines and lines[-1].endswith("}") else 0


@pytest.mark.slow(long=True)
def test_kills_of_ranks_and_launcher_change_no_bit(runs: Runs) -> None:
    """tests/faults/test_kill_ranks.py has many kills of forked ranks."""
    chance, folder, longer = random.Random(8), runs / "run", ["train.max_steps=60", "train.save_every=1"]
    assert runs.run(*runs.overrides("whole"), *longer) == 0
    kills = [("parent", 9), ("rank", 9), ("parent", 15), ("rank", 15), ("parent", 9), ("rank", 9)][: faults(4, full=6)]
    for attempt, (who, number) in enumerate(kills, start=1):
        child = runs.launch(*([f"resume={folder}"] if attempt > 1 else [*runs.overrides("run"), *longer]))
        wait_until(lambda attempt=attempt: attempt_of(folder) == attempt)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(chance.choice(ranks_of(folder)) if who == "rank" else child.pid, number)
        assert (
            child.wait(TIMEOUT)
            == {("parent", 9): -9, ("parent", 15): 75, ("rank", 9): 1, ("rank", 15): 75}[who, number]
        ), runs.output.read_text()
        wait_until(lambda: not is_locked(folder))
        wait_until(lambda: not processes_of(runs.root))
    assert runs.run(f"resume={folder}") == 0, runs.output.read_text()
    assert diff_run_dirs(runs / "whole", folder) == []
