"""run.json and the lock: what they record about a run, and that one launch at a time changes it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import filesystem, ownership
from common.errors import Outcome, UserError
from runner.run_dir import contents
from runner.run_dir.contents import has_diverged
from runner.run_dir.lock import unusable_error
from runner.run_dir.metadata import RunMetadata

ROOT = Path(__file__).parents[2]


def fields_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file's bytes, times and inode."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted([folder, *folder.rglob("*")])
        if path.name != ".lock"  # reading it would release a lock of this process
    }


def start(script: str, *args: object) -> subprocess.Popen:
    prelude = f"import os, sys, time; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r})\nfrom common.errors import UserError\nfrom runner.run_dir.metadata import RunMetadata\nfolder = Path(sys.argv[1])\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


HOLD = """
metadata = RunMetadata.open(folder, resume=len(sys.argv) > 2)
metadata.mark_running()
print("trains", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path / "run"."""
    child = start(HOLD, tmp_path / "run")
    assert child.stdout.readline() == "trains\n"
    yield child
    child.kill()
    child.communicate()


def create_run(folder):
    with RunMetadata.open(folder) as metadata:
        metadata.record_created()


def test_metadata_goes_from_new_through_running_to_completed(tmp_path):
    with RunMetadata.open(tmp_path / "a" / "run") as metadata:
        assert not (metadata.folder / "run.json").exists(), "nothing counts as a run before its settings are stored"
        metadata.record_created()
        folder = metadata.folder
        assert fields_of(folder)["status"] == metadata.status == "new" and metadata.attempt == 0
        metadata.mark_running(init_from=tmp_path)
        assert fields_of(folder)["status"] == metadata.status == "running" and metadata.attempt == 1
        assert (fields_of(folder)["pid"], fields_of(folder)["init_from"], fields_of(folder)["exact"]) == (
            os.getpid(),
            str(tmp_path),
            True,
        )
        metadata.update(step=7, tokens=900)
        assert (fields_of(folder)["step"], fields_of(folder)["tokens"], fields_of(folder)["status"]) == (
            7,
            900,
            "running",
        )
        metadata.finish(Outcome.COMPLETED, metrics={"loss": 1.5})
    assert (
        fields_of(folder)["status"] == "completed"
        and fields_of(folder)["metrics"] == {"loss": 1.5}
        and "ended" in fields_of(folder)
    )
    assert not (folder / ".owner.json").exists()


def test_metadata_writes_null_for_nan_and_infinity(tmp_path):
    with RunMetadata.open(tmp_path) as metadata:
        metadata.update(metrics={"loss": float("nan"), "norms": (float("inf"), 1.0)})
    assert fields_of(tmp_path)["metrics"] == {"loss": None, "norms": [None, 1.0]}


def test_open_in_a_second_process_is_refused_and_changes_nothing(tmp_path, holder):
    before = snapshot(tmp_path / "run")
    for resume in (False, True):
        with pytest.raises(UserError) as caught:
            RunMetadata.open(tmp_path / "run", resume=resume)
        assert f"process {holder.pid} on {ownership.process_id()['host']} since " in caught.value.message
        assert caught.value.setting == str(tmp_path / "run") and "hydra.run.dir=" in caught.value.fix
    assert snapshot(tmp_path / "run") == before


def test_second_open_in_one_process_is_refused_and_keeps_the_lock(tmp_path):
    with RunMetadata.open(tmp_path):
        with pytest.raises(UserError, match="being trained by process"):
            RunMetadata.open(tmp_path)
        other = start(HOLD, tmp_path)
        assert other.communicate()[0] == "" and other.returncode != 0
    with RunMetadata.open(tmp_path):
        pass


def test_killed_run_is_unlocked_and_counts_as_interrupted(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert fields_of(tmp_path / "run")["status"] == "running"
    with RunMetadata.open(tmp_path / "run", resume=True) as metadata:
        assert metadata.status == "interrupted" and metadata.attempt == 1
        metadata.mark_running()
        assert metadata.status == "running" and fields_of(tmp_path / "run")["attempt"] == 2


RANK = "metadata = RunMetadata.attach(folder, int(sys.argv[2]))\nprint(metadata.attempt, flush=True)\ntime.sleep(60)"


@pytest.fixture
def launch(tmp_path):
    """A launcher and its two ranks, each a process; the launcher is the first."""
    share = HOLD.replace("metadata.mark_running()", "metadata.mark_running(); metadata.allow_ranks()").replace(
        "time.sleep(60)",
        "metadata.set_rank_pids([int(sys.stdin.readline()), int(sys.stdin.readline())]); print('named', flush=True); time.sleep(60)",
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


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_lock_is_held_until_the_last_process_of_a_launch_ends(tmp_path, launch, order):
    for number in order:
        with pytest.raises(UserError, match="being trained by process"):
            RunMetadata.open(tmp_path / "run", resume=True)
        launch[number].kill()
        launch[number].wait()
    with RunMetadata.open(tmp_path / "run", resume=True) as metadata:
        assert metadata.status == "interrupted"


@pytest.mark.slow
def test_busy_error_names_the_ranks_that_outlive_their_launcher(tmp_path, launch):
    for number in (0, 1):
        launch[number].kill()
        launch[number].wait()
    with pytest.raises(
        UserError, match=f"being trained by process {launch[2].pid} on .* ranks whose launcher has died"
    ):
        RunMetadata.open(tmp_path / "run", resume=True)


def test_rank_cannot_lock_a_directory_that_allows_no_ranks(tmp_path, holder):
    late = start(RANK, tmp_path / "run", 0)
    assert late.communicate()[0] == "" and late.returncode != 0


@pytest.mark.slow
def test_metadata_is_written_by_rank_0_only(tmp_path, launch):
    before = snapshot(tmp_path / "run")
    writes = "metadata = RunMetadata.attach(folder, int(sys.argv[2]))\nmetadata.update(step=int(sys.argv[2]))\nmetadata.close()"
    launch[2].kill(), launch[2].wait()
    assert start(writes, tmp_path / "run", 1).wait() == 0 and snapshot(tmp_path / "run") == before
    launch[1].kill(), launch[1].wait()
    assert (
        start(writes.replace("=int", "=7 + int"), tmp_path / "run", 0).wait() == 0
        and fields_of(tmp_path / "run")["step"] == 7
    )
    assert (tmp_path / "run" / ".owner.json").exists(), "the launcher removes it"


def test_lock_is_not_held_by_data_workers_of_a_killed_trainer(tmp_path):
    forks = "metadata = RunMetadata.open(folder)\nworker = os.fork()\nif worker == 0:\n    time.sleep(60)\nprint(worker, flush=True)\ntime.sleep(60)"
    trainer = start(forks, tmp_path)
    worker = int(trainer.stdout.readline())
    try:
        trainer.kill()
        trainer.wait()
        create_run(tmp_path)
        os.kill(worker, 0)  # it is still alive
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.communicate()


@pytest.mark.slow
def test_of_many_launches_at_one_moment_exactly_one_trains(tmp_path):
    """All wait for the same moment; the one that gets the lock keeps it until all have tried."""
    race = """
while time.time() < float(sys.argv[2]):
    pass
try:
    metadata = RunMetadata.open(folder)
    metadata.mark_running()
    print("trains", flush=True)
    sys.stdin.read()
except UserError as error:
    print(error.message, flush=True)
"""
    launches = [start(race, tmp_path / "run", time.time() + 1) for _ in range(5)]
    answers = [child.stdout.readline().strip() for child in launches]
    for child in launches:
        child.communicate(timeout=500)  # closes its stdin, on which the one with the lock waits
    assert answers.count("trains") == 1, answers
    assert sum("being trained by" in answer for answer in answers) == 4, answers
    assert fields_of(tmp_path / "run")["attempt"] == 1


def test_open_without_resume_refuses_a_directory_with_a_run(tmp_path):
    with RunMetadata.open(tmp_path) as metadata:
        metadata.mark_running()
        metadata.finish(Outcome.DIVERGED, error="the loss is not finite", step=40)
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as caught:
        RunMetadata.open(tmp_path)
    error = caught.value
    assert "failed, step 40" in error.message and error.setting == str(tmp_path) and f"resume={tmp_path}" in error.fix
    assert snapshot(tmp_path) == before


def test_open_refuses_checkpoints_without_a_run_json(tmp_path):
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(UserError, match="already holds a run"):
        RunMetadata.open(tmp_path)


def test_launch_that_never_trained_leaves_the_directory_free(tmp_path):
    create_run(tmp_path)
    with RunMetadata.open(tmp_path) as metadata:
        assert metadata.status == "new"


def test_resume_of_a_missing_run_is_refused_and_creates_nothing(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        RunMetadata.open(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"status": "done", "outcome": null, "attempt": 1, "step": 0}',
        '{"status": "running", "outcome": null, "attempt": "x", "step": 0}',
        "[" * 100_000,
    ],
    ids=["empty", "torn", "list", "status", "attempt", "deep"],
)
def test_damaged_run_json_is_refused_and_kept(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError) as caught:
        RunMetadata.open(tmp_path, resume=True)
    assert caught.value.setting == str(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == text
    (tmp_path / "run.json").unlink()
    RunMetadata.open(tmp_path).close()  # the error has released the lock


def test_run_json_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "secret").write_text('{"status": "completed", "attempt": 1, "step": 0}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="run.json cannot be read"):
        RunMetadata.open(tmp_path / "run", resume=True)


OUTSIDE = {
    "metrics.jsonl": "file", "metrics.attempt1.jsonl": "file", "samples.jsonl": "file", "train.log": "file", "console.log": "file",
    "evaluations.jsonl": "file", "logs/rank1.log": "file", "tokenizer/tokenizer.json": "file", ".hydra/config.yaml": "file", "checkpoints": "folder",
    "logs": "folder", "tokenizer": "folder", "model": "folder", ".hydra": "folder", ".hydra/history": "folder",
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_run_with_a_link_to_the_outside_is_refused_and_nothing_there_changes(name, tmp_path):
    from runner.config.resolve import resolve_model_run, resolve_run

    (tmp_path / "file").write_text("victim")
    (tmp_path / "folder" / ".tmp-step-00000001-1-aa").mkdir(parents=True)  # what remove_temp deletes
    create_run(tmp_path / "run")
    link, before = tmp_path / "run" / name, snapshot(tmp_path / "folder")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / OUTSIDE[name])
    for use in (
        RunMetadata.open,
        lambda folder: RunMetadata.open(folder, resume=True),
        lambda folder: resolve_run(str(folder)),
        lambda folder: resolve_model_run(str(folder)),
    ):
        with pytest.raises(UserError, match="this is a link") as caught:
            use(tmp_path / "run")
        assert caught.value.setting == str(link)
    assert (tmp_path / "file").read_text() == "victim" and snapshot(tmp_path / "folder") == before
    link.unlink()
    (tmp_path / "typed").symlink_to(tmp_path / "run")
    RunMetadata.open(tmp_path / "typed", resume=True).close()  # the path that the user types may be a link


def test_run_with_a_pipe_in_place_of_a_log_is_refused_without_opening_it(tmp_path):
    create_run(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        RunMetadata.open(tmp_path, resume=True)


def test_open_removes_temporary_files_of_a_killed_writer(tmp_path):
    (tmp_path / "checkpoints" / ".tmp-step-00000010-1-aa").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".tmp-step-00000010-1-aa" / "model").write_bytes(b"half")
    (tmp_path / ".tmp-run.json-1-aa").write_bytes(b"half")
    create_run(tmp_path)
    assert not list(tmp_path.glob(".tmp-*")) and not list(tmp_path.glob("checkpoints/.tmp-*"))


def test_update_on_a_full_disk_is_written_with_the_next(tmp_path, monkeypatch):
    class Full(filesystem.FileSystem):
        @staticmethod
        def write(fd, data):
            raise OSError(28, "No space left on device")

    with RunMetadata.open(tmp_path) as metadata:
        metadata.record_created()
        monkeypatch.setattr(filesystem, "fs", Full())
        metadata.update(degraded="step 40 could not be saved")
        assert fields_of(tmp_path)["degraded"] is None
        monkeypatch.undo()
        metadata.update(step=50)
    assert fields_of(tmp_path)["degraded"] == "step 40 could not be saved" and not list(tmp_path.glob(".tmp-*"))


def test_open_refuses_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        RunMetadata.open(tmp_path / "file" / "run")
    assert "cannot be used" in caught.value.message


def test_resumed_run_on_a_read_only_disk_is_copied_to_another_one(tmp_path):
    """hydra.run.dir is refused with resume=."""
    error = OSError(errno.EROFS, "Read-only file system")
    assert "hydra.run.dir=DIR" in unusable_error(tmp_path, error).fix
    (tmp_path / "checkpoints").mkdir()
    assert unusable_error(tmp_path, error).fix.startswith(f"copy it to another disk: cp -r {tmp_path} DIR")


def test_git_state_is_the_commit_and_a_hash_of_changes(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            check=True,
            capture_output=True,
        )

    assert contents.git_state(tmp_path) == {"commit": None, "dirty": None}  # no repository
    git("init")
    assert contents.git_state(tmp_path) == {"commit": None, "dirty": None}  # no commit
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    clean = contents.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is None
    (tmp_path / "a.py").write_text("2")
    assert (
        contents.git_state(tmp_path)["commit"] == clean["commit"] and len(contents.git_state(tmp_path)["dirty"]) == 64
    )
    (tmp_path / "inside").mkdir()
    assert contents.git_state(tmp_path / "inside") == {"commit": None, "dirty": None}  # inside of another repository


def test_git_state_without_git_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert contents.git_state() == {"commit": None, "dirty": None}


def test_process_is_distinguished_from_a_later_one_with_the_same_pid():
    this = ownership.process_id()
    assert ownership.is_alive(this)
    if this["start_ticks"] is not None:  # where there is /proc
        assert not ownership.is_alive({**this, "start_ticks": 1}) and not ownership.is_alive(
            {**this, "boot_id": "another"}
        )


def test_files_of_hydra_are_synced_before_training_begins(tmp_path, monkeypatch):
    """Hydra does not sync them: after a power cut there would be checkpoints without the overrides to resume them."""
    hydra_dir = tmp_path / "run" / ".hydra"
    hydra_dir.mkdir(parents=True)
    (hydra_dir / "config.yaml").write_text("seed: 42\n")
    synced = []

    class Watched(filesystem.FileSystem):
        @staticmethod
        def fsync(fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.fsync(fd)

    with RunMetadata.open(tmp_path / "run") as metadata:
        monkeypatch.setattr(filesystem, "fs", Watched())
        metadata.record_created()
    first_write = next(index for index, path in enumerate(synced) if ".tmp-run.json" in path)
    assert {str(hydra_dir / "config.yaml"), str(hydra_dir), str(tmp_path / "run")} <= set(synced[:first_write])


def test_finish_records_outcome_and_status(tmp_path):
    for outcome, status in (
        (Outcome.DIVERGED, "failed"),
        (Outcome.INTERRUPTED, "interrupted"),
        (Outcome.COMPLETED, "completed"),
    ):
        with RunMetadata.open(tmp_path / outcome) as metadata:
            metadata.mark_running()
            metadata.finish(outcome)
        fields = RunMetadata.read(tmp_path / outcome)
        assert (fields["outcome"], fields["status"], has_diverged(fields)) == (
            outcome,
            status,
            outcome == Outcome.DIVERGED,
        )


def test_completed_run_is_interrupted_before_its_new_settings_are_stored(tmp_path):
    with RunMetadata.open(tmp_path) as metadata:
        metadata.mark_running()
        metadata.finish(Outcome.COMPLETED)
        with metadata.reopened():
            assert fields_of(tmp_path)["status"] == "interrupted"
        assert fields_of(tmp_path)["status"] == "interrupted"
        metadata.finish(Outcome.COMPLETED)
        with pytest.raises(UserError), metadata.reopened():
            raise UserError("a", "b", "c")
        assert fields_of(tmp_path)["status"] == "completed"


def test_long_error_is_recorded_by_its_beginning_and_its_end(tmp_path):
    """The command line of a compiler made pages of 97 kB."""
    with RunMetadata.open(tmp_path) as metadata:
        metadata.mark_running()
        metadata.finish(Outcome.FAILED, error="first" + "x" * 100_000 + "last")
        error = metadata.fields["error"]
    assert error.startswith("firstx") and error.endswith("xlast") and len(error) < 5_000
