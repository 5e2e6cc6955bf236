"""What a run prints: lines of at most 80 columns, JSON that equals the files, no colours where none are wanted, and an
end with its commands.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from pathlib import Path

import pytest

from common.paths import REPO_ROOT
from runner.tracking.bar import BarConsole, cell_width, open_console
from runner.tracking.config import TrackerConfig
from runner.tracking.lines import CONSOLE_MODES, LineConsole, SweepLines
from runner.tracking.logger import RunLogger
from runner.tracking.progress import PolledProgress, ProgressMeter, TaskProgress, watch_download
from runner.tracking.run_end import NextCommand, RunEnd

STYLE = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "\x1b[2J\u202eevil\x07"
HEADER = {
    "run": "outputs/2026-11-21/10-00-00",
    "note": "一个关于小猫和小狗的故事，" * 8,
    "model": "tiny, 1,607,040 parameters, " + "and a long description of its kernels " * 4,
    "data": "data/samples/pretrain.jsonl\n2,320 rows, 232 more held out; 143,501 tokens in all files, 140,949 with loss, 9.8% cut off",
}


def run_end(folder: Path, **changes: object) -> RunEnd:
    command = NextCommand(
        (
            "python",
            "runner/evaluate.py",
            f"run={folder.name}",
            "data.path=data/samples/sft_val.jsonl",
            "metric=exact_match",
        ),
        "measure it",
    )
    values: dict = {
        "step": 30,
        "total_steps": 30,
        "tokens": 60_166,
        "loss_tokens": 50_000,
        "metrics": {"loss": 3.04961, "val_loss": 2.8, "best_val_loss": 2.6975, "best_step": 20},
        "run_dir": folder,
        "checkpoint": folder / "checkpoints" / "step-00000030",
        "model": "best weights, step 20",
        "page": folder / "report.html",
        "peak_memory": 434 << 20,
        "commands": (command,),
    }
    return RunEnd(**values | changes)


def run_once(folder: Path, mode: str) -> None:
    """Log a short run: two steps, an evaluation, a sample, a warning, and the end."""
    logger = RunLogger(folder, TrackerConfig(name="none", page=False, console=mode))
    logger.start(HEADER, total_steps=30, attempt=1, run_config={}, saved=None, tracker_id=None)
    logger.log("train", 10, tokens=1000, loss=3.5, lr=1e-3, tokens_per_second=500.0)
    logger.log("eval", 10, loss=float("nan"))
    logger.log("train", 20, tokens=3000, loss=3.25, lr=1e-3, tokens_per_second=2000.0)
    logger.samples(20, [{"prompt": "你好", "answer": HOSTILE}])
    logger.warning(f"a row is odd {HOSTILE}")
    logger.finish("completed", run_end(folder))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_header_and_end_fit_80_columns_in_a_pipe_and_in_the_log(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_once(workspace, "auto")
    out = capsys.readouterr().out
    assert (workspace / "train.log").read_text() == out and "\x1b" not in out
    header, _, rest = out.partition("step 10/30")
    end = "completed after" + rest.partition("completed after")[2]
    for line in [*header.splitlines(), *end.splitlines()]:
        assert cell_width(line) <= 80, line
    assert header.count("一个关于小猫和小狗的故事") >= 6 and "2,320 rows" in header


@pytest.mark.parametrize(("columns", "widest"), [("80", 80), ("160", 120), ("50", 50)])
def test_header_and_end_fit_the_terminal(
    workspace: Path, columns: str, widest: int, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm-256color")
    run_once(workspace, "rich")
    lines = STYLE.sub("", capsys.readouterr().out).splitlines()
    end = lines[next(number for number, line in enumerate(lines) if "completed after" in line) :]
    header = lines[: next(number for number, line in enumerate(lines) if "0/30" in line)]
    assert all(cell_width(line) <= widest for line in [*header, *end]) and max(map(cell_width, header)) > widest - 12


def test_end_has_the_numbers_the_places_and_the_commands(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once(workspace, "plain")
    end = capsys.readouterr().out.partition("completed after")[2].splitlines()[1:]
    assert end == [
        "steps            30 of 30",
        "tokens           60,166, 50,000 of them with loss",
        "tokens/s         1.0k in training steps",  # 3000 tokens in 2 + 1 s
        "training loss    3.0496",
        "validation loss  2.6975 (best at step 20), 2.8000 (last)",
        "peak memory      434 MiB, process",
        "checkpoint       run/checkpoints/step-00000030",
        "model            run/model (best weights, step 20)",
        "page             run/report.html",
        "warnings         1, in run/train.log",
        "next",
        "  # measure it",
        "  python runner/evaluate.py run=run data.path=data/samples/sft_val.jsonl \\",
        "    metric=exact_match",
    ]


def test_end_leaves_out_what_there_is_not(workspace: Path) -> None:
    metrics = {"loss": None, "training_rows_loss": 2.0}
    end = run_end(workspace, metrics=metrics, checkpoint=None, model=None, page=None, peak_memory=None, commands=())
    assert [line.split("  ")[0] for line in end.lines(80)] == ["steps", "tokens", "loss of training rows"]
    assert (
        run_end(workspace, prints_commands=False).lines(80)[-1].startswith("page")
        and run_end(workspace, prints_commands=False).event()["next"]
    )


def test_end_of_a_job_is_one_line_with_its_numbers(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = RunLogger(workspace, TrackerConfig(name="none", page=False, console="plain"))
    end = run_end(workspace, is_job=True, metrics={"loss": 3.04961, "val_loss": None, "best_step": 20})
    logger.finish("failed", end, "the disk\x1b is full")
    expected = "failed after 00:00:00 | loss 3.05 | best_step 20 | error the disk\\x1b is full\n"
    assert capsys.readouterr().out == expected == (workspace / "train.log").read_text()


def test_json_lines_equal_the_files_of_the_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once(workspace, "json")
    out = capsys.readouterr().out
    events = [json.loads(line) for line in out.splitlines()]
    assert out.isascii() and "\x1b" not in out
    assert [event["event"] for event in events] == ["start", "step", "eval", "step", "sample", "warning", "end"]
    for kinds, file in ((("step", "eval"), "metrics.jsonl"), (("sample",), "samples.jsonl")):
        records = [json.loads(line) for line in (workspace / file).read_text().splitlines()]
        assert [
            {key: value for key, value in event.items() if key != "event"}
            for event in events
            if event["event"] in kinds
        ] == records
    end = events[-1]
    assert (end["status"], end["step"], end["warnings"], end["tokens_per_second"]) == ("completed", 30, 1, 1000.0)
    assert (
        end["model"] == str(workspace / "model")
        and end["next"][0][:2] == ["python", "runner/evaluate.py"]
        and events[0]["total_steps"] == 30
    )


def test_quiet_prints_nothing_and_writes_everything(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once(workspace, "quiet")
    assert capsys.readouterr() == ("", "")
    assert (
        "warning: a row is odd" in (workspace / "train.log").read_text()
        and len((workspace / "metrics.jsonl").read_text().splitlines()) == 3
    )


@pytest.mark.parametrize("no_color", ["1", ""])
def test_no_color_leaves_out_styles(
    workspace: Path, no_color: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    run_once(workspace, "rich")
    out = capsys.readouterr().out
    assert bool(STYLE.search(out)) == (not no_color) and "warning: a row is odd" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "kind"), [("xterm-256color", BarConsole), ("dumb", LineConsole), ("", LineConsole)])
def test_auto_draws_a_bar_only_on_a_terminal_that_can(term: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(open_console("auto", Terminal())) is kind and type(open_console("auto", io.StringIO())) is LineConsole


@pytest.mark.parametrize("is_json", [False, True])
def test_broken_pipe_does_not_end_a_run(workspace: Path, is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("runner.tracking.logger.open_console", lambda mode: LineConsole(stream, is_json))
        run_once(workspace, "auto")
        monkeypatch.setattr(stream, "flush", lambda: None)
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    assert len((workspace / "metrics.jsonl").read_text().splitlines()) == 3


def test_resumed_run_starts_its_bar_and_its_rate_where_it_continues(workspace: Path) -> None:
    logger = RunLogger(workspace, TrackerConfig(name="none", page=False, console="quiet"))
    logger.start(
        {}, total_steps=30, attempt=2, run_config={}, saved=None, tracker_id=None, first_step=20, first_tokens=5000
    )
    logger.log("train", 30, tokens=6000, loss=1.0, tokens_per_second=100.0)
    assert logger._mean_rate() == 100.0
    logger.finish("completed")
    bar = BarConsole(io.StringIO())
    bar.show("start", {"step": 20, "total_steps": 30}, "")
    assert bar._bar is not None and bar._bar.tasks[0].completed == 20
    bar.stop()


def test_task_shows_a_bar_on_a_terminal_only_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream, seconds = Terminal(), iter([0.0, 1.0, 1.0, 3.0, 3.0])
    monkeypatch.setattr("runner.tracking.progress.sys.stderr", stream)
    monkeypatch.setattr("runner.tracking.progress.time.monotonic", lambda: next(seconds))
    with ProgressMeter(f"tokenizing {'长' * 80}.jsonl{HOSTILE}") as progress:
        progress(10, 100, 5)
        assert stream.getvalue() == ""
        progress(50, 100, 25)
        assert progress._bar is not None
    drawn = STYLE.sub("", stream.getvalue())
    assert "25 rows, 8 rows/s" in drawn and "\x1b[2J" not in drawn and progress._bar is None


def test_quiet_run_shows_no_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 50.0, 100.0])
    monkeypatch.setattr("runner.tracking.progress.time.monotonic", lambda: next(seconds))
    TaskProgress("packing", "quiet").advance(3)
    assert capsys.readouterr() == ("", "")


def test_sweep_in_json_passes_on_the_events_of_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = SweepLines("json")
    lines.show("sweep_start", {"folder": "/s", "jobs": 2}, "2 jobs")
    lines.job_started("1/2", "lr=1", "starts")
    for line in (
        '{"event": "step", "step": 3}',
        f"Traceback {HOSTILE}",
        '{"event": "step", broken',
        '{"event": 5}',
        "[" * 100_000,
    ):
        lines.job_output("lr=1", "[1/2] ", line)
    lines.show("sweep_end", {"status": "completed"}, "table")
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [
        {"event": "sweep_start", "folder": "/s", "jobs": 2},
        {"event": "job_start", "job": "lr=1", "number": "1/2", "verb": "starts"},
        {"event": "step", "job": "lr=1", "step": 3},
        {"event": "sweep_end", "status": "completed"},
    ]
    assert captured.err.startswith("[1/2] Traceback ") and "\x1b" not in captured.err


def test_events_and_modes_are_documented() -> None:
    text = (REPO_ROOT / "docs" / "reference" / "console-events.md").read_text(encoding="utf-8")
    files = ("tracking/logger.py", "tracking/lines.py", "sweep/command.py", "sweep/session.py")
    source = "".join((REPO_ROOT / "runner" / file).read_text() for file in files)
    events = {*re.findall(r'show\("(\w+)"', source)}
    assert events == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    guide = (REPO_ROOT / "docs" / "guide" / "tracking.md").read_text(encoding="utf-8")
    assert all(f"| `{mode}`" in guide for mode in CONSOLE_MODES)


def test_download_is_watched_by_the_bytes_that_it_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "earlier").write_bytes(bytes(5000))
    (tmp_path / "blobs").mkdir()
    monkeypatch.setattr("runner.tracking.progress.PROGRESS_POLL_SECONDS", 0.001)
    monkeypatch.setattr("runner.tracking.progress.DELAY", 0.0)
    with watch_download("downloading owner/name", tmp_path, 4096) as progress:
        (tmp_path / "blobs" / "part").write_bytes(bytes(1024))
        while not progress.done:  # until the thread has looked at it
            assert progress._thread.is_alive()
        assert progress.done == 1024
    assert not progress._thread.is_alive()
    assert progress.total == 4096 and "downloading owner/name: " in capsys.readouterr().err


def test_work_that_reports_nothing_shows_its_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runner.tracking.progress.PROGRESS_POLL_SECONDS", 0.001)
    monkeypatch.setattr("runner.tracking.progress.DELAY", 0.0)
    shown = threading.Event()
    monkeypatch.setattr(
        PolledProgress, "advance", lambda self, done, count: (TaskProgress.advance(self, done, count), shown.set())
    )
    with PolledProgress("comparing"):
        shown.wait()
    assert capsys.readouterr().err.startswith("comparing: 0 s\n")
