"""Trackers: the registry, processes that fail without stopping training, and SwanLab's own files read back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.tracking import tracker_process
from runner.tracking.config import TRACKERS, TrackerConfig, require_package
from runner.tracking.logger import RunLogger
from runner.tracking.tracker_process import TrackerProcess

ROOT = Path(__file__).parents[2]
FAILS = "import sys; sys.stdin.readline(); raise RuntimeError('no account')"


@dataclass
class ProgramTracker(TrackerConfig):
    """A tracker as a plugin defines one; `program` is Python code."""

    program: str

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program] if self.program else ["./no-such-program"]


def start_logger(folder: Path, config: TrackerConfig, is_rank_zero: bool = True) -> RunLogger:
    logger = RunLogger(folder, config, is_rank_zero)
    logger.start({"run": str(folder)}, total_steps=20, attempt=1, run_config={"seed": 1}, resume_at=None, tracker_id=None)
    return logger


def log_steps(logger: RunLogger, steps: range) -> None:
    for step in steps:
        logger.log("train", step, epoch=0, tokens=step * 100, loss=3.0 / step, lr=5e-4)


def test_registry_lists_the_tracker_modules_without_importing_them() -> None:
    code = (
        "import sys; from runner.tracking.config import TRACKERS; print(TRACKERS.names()); assert not {'torch', 'swanlab', 'urllib.request'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['none', 'swanlab']"


def test_registry_refuses_an_unknown_tracker_and_suggests_a_known_one() -> None:
    with pytest.raises(UserError) as caught:
        TRACKERS.get("swanlabs")
    assert (caught.value.setting, caught.value.fix) == ("tracker=swanlabs", "did you mean swanlab?")


def test_tracker_none_has_no_settings_of_other_trackers() -> None:
    names = {name: {field.name for field in dataclasses.fields(TRACKERS.get(name))} for name in ("none", "swanlab")}
    assert names == {"none": {"name", "page", "console"}, "swanlab": {"name", "page", "console", "project", "mode"}}


def test_compose_selects_the_config_class_of_the_tracker() -> None:
    config = compose_config(["tracker=swanlab", "tracker.project=letters"]).tracker
    assert type(config) is TRACKERS.get("swanlab") and vars(config)["project"] == "letters"
    with pytest.raises(UserError, match="tracker.project is not read by tracker=none"):
        compose_config(["tracker=none", "tracker.project=letters"])


def test_missing_tracker_package_is_refused_with_its_install_command() -> None:
    with pytest.raises(UserError, match="not installed") as caught:
        require_package("no_such_package", extra="swanlab")
    assert "pip install 'lm-runner[swanlab]'" in caught.value.fix


def test_logger_on_other_ranks_writes_nothing_and_starts_no_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = start_logger(tmp_path, offline_swanlab(), is_rank_zero=False)
    log_steps(logger, range(1, 3))
    logger.samples(2, [{"prompt": "p", "answer": "a"}])
    logger.warning("not printed")
    assert logger.position() == {}
    logger.finish("completed", {})
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


@pytest.mark.parametrize("program", [FAILS, "import time; time.sleep(600)", ""], ids=["raises", "hangs", "is missing"])
def test_failing_tracker_costs_one_warning_and_no_step(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_process, "CLOSE_TIMEOUT", 0.5)
    monkeypatch.setattr(tracker_process, "QUEUE_SIZE", 50)
    logger = start_logger(tmp_path, ProgramTracker(name="program", page=False, console="plain", program=program))
    for step in range(1, 1001):  # more than the queue and the pipe of a hanging tracker hold
        logger.log("train", step, loss=1.0, filler=float(step))
    logger.finish("completed", {})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1000
    assert capsys.readouterr().out.count("warning: tracker:") == 1


def test_tracker_whose_folder_is_a_link_is_not_started(tmp_path: Path) -> None:
    messages: list[str] = []
    (tmp_path / "outside").mkdir()
    (tmp_path / "program").symlink_to("outside")
    process = TrackerProcess([sys.executable, "-c", FAILS], tmp_path / "program" / "tracker.log", messages.append, messages.append)
    process.start()
    process.finish("completed", "")
    assert "a link is not followed" in messages[0] and not any((tmp_path / "outside").iterdir())


def test_tracker_warning_contains_the_reason_of_the_tracker(tmp_path: Path) -> None:
    messages: list[str] = []
    process = TrackerProcess([sys.executable, "-c", FAILS], tmp_path / "tracker.log", messages.append, messages.append)
    process.start(name="run")
    process.finish("completed", "")
    assert len(messages) == 1 and "RuntimeError: no account" in messages[0]


def read_swanlab_records(folder: Path) -> list:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = (folder / "swanlab").glob("run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    records = []
    for content in reader:
        record = Record()
        record.ParseFromString(content)
        records.append(record)
    reader.close()
    return records


def offline_swanlab() -> TrackerConfig:
    return TRACKERS.get("swanlab")(name="swanlab", page=False, console="plain", project="test", mode="offline")  # type: ignore[call-arg]  # fields of the subclass


def test_swanlab_offline_files_contain_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    logger = start_logger(tmp_path, offline_swanlab())
    log_steps(logger, range(1, 6))
    logger.log("eval", 5, loss=float("nan"), perplexity=12.5)
    logger.samples(5, [{"prompt": "你好", "answer": "a made-up answer"}])
    logger.finish("failed", {"error": "the loss is not finite"})
    records = read_swanlab_records(tmp_path)
    losses = {record.scalar.step: record.scalar.value.number for record in records if record.HasField("scalar") and record.scalar.key == "train/loss"}
    assert losses == {step: 3.0 / step for step in range(1, 6)}
    keys = {record.scalar.key for record in records if record.HasField("scalar")}
    assert keys == {"train/epoch", "train/tokens", "train/loss", "train/lr", "eval/perplexity"}
    (text,) = (tmp_path / "swanlab").glob("run-*/media/text/*.txt")
    assert text.read_text() == "a made-up answer"
    assert records[0].start.id == logger.tracker_id
    (finish,) = (record.finish for record in records if record.HasField("finish"))
    assert finish.error == "the loss is not finite" and "CRASHED" in str(finish)


TRAINER = """
import os, signal, sys, time
from pathlib import Path
from test_trackers import log_steps, offline_swanlab, start_logger
folder = Path(sys.argv[1])
log_steps(start_logger(folder, offline_swanlab()), range(1, 21))
while "swanlab: offline" not in (folder / "train.log").read_text():
    time.sleep(0.05)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_swanlab_record_is_complete_after_a_kill_of_the_trainer(tmp_path: Path) -> None:
    """Inside the training process SwanLab would leave an empty file: it writes its buffer only when it finishes."""
    pytest.importorskip("swanlab")
    path = [str(ROOT), str(Path(__file__).parent)]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}{TRAINER}", str(tmp_path)], check=False, timeout=120)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(path.stat().st_size for path in tmp_path.glob("swanlab/run-*/*.swanlab")):
        time.sleep(0.1)
    time.sleep(0.2)
    records = read_swanlab_records(tmp_path)
    assert sum(record.HasField("scalar") and record.scalar.key == "train/loss" for record in records) == 20
    assert "CRASHED" in str(next(record.finish for record in records if record.HasField("finish")))
