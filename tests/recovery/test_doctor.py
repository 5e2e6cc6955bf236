"""doctor.py: what it says resume= would do with a damaged run is what resume= does, and what it repairs is sound
afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from damaged_runs import DAMAGES, LATEST, OLDER, SAVED, Damage, cut, on
from safetensors.torch import load_file, save_file

from common.errors import UserError, resume_command
from common.file_lock import FileLock
from runner.engine.config import Config
from runner.launch.doctor import DoctorConfig, Examination, Verdict, doctor, examine_run, repair_run
from runner.launch.recovery import Severity
from runner.run_dir.contents import RUN_FILE
from runner.run_dir.metadata import RunMetadata


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def link(name: str) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        (run / name).rename(run.parent / "outside")
        (run / name).symlink_to(run.parent / "outside")

    return replace


UNSAFE = {
    f"link as {name}": Damage(link(name), is_refused=True)
    for name in ("metrics.jsonl", "checkpoints", ".hydra", "tokenizer")
}
NEWEST_IS_LOST = (
    "newest checkpoint damaged",
    "newest checkpoint deleted",
    "newest checkpoint damaged, run.json missing",
)
# The others are predicted where they are resumed: test_recover_run.py
FAST = ("metrics missing", "checkpoints not mounted", "link as checkpoints")
PREDICTED = (
    "run.json cut off",
    "config.yaml missing",
    "metrics missing",
    "newest checkpoint damaged",
    "checkpoints not mounted",
    "all checkpoints damaged",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in (*PREDICTED, *UNSAFE)]
)
def test_doctor_predicts_what_a_resume_does_and_changes_nothing(name: str, killed: Path) -> None:
    damage = {**DAMAGES, **UNSAFE}[name]
    damage.apply(killed)
    before = snapshot(killed)
    examination = examine_run(killed)
    after = snapshot(killed)
    assert after == before
    examine = examination.prediction
    assert (examine.verdict is Verdict.REFUSES) == damage.is_refused, examination
    assert examine.inexact == [] or damage.is_refused
    if not damage.is_refused:
        assert examine.step == (SAVED - 2 if name in NEWEST_IS_LOST else SAVED), examination
    is_harmless = (
        not damage.message and not damage.is_refused and not damage.loses_records and name not in NEWEST_IS_LOST
    )
    assert examination.is_sound == is_harmless, examination.problems


REPAIRED = {
    name: DAMAGES[name]
    for name in ("run.json missing", "tokenizer.json cut off", "hints damaged", "files in a checkpoint")
}
REPAIRED["temporary folder"] = Damage(on("checkpoints/.tmp-step-00000006-1-a", Path.mkdir))


@pytest.mark.parametrize(
    "damage",
    [pytest.param(REPAIRED[name], id=name, marks=[] if "files" in name else pytest.mark.slow) for name in REPAIRED],
)
def test_doctor_repairs_what_it_says_and_records_it(damage: Damage, killed: Path) -> None:
    damage.apply(killed)
    promised, checkpoints = examine_run(killed).repairs, checkpoint_names(killed)
    done = repair_run(killed)
    after = examine_run(killed)
    assert promised and len(done) == len(promised) and RunMetadata.read(killed)["recovered"] == done
    assert after.is_sound and not after.repairs, after.problems
    assert checkpoint_names(killed) == checkpoints and repair_run(killed) == []


def checkpoint_names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_doctor_does_not_repair_what_a_resume_refuses(killed: Path, capsys: pytest.CaptureFixture) -> None:
    for checkpoint in (LATEST, OLDER):
        cut(killed / checkpoint / "model.safetensors")
    (killed / "run.json").unlink()
    before = snapshot(killed / "checkpoints")
    with pytest.raises(SystemExit) as error:
        doctor(DoctorConfig(run=str(killed), all=False, repair="true"))
    assert error.value.code == 1 and snapshot(killed / "checkpoints") == before
    printed = capsys.readouterr().out
    assert "blocks" in printed and "resume= refuses" in printed


@contextmanager
def held_lock(folder: Path) -> Iterator[None]:
    """Hold the lock in another process: a lock of this one would be seen as its own."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        FileLock.acquire(folder / ".lock")
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_doctor_names_the_process_that_trains_the_run(killed: Path) -> None:
    with held_lock(killed):
        examination = examine_run(killed)
        assert (
            examination.prediction.verdict is Verdict.REFUSES and severity_of(examination, ".lock") is Severity.BLOCKING
        )
        with pytest.raises(UserError, match="being trained"):
            repair_run(killed)


