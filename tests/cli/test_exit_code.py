"""Exit code and message of every way a command can end."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from common.errors import (
    DivergedError,
    Interrupted,
    TrainingError,
    UserError,
    exiting_with_code,
    print_note,
    print_safely,
    strip_control,
    stripping_stdout,
)


@pytest.mark.parametrize(
    "error, code, message",
    [
        (
            UserError("lr must be positive", "optimizer.lr=0", "optimizer.lr=1e-3"),
            2,
            "error: lr must be positive\n  where: optimizer.lr=0\n",
        ),
        (Interrupted(7, Path("a/run")), 75, "stopped after step 7, saved; continue with: "),
        (TrainingError("the disk is full"), 1, "error: the disk is full"),
        (DivergedError("the loss is not finite"), 1, "error: the loss is not finite"),
        (KeyError("a bug"), 1, "Traceback (most recent call last)"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            1,
            "error: Too many open files; raise the limit, e.g. ulimit -n",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "runs/lr=0.1"),
            2,
            "error: the path is too long\n  where: runs/lr=0.1\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "run/report.html"),
            1,
            "error: run/report.html could not be written or read: Permission denied",
        ),
    ],
    ids=["user-error", "interrupted", "failed", "diverged", "bug", "files", "long-path", "read-only"],
)
def test_exit_code_and_message_tell_how_a_command_ended(
    error: Exception, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, exiting_with_code():
        raise error
    out, err = capsys.readouterr()
    assert caught.value.code == code and err.startswith(message) and not out


def test_exit_code_of_a_command_that_ends_well_is_its_own() -> None:
    with exiting_with_code():
        pass


HOSTILE = "a\x1b[2J\x9b31m\u202eb\r\nfix: run me"


@pytest.mark.parametrize(
    "error",
    [UserError(HOSTILE, HOSTILE, HOSTILE), TrainingError(HOSTILE), KeyError(HOSTILE), RuntimeError(HOSTILE)],
    ids=lambda error: type(error).__name__,
)
def test_message_of_an_error_has_no_control_characters_and_no_forged_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text may come from a data file or a folder of another user."""
    with pytest.raises(SystemExit), exiting_with_code():
        raise error
    printed = capsys.readouterr().err
    assert strip_control(printed) == printed and "\\x1b[2J" in printed and "\\u202e" in printed
    if isinstance(error, UserError):
        assert [line.split(":")[0].strip() for line in printed.splitlines()] == ["error", "where", "fix"]


def test_notes_are_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_note(f"warning: {HOSTILE}")
    print_safely(f"two\nlines {HOSTILE}")
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and strip_control(out + err) == out + err and "\r" not in out + err


def test_what_a_library_prints_is_stripped_also_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), stripping_stdout():
        print(HOSTILE)
        raise KeyError
    out = capsys.readouterr().out
    assert strip_control(out) == out and "\\u202e" in out


def test_error_of_a_megabyte_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exiting_with_code():
        raise UserError("x" * 1_000_000, "y" * 1_000_000, "z" * 1_000_000)
    assert len(capsys.readouterr().err) < 40_000


PRINTS = {  # files that print without these functions, and what
    "runner/__init__.py": "a constant",
    "runner/cli/entrypoint.py": "help",
    "runner/cli/show_config.py": "YAML, stripped",
    "runner/cli/subcommand.py": "help",
    "runner/cli/help.py": "stripped",
    "runner/inference/chat.py": "numbers; stripped",
    "runner/inference/evaluate.py": "JSON if it has control characters",
    "runner/inference/export/command.py": "the example of a model card",
    "runner/inference/inspect_rows.py": "by TokenView, which strips",
    "runner/launch/resume.py": "stripped",
    "runner/launch/subprocesses.py": "the message of sys.exit",
    "runner/launch/train_process.py": "a constant",
    "runner/tracking/trackers/program.py": "read by the logger, which strips",
    "runner/sweep/session.py": "the leaderboard, which is stripped; numbers",
    "runner/tracking/bar.py": "lines that the logger has stripped",
    "runner/tracking/lines.py": "lines that the logger has stripped; JSON",
    "runner/tracking/logger.py": "stripped",
    "runner/tracking/progress.py": "stripped",
    "runner/tracking/trackers/swanlab.py": "a path",
    "data/tokenize/tokenizer_limits.py": "to the process that started it",
    "data/tokenize/train.py": "numbers",
}


def test_commands_print_text_of_folders_by_these_functions_only() -> None:
    """A `print` outside of them could pass on control characters of a path, a row or a file: look at it before its file
    is added to PRINTS.
    """
    root = Path(__file__).resolve().parents[2]
    files = [file for folder in ("runner", "data", "models") for file in (root / folder).rglob("*.py")]
    own = re.compile(r"(?<![\w.])print\(|\.print\(|std(out|err)\.write\(")
    found = {
        f"{file.relative_to(root)}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if own.search(line.partition("#")[0])
    }
    assert found <= set(PRINTS)
