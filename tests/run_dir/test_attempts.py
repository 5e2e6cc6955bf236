"""`attempts` of run.json: what every launch of a run computed with, and how it ended."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from common.errors import Outcome, UserError
from runner.run_dir import contents
from runner.run_dir.metadata import MAX_ATTEMPTS, RunMetadata


def fields_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def attempt(
    folder: Path, outcome: Outcome | None, resume: bool = True, reasons: list[str] | None = None, **facts
) -> None:
    """Begin and end an attempt; outcome None: it is killed."""
    with RunMetadata.open(folder, resume=resume) as metadata:
        metadata.mark_running()
        metadata.describe_attempt({}, {"commit": "c" * 40}, **facts, exact=True)
        if reasons:
            metadata.update(exact=False, inexact_because=reasons)
        if outcome is not None:
            metadata.finish(outcome, step=5)


def test_attempts_keep_the_facts_and_the_end_of_every_launch(tmp_path: Path) -> None:
    attempt(tmp_path, None, resume=False, environment={"threads": 1})
    attempt(tmp_path, Outcome.INTERRUPTED, environment={"threads": 2}, reasons=["threads: 1 -> 2"])
    attempt(tmp_path, Outcome.COMPLETED, environment={"threads": 3}, reasons=["threads: 2 -> 3"])
    fields = fields_of(tmp_path)
    summary = [
        (one["attempt"], one.get("outcome"), one.get("step"), one["environment"]["threads"], one["exact"])
        for one in fields["attempts"]
    ]
    assert summary == [(1, None, None, 1, True), (2, "interrupted", 5, 2, False), (3, "completed", 5, 3, False)]
    assert fields["attempts"][1]["inexact_because"] == ["threads: 1 -> 2"]
    assert (fields["exact"], fields["inexact_because"]) == (False, ["threads: 1 -> 2", "threads: 2 -> 3"])
    assert (
        fields["code"] == fields["attempts"][2]["code"] == {"commit": "c" * 40}
        and "python" in fields["attempts"][0]["versions"]
    )


def test_exact_resume_after_an_inexact_one_leaves_the_run_inexact(tmp_path: Path) -> None:
    attempt(tmp_path, Outcome.INTERRUPTED, resume=False)
    attempt(tmp_path, Outcome.INTERRUPTED, reasons=["code changed: a -> b"])
    attempt(tmp_path, Outcome.COMPLETED)
    fields = fields_of(tmp_path)
    assert [one["exact"] for one in fields["attempts"]] == [True, False, True]
    assert (fields["exact"], fields["inexact_because"]) == (False, ["code changed: a -> b"])


@pytest.mark.parametrize("damaged", ["none", [None, {"attempt": 6}]])
def test_attempts_of_a_damaged_record_are_refused(tmp_path: Path, damaged: object) -> None:
    attempt(tmp_path, Outcome.INTERRUPTED, resume=False)
    (tmp_path / "run.json").write_text(json.dumps(fields_of(tmp_path) | {"attempts": damaged}))
    with pytest.raises(UserError, match="run.json cannot be read: attempts"):
        RunMetadata.open(tmp_path, resume=True)


def test_attempts_are_bounded(tmp_path: Path) -> None:
    attempt(tmp_path, Outcome.INTERRUPTED, resume=False)
    old = [{"attempt": number} for number in range(MAX_ATTEMPTS)]
    (tmp_path / "run.json").write_text(json.dumps(fields_of(tmp_path) | {"attempts": old}))
    attempt(tmp_path, Outcome.INTERRUPTED)
    attempts = fields_of(tmp_path)["attempts"]
    assert [attempts[0]["attempt"], attempts[-1]["attempt"], len(attempts)] == [1, 2, MAX_ATTEMPTS]


def test_git_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(contents, "git_state", lambda: {"commit": "a", "dirty": None} if release.wait(60) else {})
    reader = contents.GitReader()
    assert reader.result(0.01) == {"commit": None, "dirty": None}
    release.set()
    assert reader.result(60) == {"commit": "a", "dirty": None}
