"""The mouth of a run: what it writes is whole, what it shows is harmless, and nobody listening can stop it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.tracking import tracker_process
from runner.tracking.console import PlainConsole, RichConsole, strip_control
from runner.tracking.jsonl import JsonlLog
from runner.tracking.logger import RunLogger, TrackerConfig
from runner.tracking.tracker_process import TrackerProcess

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u2028end\x9b31m"


def config(name: str = "none", console: str = "plain") -> TrackerConfig:
    return TrackerConfig(name=name, project="test", mode="offline", console=console)


def started(folder: Path, attempt: int = 1, resume_at: dict[str, int] | None = None, **words: str) -> RunLogger:
    track = RunLogger(folder, config(**words))
    track.start({"run": str(folder)}, total_steps=20, attempt=attempt, run_config={"seed": 1}, resume_at=resume_at, tracker_id=None)
    return track


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def train(track: RunLogger, steps: range) -> None:
    for step in steps:
        track.log("train", step, epoch=0, tokens=step * 100, loss=3.0 / step, lr=5e-4)


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    track = started(tmp_path)
    track.log("train", 1, loss=float("nan"), lr=1e-3, grad_norm=float("inf"))
    track.log("train", 2, loss=1.0, lr=1e-3, grad_norm=0.5)
    track.finish("completed", {})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["loss"] is None and first["grad_norm"] is None and first["nonfinite"] == ["loss", "grad_norm"]
    assert "nonfinite" not in second


def test_fields_stand_in_the_order_they_were_given(tmp_path: Path) -> None:
    track = started(tmp_path)
    track.log("train", 10, epoch=0, tokens=40960, loss=3.2, lr=4e-4, grad_norm=0.8, tokens_per_second=41000.0)
    track.finish("completed", {})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line) == ["kind", "step", "epoch", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "time", "attempt"]


def test_after_two_resumes_every_step_stands_once(tmp_path: Path) -> None:
    track = started(tmp_path)
    train(track, range(1, 6))
    track.samples(5, [{"prompt": "5", "answer": "five"}])
    saved = track.position()
    train(track, range(6, 10))
    track.samples(9, [{"prompt": "9", "answer": "lost"}])
    train(started(tmp_path, 2, saved), range(6, 8))  # neither attempt ends properly
    with open(tmp_path / "metrics.jsonl", "ab") as torn:
        torn.write(b'{"kind": "tra')
    track = started(tmp_path, 3, saved)
    train(track, range(6, 11))
    track.finish("completed", {})

    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    assert [line["attempt"] for line in lines(tmp_path / "metrics.jsonl")] == [1] * 5 + [3] * 5
    assert [line["step"] for line in lines(tmp_path / "metrics.attempt1.jsonl")] == [6, 7, 8, 9]
    kept_aside = (tmp_path / "metrics.attempt2.jsonl").read_text()
    assert kept_aside.count("\n") == 2 and kept_aside.endswith('{"kind": "tra')
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [5]
    assert [line["answer"] for line in lines(tmp_path / "samples.attempt1.jsonl")] == ["lost"]


def test_an_older_checkpoint_sorts_the_tail_by_attempt(tmp_path: Path) -> None:
    track = started(tmp_path)
    train(track, range(1, 3))
    older = track.position()
    train(track, range(3, 5))
    newer = track.position()
    train(started(tmp_path, 2, newer), range(5, 7))
    started(tmp_path, 3, older)
    assert [line["step"] for line in lines(tmp_path / "metrics.attempt1.jsonl")] == [3, 4]
    assert [line["step"] for line in lines(tmp_path / "metrics.attempt2.jsonl")] == [5, 6]


def test_lines_kept_aside_twice_stand_there_once(tmp_path: Path) -> None:
    """A kill between keeping the tail aside and cutting it off brings the next attempt to the same tail."""
    train(started(tmp_path), range(1, 4))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    started(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    started(tmp_path, 3)
    assert (tmp_path / "metrics.attempt1.jsonl").read_bytes() == whole


def test_a_file_that_lost_lines_is_refused_by_name(tmp_path: Path) -> None:
    track = started(tmp_path)
    train(track, range(1, 4))
    saved = track.position()
    os.truncate(tmp_path / "metrics.jsonl", 10)
    with pytest.raises(ValueError) as refusal:
        started(tmp_path, 2, saved)
    what, where, _ = refusal.value.args
    assert "metrics.jsonl ends at byte 10" in what and where == str(tmp_path / "metrics.jsonl")


def test_a_full_disk_leaves_no_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    track = started(tmp_path)
    real_write = JsonlLog._write
    monkeypatch.setattr(JsonlLog, "_write", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    train(track, range(1, 4))
    with pytest.raises(OSError):
        track.position()
    monkeypatch.setattr(JsonlLog, "_write", real_write)
    train(track, range(4, 6))
    track.finish("completed", {})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_a_pipe_gets_plain_lines_without_control_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track = started(tmp_path, console="auto")
    track.log("train", 1, epoch=0, tokens=99, loss=3.5, lr=4.9e-4, grad_norm=0.812, tokens_per_second=41_200.0)
    track.log("eval", 1, loss=3.5, perplexity=33.1)
    track.log("train", 2, epoch=0, tokens=99, loss=3.412, lr=4.9e-4, grad_norm=0.812, tokens_per_second=41_200.0)
    track.finish("completed", {"loss": 3.412})
    out = capsys.readouterr().out
    assert "step 1/20 5.0% | loss 3.500 | lr 4.9e-04 | gnorm 0.81 | 41.2k tok/s\n" in out
    assert "step 2/20 10.0% | loss 3.412 | val 3.50@1 | lr 4.9e-04 | gnorm 0.81 | 41.2k tok/s | eta 00:00:00\n" in out
    assert "\x1b" not in out and "\r" not in out
    assert (tmp_path / "train.log").read_text() == out


@pytest.mark.parametrize("console", ["plain", "rich"])
def test_hostile_text_reaches_no_terminal(tmp_path: Path, console: str, capsys: pytest.CaptureFixture[str]) -> None:
    track = started(tmp_path, console=console)
    track.samples(1, [{"prompt": "[bold red]你好[/]", "answer": HOSTILE + "\udcff"}])
    track.finish("completed", {})
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out and "\x1b]0;" not in out and "\x07" not in out and "\u202e" not in out and "\x9b" not in out
    assert "[bold red]你好[/]" in out and "\\x1b[2J" in out
    (line,) = lines(tmp_path / "samples.jsonl")
    assert line["answer"] == HOSTILE + "\udcff"


def test_cleaning_leaves_ordinary_text_alone() -> None:
    assert strip_control("小红 likes\ttea.\n2 + 2 = 4 é 🙂") == "小红 likes\ttea.\n2 + 2 = 4 é 🙂"


def test_a_console_that_cannot_say_it_or_went_away_stops_nothing() -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainConsole(ascii_only).say("你好")
    ascii_only.seek(0)
    assert ascii_only.read() == "\\u4f60\\u597d\n"
    gone = io.StringIO()
    gone.close()
    PlainConsole(gone).say("anyone there?")


def test_on_eighty_columns_the_bar_gives_way_and_the_numbers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    bar = RichConsole(stream)
    bar.begin(20_000)
    numbers = "loss 3.412 | lr 4.9e-04 | 41.2k tok/s | eta 00:18:20"
    bar.progress(5000, f"step 5000/20000 25.0% | {numbers}", numbers)
    bar.say("validation")
    bar.end()
    assert numbers in stream.getvalue() and "5000/20000 " in stream.getvalue() and "validation" in stream.getvalue()


def test_a_rank_that_does_not_lead_leaves_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track = RunLogger(tmp_path, config("swanlab"), leads=False)
    track.start({"a": 1}, total_steps=2, attempt=1, run_config={}, resume_at=None, tracker_id=None)
    train(track, range(1, 3))
    track.samples(2, [{"prompt": "p", "answer": "a"}])
    track.warn("nobody hears this")
    assert track.position() == {}
    track.finish("completed", {})
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


PROGRAMS = {
    "raises": "import sys; sys.stdin.readline(); raise RuntimeError('no account')",
    "hangs": "import time; time.sleep(600)",
    "is_missing": None,
}


@pytest.mark.parametrize("trouble", PROGRAMS)
def test_a_tracker_in_trouble_costs_one_warning_and_no_step(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_process, "CLOSE_TIMEOUT", 1.0)
    monkeypatch.setattr(tracker_process, "QUEUE_LINES", 50)
    program = tmp_path / "tracker.py"
    program.write_text(PROGRAMS[trouble] or "")
    monkeypatch.setitem(tracker_process.TRACKER_PROGRAMS, "swanlab", program)
    if PROGRAMS[trouble] is None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    track = started(tmp_path, name="swanlab")
    begin = time.monotonic()
    for step in range(1, 2001):
        track.log("train", step, loss=1.0, words=float(step))
    assert time.monotonic() - begin < 5  # a hanging tracker is not waited for: 2,000 lines fill the queue and the pipe
    track.finish("completed", {})
    assert len(lines(tmp_path / "metrics.jsonl")) == 2000
    assert capsys.readouterr().out.count("warning: tracker:") == 1


def test_the_reason_a_tracker_gave_is_in_the_warning(tmp_path: Path) -> None:
    said: list[str] = []
    failing = TrackerProcess([sys.executable, "-c", PROGRAMS["raises"]], tmp_path / "mirror.log", said.append, said.append)
    failing.start(name="run")
    failing.finish("completed", "")
    assert len(said) == 1 and "RuntimeError: no account" in said[0]


# -- SwanLab itself, offline: what it wrote is read back with its own reader ---------------------------------------------------------


def swanlab_records(folder: Path) -> list:
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


def test_swanlab_offline_holds_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    track = started(tmp_path, name="swanlab")
    train(track, range(1, 6))
    track.log("eval", 5, loss=float("nan"), perplexity=12.5)
    track.samples(5, [{"prompt": "你好", "answer": "a made-up answer"}])
    track.finish("failed", {"error": "the loss went away"})
    records = swanlab_records(tmp_path)
    losses = {record.scalar.step: record.scalar.value.number for record in records if record.HasField("scalar") and record.scalar.key == "train/loss"}
    assert losses == {step: 3.0 / step for step in range(1, 6)}
    keys = {record.scalar.key for record in records if record.HasField("scalar")}
    assert keys == {"train/epoch", "train/tokens", "train/loss", "train/lr", "eval/perplexity"}
    (text,) = (tmp_path / "swanlab").glob("run-*/media/text/*.txt")
    assert text.read_text() == "a made-up answer"
    assert records[0].start.id == track.tracker_id
    (finish,) = (record.finish for record in records if record.HasField("finish"))
    assert finish.error == "the loss went away" and "CRASHED" in str(finish)


def test_swanlab_survives_a_kill_of_the_trainer(tmp_path: Path) -> None:
    """SwanLab in the training process would leave an empty file here: it writes out its buffer only when it finishes."""
    pytest.importorskip("swanlab")
    trainer = (
        "import os, signal, time; from pathlib import Path; from tests.engine.test_track import started, train\n"
        f"folder = Path({str(tmp_path)!r}); track = started(folder, name='swanlab'); train(track, range(1, 21))\n"
        "while 'swanlab: offline' not in (folder / 'train.log').read_text(): time.sleep(0.05)\n"
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", trainer], check=False, cwd=Path(__file__).parents[2], timeout=60)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not any(path.stat().st_size for path in tmp_path.glob("swanlab/run-*/*.swanlab")):
        time.sleep(0.1)
    time.sleep(0.2)
    records = swanlab_records(tmp_path)
    assert sum(record.HasField("scalar") and record.scalar.key == "train/loss" for record in records) == 20
    assert "CRASHED" in str(next(record.finish for record in records if record.HasField("finish")))
