"""doctor.py: what it says resume= would do with a damaged run is what resume= does, and what it repairs is sound afterwards."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from trainee import OVERRIDES, write_rows

from common.errors import UserError
from common.file_lock import FileLock
from runner.engine.verify_resume import diff_run_dirs
from runner.fault_injection.launches import import_heavy_libraries, launch_fork
from runner.recovery.doctor.config import DoctorConfig
from runner.recovery.doctor.examine import Examination, doctor, examine_run, repair_run
from runner.recovery.doctor.prediction import Verdict
from runner.recovery.finding import Severity
from runner.run_dir.metadata import RunMetadata

STOPPED_AT, STEPS = 3, 5
NEWEST, PREVIOUS = "checkpoints/step-00000003", "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `complete`, and `stopped`: the same run, stopped after step 3 of 5."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    import_heavy_libraries()
    folder = tmp_path_factory.mktemp("runs")
    write_rows(folder)
    for name, prepare in (("complete", lambda: None), ("stopped", stop_at_step)):
        argv = [
            *OVERRIDES,
            f"train.max_steps={STEPS}",
            f"data.path={folder / 'rows.jsonl'}",
            f"data.cache={folder / 'cache'}",
            f"hydra.run.dir={folder / name}",
        ]
        train(argv, folder / f"{name}.txt", prepare)
    return folder


def stop_at_step() -> None:
    """In the child: send SIGTERM before step STOPPED_AT ends."""
    from runner.engine import loop

    step_with_retries = loop.step_with_retries

    def stopping_step(state, *args):
        if state.progress.step == STOPPED_AT - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_with_retries(state, *args)

    loop.step_with_retries = stopping_step


def train(argv: list[str], output: Path, prepare: Callable[[], object] = lambda: None) -> int | None:
    launch = launch_fork(argv, output, prepare)
    launch.wait(120)
    return launch.code


@pytest.fixture
def run_dir(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "stopped", tmp_path / "run"))


def cut(name: str, size: int = 10) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def delete(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def link(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return replace


def flip(name: str) -> Callable[[Path], None]:
    def flip_bit(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return flip_bit


def flip_all(folder: Path) -> None:
    for file in folder.glob("checkpoints/*/model.safetensors"):
        flip(str(file.relative_to(folder)))(folder)


# (damage, what resume= does, step where it continues)
DAMAGES: dict[str, tuple[Callable[[Path], object], Verdict, int]] = {
    "sound": (lambda folder: None, Verdict.CONTINUES, 3),
    "metrics missing": (delete("metrics.jsonl"), Verdict.CONTINUES, 3),
    "metrics cut": (cut("metrics.jsonl", 100), Verdict.CONTINUES, 3),
    "run.json missing": (delete("run.json"), Verdict.CONTINUES, 3),
    "run.json cut": (cut("run.json"), Verdict.CONTINUES, 3),
    "config missing": (delete(".hydra/config.yaml"), Verdict.CONTINUES, 3),
    "overrides cut": (cut(".hydra/overrides.yaml"), Verdict.CONTINUES, 3),
    "conf missing": (delete(".hydra/conf"), Verdict.CONTINUES, 3),
    "newest checkpoint flipped": (flip(f"{NEWEST}/optimizer.safetensors"), Verdict.CONTINUES, 2),
    "newest checkpoint without manifest": (delete(f"{NEWEST}/MANIFEST.json"), Verdict.CONTINUES, 2),
    "newest checkpoint missing": (delete(NEWEST), Verdict.CONTINUES, 2),
    "all checkpoints flipped": (flip_all, Verdict.REFUSES, 0),
    "checkpoints missing": (delete("checkpoints"), Verdict.REFUSES, 0),
    "foreign file in a checkpoint": (write(f"{NEWEST}/.DS_Store", "x"), Verdict.CONTINUES, 3),
    "temporary folder": (lambda folder: (folder / "checkpoints" / ".tmp-step-00000004-1-a").mkdir(), Verdict.CONTINUES, 3),
    "latest missing": (delete("checkpoints/latest"), Verdict.CONTINUES, 3),
    "link as metrics": (link("metrics.jsonl"), Verdict.REFUSES, 0),
    "link as checkpoints": (link("checkpoints"), Verdict.REFUSES, 0),
    "tokenizer missing": (delete("tokenizer/tokenizer.json"), Verdict.CONTINUES, 3),
    "tokenizer flipped": (flip("tokenizer/tokenizer.json"), Verdict.CONTINUES, 3),
    "config of another run": (lambda folder: edit(folder / ".hydra/config.yaml", "seed: 42", "seed: 7"), Verdict.REFUSES, 0),
    "data moved": (lambda folder: edit(folder / ".hydra/config.yaml", "rows.jsonl", "gone.jsonl"), Verdict.REFUSES, 0),
}
FAST = {"sound", "run.json cut", "all checkpoints flipped"}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in DAMAGES])
def test_doctor_predicts_what_a_resume_does(name: str, runs: Path, run_dir: Path) -> None:
    damage, verdict, step = DAMAGES[name]
    damage(run_dir)
    before = snapshot(run_dir)
    examination = examine_run(run_dir)
    assert snapshot(run_dir) == before, "an examination changes nothing"
    assert (examination.prediction.verdict, examination.prediction.step) == (verdict, step), examination
    assert examination.is_sound == (name in ("sound", "foreign file in a checkpoint", "temporary folder", "latest missing")), examination.findings
    output = run_dir.parent / "output.txt"
    code = train([f"resume={run_dir}"], output)
    text = output.read_text()
    assert "Traceback" not in text, text
    if verdict is Verdict.REFUSES:
        assert code == 2, text
        return
    assert code == 0 and f"at step {step} (attempt 2)" in text, text
    lost = ["metrics"] if name.startswith("metrics") else []
    assert [difference for difference in diff_run_dirs(runs / "complete", run_dir) if not difference.startswith(tuple(lost) or ("-",))] == []
    assert (RunMetadata.read(run_dir)["exact"] is True) == (not examination.prediction.inexact)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "name", ["run.json missing", "config missing", "tokenizer flipped", "latest missing", "temporary folder", "foreign file in a checkpoint"]
)
def test_doctor_repairs_what_it_says_and_records_it(name: str, run_dir: Path) -> None:
    DAMAGES[name][0](run_dir)
    promised = examine_run(run_dir).repairs
    assert promised
    checkpoints = checkpoint_names(run_dir)
    done = repair_run(run_dir)
    after = examine_run(run_dir)
    assert after.is_sound and not after.repairs, after.findings
    assert len(done) == len(promised) and RunMetadata.read(run_dir)["recovered"] == done
    assert checkpoint_names(run_dir) == checkpoints and repair_run(run_dir) == []


def checkpoint_names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_doctor_does_not_repair_what_a_resume_refuses(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    flip_all(run_dir)
    (run_dir / "run.json").unlink()
    before = snapshot(run_dir / "checkpoints")
    with pytest.raises(SystemExit) as error:
        doctor(DoctorConfig(run=str(run_dir), all=False, repair="true"))
    assert error.value.code == 1 and snapshot(run_dir / "checkpoints") == before
    assert "blocks" in capsys.readouterr().out


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


def test_doctor_names_the_process_that_trains_the_run(run_dir: Path) -> None:
    with held_lock(run_dir):
        examination = examine_run(run_dir)
        assert examination.prediction.verdict is Verdict.REFUSES and severity_of(examination, ".lock") is Severity.BLOCKING
        with pytest.raises(UserError, match="being trained"):
            repair_run(run_dir)


def severity_of(examination: Examination, file: str) -> Severity:
    return next(finding.severity for finding in examination.findings if finding.file == file)


def test_doctor_finds_a_damaged_model_of_a_complete_run(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "complete", tmp_path / "run"))
    assert examine_run(folder).prediction.verdict is Verdict.COMPLETE and severity_of(examine_run(folder), "model") is Severity.SOUND
    cut("model/model.safetensors", 5000)(folder)
    assert severity_of(examine_run(folder), "model") is Severity.DAMAGED
    shutil.rmtree(folder / "model")
    assert severity_of(examine_run(folder), "model") is Severity.DAMAGED


def test_doctor_says_why_a_resume_would_not_be_exact(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.recovery.doctor import prediction

    assert examine_run(run_dir).prediction.inexact == []
    monkeypatch.setattr(prediction, "cpu_model", lambda: "another processor")
    (reason,) = examine_run(run_dir).prediction.inexact
    assert "cpu_model" in reason and "another processor" in reason
