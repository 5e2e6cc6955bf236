"""What the trackers write without a network, read back by their own readers: the same values as metrics.jsonl, each
once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_trackers import ROOT, log_steps, offline_tracker

from runner.reporting.command import replay
from runner.tracking import tracker_process
from runner.tracking.jsonl import SavedLogs
from runner.tracking.logger import RunLogger
from runner.tracking.trackers.program import Experiment
from runner.tracking.trackers.tensorboard import TensorboardLog

KEY = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "optimizer": {"lr": 5e-4, "name": "adamw"},
    "seed": 1,
    "run": {"name": "letters\x1b", "tags": ["a", "b"], "note": "<script>"},
}
Points = dict[str, list[tuple[int, float]]]  # <kind>/<name> -> (step, value) in the order of the file


def logged_points(run: Path) -> Points:
    points: Points = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("kind", "step", "time", "attempt", "nonfinite") and value is not None:
                points.setdefault(f"{record['kind']}/{name}", []).append((record["step"], value))
    return points


def swanlab_records(run: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = (run / "swanlab").glob("run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    records = []
    for content in reader:
        record = Record()
        record.ParseFromString(content)
        records.append(record)
    reader.close()
    return records


def swanlab_points(run: Path) -> Points:
    points: Points = {}
    for record in swanlab_records(run):
        if record.HasField("scalar"):
            points.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return points


def wandb_records(run: Path) -> list[dict[str, Any]]:
    """Return the records that wandb's own program reads."""
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", path], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_points(run: Path) -> Points:
    points: Points = {}
    for record in wandb_records(run):
        if record["type"] == "history":
            history = record["history"]
            for name, value in history["item"].items():
                if name.startswith(("train/", "eval/")):
                    points.setdefault(name, []).append((history["step"]["num"], value))
    return points


