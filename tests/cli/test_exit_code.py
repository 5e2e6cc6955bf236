"""Exit code and message of every way a command can end."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import DivergedError, Interrupted, TrainingError, UserError
from runner.cli.exit_code import exiting_with_code


@pytest.mark.parametrize(
    "error, code, message",
    [
        (UserError("lr must be positive", "optimizer.lr=0", "optimizer.lr=1e-3"), 2, "error: lr must be positive\n  where: optimizer.lr=0\n"),
        (Interrupted(7, Path("a/run")), 75, "stopped after step 7, saved; continue with: "),
        (TrainingError("the disk is full"), 1, "error: the disk is full"),
        (DivergedError("the loss is not finite"), 1, "error: the loss is not finite"),
        (KeyError("a bug"), 1, "Traceback (most recent call last)"),
    ],
    ids=["user-error", "interrupted", "failed", "diverged", "bug"],
)
def test_exit_code_and_message_tell_how_a_command_ended(error: Exception, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exiting_with_code():
        raise error
    out, err = capsys.readouterr()
    assert caught.value.code == code and err.startswith(message) and not out


def test_exit_code_of_a_command_that_ends_well_is_its_own() -> None:
    with exiting_with_code():
        pass