def test_doctor_says_that_initial_weights_are_gone(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config) -> None:
        raise UserError(f"{config.init_from} is gone", "init_from", "restore it")

    monkeypatch.setattr("runner.launch.doctor.restore_initial_weights", refuse)
    recorded = RunMetadata.read(killed)["init_from"]
    assert examine_run(killed).prediction.text == f"refuses: {recorded} is gone"


def severity_of(examination: Examination, file: str) -> Severity:
    return next(problem.severity for problem in examination.problems if problem.file == file)


@pytest.mark.slow
def test_doctor_finds_a_damaged_model_of_a_complete_run(uninterrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    assert (
        examine_run(folder).prediction.verdict is Verdict.COMPLETE
        and severity_of(examine_run(folder), "model") is Severity.SOUND
    )
    weights = folder / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert severity_of(examine_run(folder), "model") is Severity.DAMAGED
    cut(weights)
    assert severity_of(examine_run(folder), "model") is Severity.DAMAGED
    shutil.rmtree(folder / "model")
    assert severity_of(examine_run(folder), "model") is Severity.DAMAGED
    assert examine_run(folder).prediction.verdict is Verdict.CONTINUES


@pytest.mark.slow
def test_doctor_repairs_best_by_the_evaluation_after_the_save(uninterrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    fields = json.loads((folder / RUN_FILE).read_text())  # state.json of a checkpoint knows the evaluations before it
    (folder / RUN_FILE).write_text(json.dumps(fields | {"export": fields["export"] | {"weights": "best"}}))
    repair_run(folder)
    assert (folder / "checkpoints" / "best").read_text().strip() == f"step-{fields['step']:08d}"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["split", "ema"])
def test_doctor_takes_a_model_in_another_form_as_sound(uninterrupted: Path, tmp_path: Path, form: str) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    weights, run_file = folder / "model" / "model.safetensors", folder / RUN_FILE
    tensors = load_file(weights)
    name = max(tensors, key=lambda each: tensors[each].numel())
    if form == "split":  # as transformers saves experts
        first, second = tensors.pop(name).chunk(2)
        tensors |= {"first": first.contiguous(), "second": second.contiguous()}
    else:  # averages, beside frozen weights that are those of the checkpoint
        tensors[name] += 1
        fields = json.loads(run_file.read_text())
        run_file.write_text(json.dumps(fields | {"export": fields["export"] | {"weights": "ema"}}))
    save_file(tensors, weights)
    assert severity_of(examine_run(folder), "model") is Severity.SOUND


def test_doctor_says_why_a_resume_would_not_be_exact(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine_run(killed).prediction.inexact == []
    monkeypatch.setattr("runner.checkpoint.compatibility.cpu_model", lambda: "another processor")
    (reason,) = examine_run(killed).prediction.inexact
    assert "cpu_model" in reason and "another processor" in reason


def test_doctor_knows_the_build_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of the wheels of PyPI name no build: doctor reported every resume with CUDA as inexact."""
    from runner.launch import doctor as examine

    assert examine.torch_version() == torch.__version__
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n\n__version__ = '9.9.9+cu999'\ncuda = '13'\n"
    )
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert examine.torch_version() == "9.9.9+cu999"


def test_doctor_of_a_sweep_ends_with_the_command_that_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    doctor(DoctorConfig(run=str(tmp_path), all=False, repair="false"))
    assert capsys.readouterr().out.splitlines() == [
        f"sweep {tmp_path}: 0 of its jobs have begun; resume= continues all that are not finished",
        f"  {resume_command(tmp_path)}",
    ]
