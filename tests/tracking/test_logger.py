"""RunLogger: files without gaps after errors and resumes, console output without control codes."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path

import pytest

from common.errors import strip_control
from runner.tracking.bar import BarConsole
from runner.tracking.config import TrackerConfig
from runner.tracking.jsonl import SavedLogs
from runner.tracking.lines import Console, LineConsole
from runner.tracking.logger import RunLogger
from runner.tracking.progress import EvaluationProgress

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u2028end\x9b31m"


def start_logger(
    folder: Path, attempt: int = 1, resume_at: dict[str, int] | None = None, console: str = "plain"
) -> RunLogger:
    logger = RunLogger(folder, TrackerConfig(name="none", page=False, console=console))
    logger.start(
        {"run": str(folder)},
        total_steps=20,
        attempt=attempt,
        run_config={"seed": 1},
        saved=None if resume_at is None else SavedLogs(positions=resume_at),
        tracker_id=None,
    )
    return logger


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def log_steps(logger: RunLogger, steps: range) -> None:
    for step in steps:
        logger.log("train", step, epoch=0, tokens=step * 100, loss=3.0 / step, lr=5e-4)


def test_log_writes_nonfinite_numbers_as_null_and_names_them(tmp_path: Path) -> None:
    logger = start_logger(tmp_path)
    logger.log("train", 1, loss=float("nan"), lr=1e-3, grad_norm=float("inf"))
    logger.log("train", 2, loss=1.0, lr=1e-3, grad_norm=0.5)
    logger.finish("completed")
    first, second = read_records(tmp_path / "metrics.jsonl")
    assert first["loss"] is None and first["grad_norm"] is None and first["nonfinite"] == ["loss", "grad_norm"]
    assert "nonfinite" not in second


def test_log_keeps_the_given_order_of_fields(tmp_path: Path) -> None:
    logger = start_logger(tmp_path)
    logger.log("train", 10, epoch=0, tokens=40960, loss=3.2, lr=4e-4, grad_norm=0.8, tokens_per_second=41000.0)
    logger.finish("completed")
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert list(record) == [
        "kind",
        "step",
        "epoch",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "time",
        "attempt",
    ]


def test_metrics_contain_every_step_once_after_two_resumes(tmp_path: Path) -> None:
    logger = start_logger(tmp_path)
    log_steps(logger, range(1, 6))
    logger.samples(5, [{"prompt": "5", "answer": "five"}])
    saved = logger.position()
    log_steps(logger, range(6, 10))
    logger.samples(9, [{"prompt": "9", "answer": "lost"}])
    log_steps(start_logger(tmp_path, 2, saved), range(6, 8))  # neither attempt is finished
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "tra')
    logger = start_logger(tmp_path, 3, saved)
    log_steps(logger, range(6, 11))
    logger.finish("completed")

    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    assert [record["attempt"] for record in read_records(tmp_path / "metrics.jsonl")] == [1] * 5 + [3] * 5
    assert [record["step"] for record in read_records(tmp_path / "metrics.attempt1.jsonl")] == [6, 7, 8, 9]
    archived = (tmp_path / "metrics.attempt2.jsonl").read_text()
    assert archived.count("\n") == 2 and archived.endswith('{"kind": "tra')
    assert [record["step"] for record in read_records(tmp_path / "samples.jsonl")] == [5]
    assert [record["answer"] for record in read_records(tmp_path / "samples.attempt1.jsonl")] == ["lost"]


def test_resume_from_older_checkpoint_archives_records_by_attempt(tmp_path: Path) -> None:
    logger = start_logger(tmp_path)
    log_steps(logger, range(1, 3))
    older = logger.position()
    log_steps(logger, range(3, 5))
    newer = logger.position()
    log_steps(start_logger(tmp_path, 2, newer), range(5, 7))
    start_logger(tmp_path, 3, older)
    assert [record["step"] for record in read_records(tmp_path / "metrics.attempt1.jsonl")] == [3, 4]
    assert [record["step"] for record in read_records(tmp_path / "metrics.attempt2.jsonl")] == [5, 6]


def test_archive_has_no_duplicates_after_a_kill_before_truncation(tmp_path: Path) -> None:
    log_steps(start_logger(tmp_path), range(1, 4))
    content = (tmp_path / "metrics.jsonl").read_bytes()
    start_logger(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_bytes(content)  # as if attempt 2 had been killed between archive and truncation
    start_logger(tmp_path, 3)
    assert (tmp_path / "metrics.attempt1.jsonl").read_bytes() == content


def test_log_retries_records_that_a_full_disk_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = start_logger(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))  # bytes: the first record does not fit
    try:
        log_steps(logger, range(1, 4))
        with pytest.raises(OSError):
            logger.position()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log_steps(logger, range(4, 6))
    logger.finish("completed")
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written") == 1


def test_console_prints_plain_lines_into_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = start_logger(tmp_path, console="auto")
    logger.log(
        "train",
        1,
        epoch=0,
        loss_tokens=99,
        tokens=120,
        loss=3.5,
        lr=4.9e-4,
        grad_norm=0.812,
        tokens_per_second=41_200.0,
    )
    logger.log("eval", 1, loss=3.5, perplexity=33.1)
    logger.log(
        "train",
        2,
        epoch=0,
        loss_tokens=99,
        tokens=120,
        loss=3.412,
        lr=4.9e-4,
        grad_norm=0.812,
        tokens_per_second=41_200.0,
    )
    logger.finish("completed")
    out = capsys.readouterr().out
    assert "step 1/20 5.0% | loss 3.500 | lr 4.9e-04 | gnorm 0.81 | 41.2k tok/s\n" in out
    assert "step 2/20 10.0% | loss 3.412 | val 3.50@1 | lr 4.9e-04 | gnorm 0.81 | 41.2k tok/s | eta 00:00:00\n" in out
    assert "\x1b" not in out and "\r" not in out
    assert (tmp_path / "train.log").read_text() == out


def test_progress_bar_has_the_numbers_of_the_log_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, str, str]] = []
    logger = start_logger(tmp_path, console="plain")
    monkeypatch.setattr(logger._console, "show", lambda name, event, *text: shown.append((event["step"], *text)))
    logger.log(
        "train",
        7,
        epoch=0,
        loss_tokens=99,
        tokens=120,
        loss=3.4567,
        lr=4.9e-4,
        grad_norm=0.812,
        tokens_per_second=41_249.0,
    )
    monkeypatch.undo()
    logger.finish("completed")
    [(step, line, numbers)] = shown
    assert step == 7 and numbers == "loss 3.457 | lr 4.9e-04 | 41.2k tok/s"
    assert (
        all(part in line.split(" | ") for part in numbers.split(" | "))
        and read_records(tmp_path / "metrics.jsonl")[0]["tokens_per_second"] == 41_249.0
    )


@pytest.mark.parametrize("console", ["plain", "rich"])
def test_console_escapes_control_characters_of_samples(
    tmp_path: Path, console: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = start_logger(tmp_path, console=console)
    logger.samples(1, [{"prompt": "[bold red]你好[/]", "answer": HOSTILE + "\udcff"}])
    logger.finish("completed")
    out = capsys.readouterr().out
    assert not [code for code in ("\x1b[2J", "\x1b]0;", "\x07", "\u202e", "\x9b") if code in out]
    assert "[bold red]你好[/]" in out and "\\x1b[2J" in out
    (record,) = read_records(tmp_path / "samples.jsonl")
    assert record["answer"] == HOSTILE + "\udcff"


def test_strip_control_keeps_ordinary_text() -> None:
    assert strip_control("小红 likes\ttea.\n2 + 2 = 4 é 🙂") == "小红 likes\ttea.\n2 + 2 = 4 é 🙂"


def test_plain_console_survives_missing_encodings_and_closed_streams() -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    LineConsole(ascii_only).print("你好")
    ascii_only.seek(0)
    assert ascii_only.read() == "\\u4f60\\u597d\n"
    closed = io.StringIO()
    closed.close()
    LineConsole(closed).print("no reader")


def start_bar(stream: io.StringIO, total_steps: int) -> BarConsole:
    console = BarConsole(stream)
    console.show("start", {"step": 0, "total_steps": total_steps}, "")
    return console


def test_rich_console_shrinks_the_bar_and_not_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    console = start_bar(stream, 20_000)
    numbers = "loss 3.412 | lr 4.9e-04 | 41.2k tok/s | eta 00:18:20"
    console.show("step", {"step": 5000}, f"step 5000/20000 25.0% | {numbers}", numbers)
    console.print("validation")
    console.stop()
    assert numbers in stream.getvalue() and "5000/20000 " in stream.getvalue() and "validation" in stream.getvalue()


def show_validation(console: Console, done: int) -> None:
    event = {"activity": "validation", "done": done, "total": 5, "unit": "batches"}
    console.show("progress", event, f"validation: {done} of 5 batches", f"validation {done}/5 batches")


def test_console_shows_how_far_an_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seconds = iter([0.0, 4.0, 11.0, 12.0, 22.0, 40.0])
    monkeypatch.setattr("runner.tracking.lines.time.monotonic", lambda: next(seconds))
    lines = io.StringIO()
    plain = LineConsole(lines)
    for done in range(6):
        show_validation(plain, done)
    assert lines.getvalue() == "validation: 2 of 5 batches\nvalidation: 4 of 5 batches\n"
    monkeypatch.undo()
    rich = start_bar(io.StringIO(), 20)
    rich.show("step", {"step": 5}, "", "loss 3.4")
    show_validation(rich, 2)
    assert rich._bar is not None and rich._bar.tasks[0].fields["numbers"] == "validation 2/5 batches"
    show_validation(rich, 5)
    assert rich._bar.tasks[0].fields["numbers"] == "loss 3.4"
    rich.stop()


def test_evaluation_progress_prints_lines_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 0.0, 1.0, 3.0, 5.0, 14.0])
    monkeypatch.setattr("runner.tracking.progress.time.monotonic", lambda: next(seconds))
    with EvaluationProgress("perplexity") as progress:
        progress.begin("rows", 4000)
        for done in (10, 1000, 1500, 2000):
            progress.advance(done)
        assert not progress.should_stop()
    assert (
        capsys.readouterr().err
        == "perplexity: 1,000 of 4,000 rows (25%), eta 00:00:09\nperplexity: 2,000 of 4,000 rows (50%), eta 00:00:14\n"
    )


def test_console_has_a_line_for_each_validation_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = start_logger(tmp_path)
    logger.log(
        "eval",
        2,
        tokens=20,
        loss=2.5,
        **{"head/acc": 0.5, "loss/law": 2.5, "head/acc/law": 0.5, "loss/chat": float("nan")},
    )
    logger.log("eval", 3, loss=2.0, **{"head/acc": 0.25})
    logger.log("train", 4, loss=2.0)
    logger.finish("completed")
    prefix = "step 2/20 10.0% | validation"
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(prefix)] == [
        f"{prefix} law | loss 2.500 | head/acc 0.5",
        f"{prefix} chat | loss not finite",
    ]
    assert "step 3/20 15.0% | validation | loss 2.000 | head/acc 0.25" in lines
    assert any(line.startswith("step 4/20 20.0% | loss 2.000 | val 2.00@3") for line in lines)
    assert prefix + " chat" in (tmp_path / "train.log").read_text()
    record = read_records(tmp_path / "metrics.jsonl")[0]
    assert record["loss/law"] == record["loss"] == 2.5 and record["nonfinite"] == ["loss/chat"]
