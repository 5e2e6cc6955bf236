"""The real command on two ranks of the CPU, started by itself and by torchrun, disturbed in every way, and continued."""

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

from runner.checkpoint import atomic_dir
from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.lock import is_locked

WORDS = [
    "stage=pretrain", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=1", "model.head_dim=8", "model.intermediate_size=64", "model.max_position_embeddings=128",
    "model.dropout=0.1", "data.max_length=64", "data.val_path=null", "data.val_fraction=0.2", "train.batch_size=2", "train.max_steps=12", "train.log_every=1", "train.save_every=3",
    "train.eval_every=6", "train.sample_every=0", "device=cpu", "distributed=ddp", "distributed.nproc=2",
]  # fmt: skip
BY_WORD, BY_TORCHRUN = "word", "torchrun"
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nnodes=1",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--no-python",
    sys.executable,
]
PATIENCE = 400  # seconds; what hangs fails its test, and a busy machine is no hang
slow = pytest.mark.slow


class Runs:
    """Launches in `place`, whose newest words stand in the file `said`."""

    def __init__(self, checkout: Path, place: Path) -> None:
        self.train, self.place = str(checkout / "runner" / "train.py"), place
        self.said = place / "said"
        (place / "rows.jsonl").write_text("".join(json.dumps({"text": "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n" for i in range(40)))

    def words(self, name: str) -> list[str]:
        return [*WORDS, f"data.path={self.place / 'rows.jsonl'}", f"data.cache={self.place / 'cache'}", f"hydra.run.dir={self.place / name}"]

    def launch(self, *words: str, by: str = BY_WORD, flags: tuple[str, ...] = (), fault: dict[str, Any] | None = None, **env: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        if fault:
            environment |= {"FAULT": json.dumps({"once": str(self.place / "once"), **fault}), "PYTHONPATH": str(Path(__file__).parents[1] / "faults" / "fault")}
        if by == BY_WORD:
            program = [self.train, *words]
        else:
            program = [*TORCHRUN[:2], *flags, *TORCHRUN[2:], self.train, *words]
        with open(self.said, "w") as said:
            return subprocess.Popen([sys.executable, *program], cwd=self.place, stdout=said, stderr=said, env=environment)

    def to_end(self, *words: str, **how: Any) -> int:
        child = self.launch(*words, **how)
        try:
            return child.wait(PATIENCE)
        finally:
            child.kill()

    def record(self, name: str) -> dict:
        return json.loads((self.place / name / "run.json").read_text())

    def __truediv__(self, name: str) -> Path:
        return self.place / name


@pytest.fixture
def runs(checkout: Path, tmp_path: Path) -> Runs:
    return Runs(checkout, tmp_path)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ranks_of(folder: Path) -> list[int]:
    """Process numbers, as whoever is refused reads them."""
    try:
        return [rank["pid"] for rank in json.loads((folder / ".owner.json").read_text()).get("ranks", [])]
    except (OSError, ValueError):
        return []


def has_stepped(folder: Path, step: int = 1) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


def processes_of(place: Path) -> list[str]:
    """Command lines of all that was started there and still runs."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if words and (str(place) in words or os.readlink(process / "cwd") == str(place)):
                    found.append(words)
            except OSError:
                continue
    return found


def newest(folder: Path) -> int:
    """The newest saved step; every checkpoint must prove whole."""
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert [(name, reason) for name in names if (reason := atomic_dir.verify_dir(folder / "checkpoints" / name))] == []
    return int(names[-1][5:]) if names else 0


def test_two_ranks_are_started_by_a_word_and_make_one_run(runs: Runs) -> None:
    assert runs.to_end(*runs.words("run")) == 0, runs.said.read_text()
    record = runs.record("run")
    assert (record["status"], record["step"], record["attempt"]) == ("completed", 12, 1)
    assert "x 2 ranks" in runs.said.read_text() and newest(runs / "run") == 12
    assert (runs / "run" / "logs" / "rank1.log").read_text().startswith("--- attempt 1, rank 1 of 2, ")
    assert [path.name for path in (runs / "run").iterdir() if path.name.startswith(".tmp-")] == []


@slow
def test_a_refusal_inside_the_ranks_is_three_lines_once_and_leaves_no_attempt(runs: Runs) -> None:
    assert runs.to_end(*runs.words("run"), "model.vocab_size=100") == 2  # fewer than the tokenizer has
    assert [line[:9] for line in runs.said.read_text().splitlines()] == ["error: th", "  where: ", "  fix:   "]
    assert (runs.record("run")["status"], runs.record("run")["attempt"]) == ("new", 0)


@slow
def test_the_word_and_torchrun_stopped_and_continued_by_either_end_in_the_same_bits(runs: Runs) -> None:
    assert runs.to_end(*runs.words("word")) == 0
    assert runs.to_end(*runs.words("torchrun"), by=BY_TORCHRUN) == 0, runs.said.read_text()
    assert diff_run_dirs(runs / "word", runs / "torchrun") == []
    for name, first, then in (("both", BY_WORD, BY_TORCHRUN), ("either", BY_TORCHRUN, BY_WORD)):
        stop = {"rank": 0, "step": 5, "code": "os.kill(os.getpid(), 15)", "once": str(runs / f"once-{name}")}
        assert runs.to_end(*runs.words(name), by=first, fault=stop) == (75 if first == BY_WORD else 1)
        assert (runs.record(name)["status"], newest(runs / name)) == ("interrupted", 5)
        assert runs.to_end(f"resume={runs / name}", by=then) == 0, runs.said.read_text()
        assert diff_run_dirs(runs / "word", runs / name) == []


@slow
@pytest.mark.parametrize("by", [BY_WORD, BY_TORCHRUN])
def test_a_sweep_gives_every_job_all_ranks_and_can_be_extended(runs: Runs, by: str) -> None:
    words = [*runs.words("-")[:-1], "train.max_steps=4", f"hydra.sweep.dir={runs / 'sweep'}"]
    assert runs.to_end("--multirun", *words, "optimizer.lr=1e-4,5e-4", by=by) == 0, runs.said.read_text()
    assert runs.to_end(f"resume={runs / 'sweep'}", "optimizer.lr=1e-4,1e-3", by=by) == 0, runs.said.read_text()
    jobs = sorted(path.parent for path in (runs / "sweep").glob("*/run.json"))
    assert len(jobs) == 3 and all(json.loads((job / "run.json").read_text())["attempt"] == 1 for job in jobs)
    assert all("rank 1 of 2" in (job / "logs" / "rank1.log").read_text() for job in jobs)
    assert processes_of(runs.place) == []


@slow
@pytest.mark.parametrize("by", [BY_WORD, BY_TORCHRUN])
def test_a_job_that_fails_or_is_refused_ends_on_all_ranks_and_the_sweep_goes_on(runs: Runs, by: str) -> None:
    words = [*runs.words("-")[:-1], "train.max_steps=4", "distributed=fsdp", f"hydra.sweep.dir={runs / 'sweep'}"]
    fault = {"rank": 0, "step": 2, "code": "if run.cfg.seed == 2: os.kill(os.getpid(), 9)\nos.unlink(fault['once'])"}
    points = ["seed=1,2,3", "model.vocab_size=100,6400,6400", "sweep.zip=[seed,model.vocab_size]"]  # the first is refused, the second is killed
    assert runs.to_end("--multirun", *words, *points, by=by, fault=fault) == 1, runs.said.read_text()
    jobs = json.loads((runs / "sweep" / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "failed", "completed"], jobs
    assert processes_of(runs.place) == []


@slow
@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"], ["train.max_stps=3"]])
def test_whatever_the_first_rank_says_the_others_do_not_wait(runs: Runs, words: list[str]) -> None:
    assert runs.to_end(*words, by=BY_TORCHRUN) == (1 if "=" in words[0] else 0)
    text = runs.said.read_text()
    if "=" in words[0]:
        assert text.count("error: no such word") == 1 and re.search(r"Root Cause .*\n(.*\n)+ +rank +: 0 .*\n +exitcode +: 2", text)


@slow
def test_a_run_that_is_complete_stays_so_under_torchrun(runs: Runs) -> None:
    assert runs.to_end(*runs.words("run"), "train.max_steps=2", by=BY_TORCHRUN) == 0
    before = (runs / "run" / "run.json").read_bytes()
    assert runs.to_end(f"resume={runs / 'run'}", by=BY_TORCHRUN) == 0
    assert "already complete at step 2" in runs.said.read_text() and (runs / "run" / "run.json").read_bytes() == before


@slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "code, cause", [("raise KeyError('lost')", "KeyError: 'lost'"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory, or kill -9)")]
)
def test_a_rank_that_fails_fails_the_run_by_name_and_the_run_can_be_continued(runs: Runs, rank: int, code: str, cause: str) -> None:
    assert runs.to_end(*runs.words("run"), fault={"rank": rank, "step": 5, "code": code}) == 1
    said = runs.said.read_text()
    assert f"error: rank {rank}: {cause}" in said and (runs.record("run")["status"], runs.record("run")["error"]) == ("failed", f"rank {rank}: {cause}")
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 1, said
    assert said.count("Traceback") == ("KeyError" in cause) and ("[rank 1] Traceback" in said) == ("KeyError" in cause and rank == 1)
    assert processes_of(runs.place) == [] and newest(runs / "run") == 3
    assert runs.to_end(f"resume={runs / 'run'}") == 0 and newest(runs / "run") == 12


@slow
def test_a_rank_that_hangs_is_found_out_and_every_stack_is_shown(runs: Runs) -> None:
    fault = {"rank": 1, "step": 5, "code": "import time; time.sleep(600)"}
    assert runs.to_end(*runs.words("run"), "distributed.timeout=0.15", fault=fault) == 1
    said = runs.said.read_text()
    assert re.search(r"^Timeout \(", said, re.MULTILINE) and re.search(r"^\[rank 1\] Timeout \(", said, re.MULTILINE)
    assert runs.record("run")["error"] == "no step for 0.15 minutes (distributed.timeout); rank 0 gave up first, where each stood is said above"
    assert "Traceback" not in said and processes_of(runs.place) == [] and newest(runs / "run") == 3


@slow
def test_a_failed_run_is_started_again_from_its_last_checkpoint(runs: Runs) -> None:
    assert runs.to_end(*runs.words("whole"), "distributed.max_restarts=2") == 0
    fault = {"rank": 1, "step": 5, "code": "os.kill(os.getpid(), 9)"}
    assert runs.to_end(*runs.words("run"), "distributed.max_restarts=2", fault=fault) == 0
    assert "rank 1: killed by SIGKILL (out of memory, or kill -9); restart 1 of 2 from the last checkpoint" in runs.said.read_text()
    assert runs.record("run")["attempt"] == 2 and diff_run_dirs(runs / "whole", runs / "run") == []


@slow
@pytest.mark.parametrize("words", [["run"], ["sweep"]])
def test_torchrun_starts_again_what_it_started_before(runs: Runs, words: list[str]) -> None:
    assert runs.to_end(*runs.words("whole"), "seed=1") == 0
    fault = {"rank": 1, "step": 5, "code": "os.kill(os.getppid() if 'RUNNER_JOB' in os.environ else os.getpid(), 9)"}
    place = runs.words("run") if words == ["run"] else ["--multirun", *runs.words("-")[:-1], f"hydra.sweep.dir={runs / 'sweep'}"]
    assert runs.to_end(*place, "seed=1", by=BY_TORCHRUN, flags=("--max-restarts=1",), fault=fault) == 0, runs.said.read_text()
    folder = runs / "run" if words == ["run"] else next((runs / "sweep").glob("*/run.json")).parent
    assert json.loads((folder / "run.json").read_text())["attempt"] == 2 and diff_run_dirs(runs / "whole", folder) == []


@slow
@pytest.mark.parametrize("by", [BY_WORD, BY_TORCHRUN])
def test_sigterm_to_the_parent_saves_and_leaves(runs: Runs, by: str) -> None:
    child = runs.launch(*runs.words("run"), "train.max_steps=100000", "train.save_every=0", by=by)
    until(lambda: has_stepped(runs / "run"))
    child.terminate()
    assert child.wait(PATIENCE) == (75 if by == BY_WORD else 1) and "continue with: python runner/train.py resume=" in runs.said.read_text()
    record = runs.record("run")
    assert record["status"] == "interrupted" and record["step"] == newest(runs / "run") > 0 and processes_of(runs.place) == []


@slow
@pytest.mark.parametrize("by", [BY_WORD, BY_TORCHRUN])
def test_a_killed_parent_leaves_no_orphan_and_a_run_that_goes_on(runs: Runs, by: str) -> None:
    child = runs.launch(*runs.words("run"), "train.max_steps=100000", "train.save_every=0", "data.num_workers=1", by=by)
    until(lambda: has_stepped(runs / "run"))
    refused = subprocess.run([sys.executable, runs.train, f"resume={runs / 'run'}"], capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 2 and "this run is being trained by process" in refused.stderr
    child.kill()
    child.wait()
    until(lambda: not is_locked(runs / "run"))
    until(lambda: not processes_of(runs.place))
    step = newest(runs / "run")
    assert step > 0
    assert runs.to_end(f"resume={runs / 'run'}", f"train.max_steps={step + 2}") == 0, runs.said.read_text()
    assert newest(runs / "run") == step + 2


@slow
def test_two_torchruns_as_of_two_nodes_make_one_run(runs: Runs) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=lm1")
    words = [word for word in runs.words("run") if not word.startswith("distributed.nproc=")]
    program = [sys.executable, "-m", "torch.distributed.run", *flags, runs.train, *words, "distributed.nproc=1", "distributed.nnodes=2"]
    nodes = [subprocess.Popen(program, cwd=runs.place, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0]
    assert runs.record("run")["step"] == 12 and "rank 1 of 2" in (runs / "run" / "logs" / "rank1.log").read_text()


def attempt_of(folder: Path) -> int:
    """The newest that has made a step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["attempt"] if lines and lines[-1].endswith("}") else 0


@slow
def test_cold_kills_of_ranks_and_their_parent_cost_no_bit(runs: Runs) -> None:
    """tests/faults/test_kill_ranks.py has fifty, of ranks that start faster."""
    chance, folder, longer = random.Random(8), runs / "run", ["train.max_steps=60", "train.save_every=1"]
    assert runs.to_end(*runs.words("whole"), *longer) == 0
    kills = [("parent", 9), ("rank", 9), ("parent", 15), ("rank", 15), ("parent", 9), ("rank", 9)]
    for attempt, (who, number) in enumerate(kills, start=1):
        child = runs.launch(*([f"resume={folder}"] if attempt > 1 else [*runs.words("run"), *longer]))
        until(lambda attempt=attempt: attempt_of(folder) == attempt)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(chance.choice(ranks_of(folder)) if who == "rank" else child.pid, number)
        assert child.wait(PATIENCE) == {("parent", 9): -9, ("parent", 15): 75, ("rank", 9): 1, ("rank", 15): 75}[who, number], runs.said.read_text()
        until(lambda: not is_locked(folder))
        until(lambda: not processes_of(runs.place))
    assert runs.to_end(f"resume={folder}") == 0, runs.said.read_text()
    assert diff_run_dirs(runs / "whole", folder) == []