def tensorboard_reader(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def tensorboard_points(run: Path) -> Points:
    reader = tensorboard_reader(run)
    points = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    return {tag: values for tag, values in points.items() if values}  # empty: all were of steps that the resume repeats


def as_float32(points: Points) -> Points:
    return {
        name: [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in values]
        for name, values in points.items()
    }


def start_attempt(run: Path, attempt: int, resume_at: dict[str, int] | None, tracker_id: str | None) -> RunLogger:
    logger = RunLogger(run, offline_tracker("wandb", "tensorboard", "swanlab"))
    logger.start(
        {},
        total_steps=20,
        attempt=attempt,
        run_config=CONFIG,
        saved=resume_at and SavedLogs(positions=resume_at),
        tracker_id=tracker_id,
    )
    return logger


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three trackers that is killed after step 6, and resumed from its checkpoint of step 4, which was saved
    before its evaluation.
    """
    run = tmp_path_factory.mktemp("runs") / "11-22" / "10-00"
    run.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker_process, "CLOSE_TIMEOUT", 120.0)
        patch.setenv("HOME", str(run.parent))
        for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY"):
            patch.setenv(variable, KEY)
        logger = start_attempt(run, 1, None, None)
        log_steps(logger, range(1, 5))
        position = logger.position()
        logger.log("eval", 4, loss=2.5, perplexity=math.exp(2.5))
        logger.samples(4, [{"prompt": "not kept", "answer": "not kept"}])
        log_steps(logger, range(5, 7))
        logger.finish("failed", error="killed")
        assert logger.tracker_id
        logger = start_attempt(run, 2, position, logger.tracker_id)
        logger.log("eval", 4, loss=float("nan"), perplexity=12.5)
        log_steps(logger, range(5, 9))
        logger.samples(8, [{"prompt": "你好<b>", "answer": "# a made-up\nanswer\x1b"}])
        logger.finish("completed")
        (run / "run.json").write_text(
            json.dumps({"status": "completed", "outcome": "completed", "id": "0123", "tracker_id": logger.tracker_id})
        )
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text(
        json.dumps(CONFIG | {"tracker": {"name": "wandb", "project": "letters"}})
    )
    return run


READERS = {"swanlab": swanlab_points, "wandb": wandb_points, "tensorboard": tensorboard_points}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_offline_values_of_a_resumed_run_equal_metrics_jsonl(name: str, resumed_run: Path) -> None:
    expected = logged_points(resumed_run)
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8] and "eval/loss" not in expected
    assert READERS[name](resumed_run) == (as_float32(expected) if name == "tensorboard" else expected)


@pytest.mark.slow
def test_swanlab_record_has_the_settings_samples_and_end_of_the_run(resumed_run: Path) -> None:
    records = swanlab_records(resumed_run)
    start = records[0].start
    assert (start.id, start.name, list(start.tags), start.project) == (
        tracker_id(resumed_run),
        "letters\\x1b",
        ["a", "b"],
        "test",
    )
    assert [path.read_text() for path in (resumed_run / "swanlab").glob("run-*/media/text/*.txt")] == [
        "# a made-up\nanswer\\x1b"
    ]
    (config,) = (resumed_run / "swanlab").glob("run-*/files/config.yaml")
    assert "0.0005" in config.read_text()
    assert "FINISHED" in str(next(record.finish for record in records if record.HasField("finish")))


@pytest.mark.slow
def test_wandb_record_has_the_settings_samples_and_end_of_the_run(resumed_run: Path) -> None:
    records = wandb_records(resumed_run)
    run = next(record["run"] for record in records if record["type"] == "run")
    names = ("run_id", "display_name", "project", "tags", "notes")
    assert [run[name] for name in names] == [tracker_id(resumed_run), "letters\\x1b", "test", ["a", "b"], "<script>"]
    assert run["config"]["update"]["optimizer"] == CONFIG["optimizer"]
    (text,) = (resumed_run / "wandb").glob("offline-run-*/files/media/html/*.html")
    assert "你好&lt;b&gt;" in text.read_text() and "# a made-up\nanswer\\x1b" in text.read_text()
    assert next(record["exit"] for record in records if record["type"] == "exit").get("exit_code", 0) == 0


@pytest.mark.slow
def test_tensorboard_files_have_the_settings_samples_and_end_of_the_run(resumed_run: Path) -> None:
    # the one of the server; the other keeps all texts
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    reader = EventAccumulator(str(resumed_run / "tensorboard"), tensor_size_guidance={"text": 0})
    reader.Reload()
    texts = {
        tag: [(event.step, list(event.tensor_proto.string_val)) for event in reader.Tensors(tag)]
        for tag in ("samples", "settings", "status")
    }
    assert texts["samples"] == [(8, ["    你好<b>\n     -> # a made-up\n    answer\\x1b".encode()])]
    assert [step for step, _ in texts["settings"]] == [0, 4] and b"    optimizer.lr: 0.0005" in texts["settings"][0][1][
        0
    ]
    assert texts["status"] == [(8, [b"    completed"])]
    hparams = parse_session_start_info_plugin_data(
        reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).hparams
    assert hparams["optimizer.lr"].number_value == 5e-4 and hparams["seed"].number_value == 1


@pytest.mark.slow
def test_tracker_files_have_no_key_and_no_link(resumed_run: Path) -> None:
    files = [path for path in resumed_run.rglob("*") if not path.is_dir()]
    assert not [path for path in files if path.is_symlink()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_second_replay_replaces_the_first(
    name: str, resumed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "11-22" / "copy"
    shutil.copytree(resumed_run, run, ignore=shutil.ignore_patterns("tensorboard"))  # the others are there once already
    for _ in range(2 if name == "tensorboard" else 1):
        replay(run, name)
    expected = logged_points(run)
    assert READERS[name](run) == (as_float32(expected) if name == "tensorboard" else expected)
    if name == "swanlab":
        assert swanlab_records(run)[0].start.project == "letters" and swanlab_records(run)[0].start.id == tracker_id(
            run
        )


def tracker_id(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["tracker_id"]


TRAINER = """
import os, signal, sys, time
from pathlib import Path
from test_trackers import log_steps, offline_tracker, start_logger
folder = Path(sys.argv[1])
log_steps(start_logger(folder, offline_tracker("swanlab", "wandb", "tensorboard")), range(1, 21))
while (folder / "train.log").read_text().count(": offline") < 2:
    time.sleep(0.05)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_records_are_complete_after_a_kill_of_the_trainer(tmp_path: Path) -> None:
    """Inside the training process SwanLab would leave an empty file: it writes its buffer only when it finishes."""
    path = [str(ROOT), str(Path(__file__).parent)]
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}{TRAINER}", str(tmp_path)],
        check=False,
        timeout=500,
        env=environment,
    )
    for name in READERS:  # the lock is free when the tracker's process has ended
        with open(tmp_path / name / ".lock", "rb+") as lock:
            wait_for_lock(lock.fileno())
    assert all(len(read(tmp_path)["train/loss"]) == 20 for read in READERS.values())
    assert "CRASHED" in str(next(record.finish for record in swanlab_records(tmp_path) if record.HasField("finish")))
    assert next(record["exit"]["exit_code"] for record in wandb_records(tmp_path) if record["type"] == "exit") == 1


def wait_for_lock(fd: int) -> None:
    import fcntl

    fcntl.lockf(fd, fcntl.LOCK_EX)


def test_tensorboard_reader_that_is_open_sees_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """The first attempt reaches step 3, the second resumes after step 2, of which only the training record was logged
    before the checkpoint.
    """
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    experiment = Experiment(
        folder=folder, id="abc", name="n", project="", mode="offline", config={"seed": 1, "plugins": []}
    )
    first = TensorboardLog(experiment)
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.25)):
        first.log("train", step, {"loss": loss})
    first.log("eval", 2, {"loss": 7.0})
    first._writer.flush()
    reader = tensorboard_reader(tmp_path)
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n" for step, loss in ((1, 3.0), (2, 2.5)))
    )
    second = TensorboardLog(dataclasses.replace(experiment, history={"metrics": 1000, "samples": 0}))
    assert second.history_from == 2
    second.log("train", 2, {"loss": 2.5})  # what run_program sends from the history
    second.log("eval", 2, {"loss": 8.0})
    second.log("train", 3, {"loss": 0.5})
    second.finish("completed", "")
    reader.Reload()
    for points in (
        tensorboard_points(tmp_path),
        {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in ("train/loss", "eval/loss")},
    ):
        assert points == {"train/loss": [(1, 3.0), (2, 2.5), (3, 0.5)], "eval/loss": [(2, 8.0)]}
