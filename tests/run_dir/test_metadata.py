"""run.json tells the truth about a run, and one process at a time may change it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import filesystem
from common.errors import Outcome
from runner.run_dir import provenance
from runner.run_dir.metadata import RunMetadata

ROOT = Path(__file__).parents[2]


def said(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file's bytes, times and inode."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted([folder, *folder.rglob("*")])
        if path.name != ".lock"  # reading it here would let go of a lock this process holds
    }


def start(program: str, *args: object) -> subprocess.Popen:
    prelude = f"import os, sys, time; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r})\nfrom runner.run_dir.metadata import RunMetadata\nfolder = Path(sys.argv[1])\n"
    return subprocess.Popen([sys.executable, "-c", prelude + program, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


HOLD = """
metadata = RunMetadata.open(folder, resume=len(sys.argv) > 2)
metadata.mark_running()
print("trains", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that trains in tmp_path / "run"."""
    child = start(HOLD, tmp_path / "run")
    assert child.stdout.readline() == "trains\n"
    yield child
    child.kill()
    child.communicate()


def test_a_run_goes_from_new_through_running_to_completed(tmp_path):
    with RunMetadata.open(tmp_path / "a" / "run") as metadata:
        folder = metadata.folder
        assert said(folder)["status"] == metadata.status == "new" and metadata.attempt == 0
        metadata.mark_running(init_from=tmp_path)
        assert said(folder)["status"] == metadata.status == "running" and metadata.attempt == 1
        assert (said(folder)["pid"], said(folder)["init_from"], said(folder)["exact"]) == (os.getpid(), str(tmp_path), True)
        metadata.update(step=7, tokens=900)
        assert (said(folder)["step"], said(folder)["tokens"], said(folder)["status"]) == (7, 900, "running")
        metadata.finish(Outcome.COMPLETED, metrics={"loss": 1.5})
    assert said(folder)["status"] == "completed" and said(folder)["metrics"] == {"loss": 1.5} and "ended" in said(folder)
    assert not (folder / ".owner.json").exists()


def test_what_json_cannot_say_is_null(tmp_path):
    with RunMetadata.open(tmp_path) as metadata:
        metadata.update(metrics={"loss": float("nan"), "norms": (float("inf"), 1.0)})
    assert said(tmp_path)["metrics"] == {"loss": None, "norms": [None, 1.0]}


def test_a_second_process_is_refused_and_changes_no_byte(tmp_path, holder):
    before = snapshot(tmp_path / "run")
    for resume in (False, True):
        with pytest.raises(ValueError) as refusal:
            RunMetadata.open(tmp_path / "run", resume=resume)
        what, where, fix = refusal.value.args
        assert f"process {holder.pid} on {provenance.process_id()['host']} since " in what
        assert where == str(tmp_path / "run") and "hydra.run.dir=" in fix
    assert snapshot(tmp_path / "run") == before


def test_a_second_start_in_the_same_process_is_refused_and_does_not_free_the_lock(tmp_path):
    with RunMetadata.open(tmp_path):
        with pytest.raises(ValueError, match="being trained by process"):
            RunMetadata.open(tmp_path)
        other = start(HOLD, tmp_path)
        assert other.communicate()[0] == "" and other.returncode != 0
    with RunMetadata.open(tmp_path):
        pass


def test_a_kill_frees_the_folder_and_the_run_counts_as_interrupted(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert said(tmp_path / "run")["status"] == "running"
    with RunMetadata.open(tmp_path / "run", resume=True) as metadata:
        assert metadata.status == "interrupted" and metadata.attempt == 1
        metadata.mark_running()
        assert metadata.status == "running" and said(tmp_path / "run")["attempt"] == 2


RANK = "metadata = RunMetadata.attach(folder, int(sys.argv[2]))\nprint(metadata.attempt, flush=True)\ntime.sleep(60)"


@pytest.fixture
def launch(tmp_path):
    """A launch of two ranks, all in processes of their own; the first of the three is the one that started them."""
    share = HOLD.replace("metadata.mark_running()", "metadata.mark_running(); metadata.allow_ranks()").replace(
        "time.sleep(60)", "metadata.set_rank_pids([int(sys.stdin.readline()), int(sys.stdin.readline())]); print('named', flush=True); time.sleep(60)"
    )
    children = [start(share, tmp_path / "run")]
    assert children[0].stdout.readline() == "trains\n"
    for rank in (0, 1):
        children.append(start(RANK, tmp_path / "run", rank))
        assert children[-1].stdout.readline() == "1\n"
    children[0].stdin.write(f"{children[1].pid}\n{children[2].pid}\n")
    children[0].stdin.flush()
    assert children[0].stdout.readline() == "named\n"
    yield children
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_folder_is_held_until_the_last_process_of_its_launch_is_gone(tmp_path, launch, order):
    for number in order:
        with pytest.raises(ValueError, match="being trained by process"):
            RunMetadata.open(tmp_path / "run", resume=True)
        launch[number].kill()
        launch[number].wait()
    with RunMetadata.open(tmp_path / "run", resume=True) as metadata:
        assert metadata.status == "interrupted"


def test_whoever_is_refused_is_told_which_ranks_are_left(tmp_path, launch):
    for number in (0, 1):
        launch[number].kill()
        launch[number].wait()
    with pytest.raises(ValueError, match=f"being trained by process {launch[2].pid} on .* its launcher is gone"):
        RunMetadata.open(tmp_path / "run", resume=True)


def test_a_rank_that_comes_too_late_finds_the_folder_taken(tmp_path, holder):
    late = start(RANK, tmp_path / "run", 0)
    assert late.communicate()[0] == "" and late.returncode != 0


def test_the_first_rank_alone_writes(tmp_path, launch):
    before = snapshot(tmp_path / "run")
    writes = "metadata = RunMetadata.attach(folder, int(sys.argv[2]))\nmetadata.update(step=int(sys.argv[2]))\nmetadata.close()"
    launch[2].kill(), launch[2].wait()
    assert start(writes, tmp_path / "run", 1).wait() == 0 and snapshot(tmp_path / "run") == before
    launch[1].kill(), launch[1].wait()
    assert start(writes.replace("=int", "=7 + int"), tmp_path / "run", 0).wait() == 0 and said(tmp_path / "run")["step"] == 7
    assert (tmp_path / "run" / ".owner.json").exists(), "it is another's"


def test_workers_that_outlive_a_killed_trainer_do_not_hold_its_folder(tmp_path):
    forks = "metadata = RunMetadata.open(folder)\nworker = os.fork()\nif worker == 0:\n    time.sleep(60)\nprint(worker, flush=True)\ntime.sleep(60)"
    trainer = start(forks, tmp_path)
    worker = int(trainer.stdout.readline())
    try:
        trainer.kill()
        trainer.wait()
        started = time.monotonic()
        RunMetadata.open(tmp_path).close()
        assert time.monotonic() - started < 1
        os.kill(worker, 0)  # it was alive all the while
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.communicate()


def test_of_twenty_starts_at_once_exactly_one_trains(tmp_path):
    """They wait for the same moment; whoever gets in stays until all have tried."""
    race = """
while time.time() < float(sys.argv[2]):
    pass
try:
    metadata = RunMetadata.open(folder)
    metadata.mark_running()
    print("trains", flush=True)
    sys.stdin.read()
except ValueError as refusal:
    print(refusal.args[0], flush=True)
"""
    at = time.time() + 2
    starts = [start(race, tmp_path / "run", at) for _ in range(20)]
    answers = [child.stdout.readline().strip() for child in starts]
    for child in starts:
        child.communicate(timeout=60)  # closes its stdin, which lets the one that got in leave
    assert answers.count("trains") == 1, answers
    assert sum("being trained by" in answer for answer in answers) == 19, answers
    assert said(tmp_path / "run")["attempt"] == 1


def test_a_plain_start_does_not_fall_into_a_run_that_is_there(tmp_path):
    with RunMetadata.open(tmp_path) as metadata:
        metadata.mark_running()
        metadata.finish(Outcome.FAILED, error="diverged", step=40)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError) as refusal:
        RunMetadata.open(tmp_path)
    what, where, fix = refusal.value.args
    assert "failed, step 40" in what and where == str(tmp_path) and f"resume={tmp_path}" in fix
    assert snapshot(tmp_path) == before


def test_checkpoints_without_a_run_json_are_a_run_too(tmp_path):
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds a run"):
        RunMetadata.open(tmp_path)


def test_a_start_that_never_trained_leaves_the_folder_free(tmp_path):
    RunMetadata.open(tmp_path).close()
    with RunMetadata.open(tmp_path) as metadata:
        assert metadata.status == "new"


def test_resuming_what_is_not_there_is_refused_and_makes_no_folder(tmp_path):
    with pytest.raises(ValueError, match="there is no run here"):
        RunMetadata.open(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"status": "done", "attempt": 1, "step": 0}', '{"status": "running", "attempt": "x", "step": 0}', "[" * 100_000]
)
def test_a_broken_run_json_is_refused_and_kept(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError) as refusal:
        RunMetadata.open(tmp_path, resume=True)
    assert refusal.value.args[1] == str(tmp_path / "run.json") and len(refusal.value.args) == 3
    assert (tmp_path / "run.json").read_text() == text
    (tmp_path / "run.json").unlink()
    RunMetadata.open(tmp_path).close()  # the refusal let go of the lock


def test_a_run_json_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text('{"status": "completed", "attempt": 1, "step": 0}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="no run.json of ours"):
        RunMetadata.open(tmp_path / "run", resume=True)


def test_opening_sweeps_what_a_killed_writer_left(tmp_path):
    (tmp_path / "checkpoints" / ".tmp-step-00000010-1-aa").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".tmp-step-00000010-1-aa" / "model").write_bytes(b"half")
    (tmp_path / ".tmp-run.json-1-aa").write_bytes(b"half")
    RunMetadata.open(tmp_path).close()
    assert not list(tmp_path.glob(".tmp-*")) and not list(tmp_path.glob("checkpoints/.tmp-*"))


def test_a_full_disk_delays_an_update_and_stops_nothing(tmp_path, monkeypatch):
    class Full(filesystem.FileSystem):
        @staticmethod
        def write(fd, data):
            raise OSError(28, "No space left on device")

    with RunMetadata.open(tmp_path) as metadata:
        monkeypatch.setattr(filesystem, "fs", Full())
        metadata.update(degraded="step 40 could not be saved")
        assert said(tmp_path)["degraded"] is None
        monkeypatch.undo()
        metadata.update(step=50)
    assert said(tmp_path)["degraded"] == "step 40 could not be saved" and not list(tmp_path.glob(".tmp-*"))


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError) as refusal:
        RunMetadata.open(tmp_path / "file" / "run")
    assert "a run cannot live here" in refusal.value.args[0] and len(refusal.value.args) == 3


def test_the_code_is_told_by_commit_and_changes(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    assert provenance.git_state(tmp_path) == {"commit": None, "dirty": None}  # no repository
    git("init")
    assert provenance.git_state(tmp_path) == {"commit": None, "dirty": None}  # no commit
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    clean = provenance.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is None
    (tmp_path / "a.py").write_text("2")
    assert provenance.git_state(tmp_path)["commit"] == clean["commit"] and len(provenance.git_state(tmp_path)["dirty"]) == 64
    (tmp_path / "inside").mkdir()
    assert provenance.git_state(tmp_path / "inside") == {"commit": None, "dirty": None}  # somebody else's repository


def test_without_git_the_code_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state() == {"commit": None, "dirty": None}


def test_a_process_is_told_from_a_later_one_of_the_same_number():
    me = provenance.process_id()
    assert provenance.is_alive(me)
    if me["start_ticks"] is not None:  # where there is /proc
        assert not provenance.is_alive({**me, "start_ticks": 1}) and not provenance.is_alive({**me, "boot_id": "another"})


def test_the_words_of_a_run_are_on_the_disk_before_it_trains(tmp_path, monkeypatch):
    """Hydra writes them and syncs nothing: after a power cut there would be checkpoints that no word leads to."""
    words = tmp_path / "run" / ".hydra"
    words.mkdir(parents=True)
    (words / "config.yaml").write_text("seed: 42\n")
    synced = []

    class Watched(filesystem.FileSystem):
        @staticmethod
        def fsync(fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.fsync(fd)

    with RunMetadata.open(tmp_path / "run") as metadata:
        monkeypatch.setattr(filesystem, "fs", Watched())
        metadata.mark_running()
    begun = next(at for at, path in enumerate(synced) if ".tmp-run.json" in path)
    assert {str(words / "config.yaml"), str(words), str(tmp_path / "run")} <= set(synced[:begun])
