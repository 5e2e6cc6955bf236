"""Last lines of a completed run: the commands fit the stage, and can be typed as they are where they are printed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from common.errors import resume_command
from common.paths import REPO_ROOT
from runner.tracking.next_commands import SAMPLES, next_commands

RUN = REPO_ROOT / "outputs" / "2026-11-21" / "10-00-00"


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)
    monkeypatch.setattr("shutil.which", lambda name: sys.executable)


def test_next_commands_of_a_run_on_the_sample() -> None:
    assert next_commands(RUN, "sft", "chat", SAMPLES / "sft.jsonl", "train.epochs=8").splitlines() == [
        "model  outputs/2026-11-21/10-00-00/model",
        "next   python runner/chat.py run=outputs/2026-11-21/10-00-00",
        "       python runner/evaluate.py run=outputs/2026-11-21/10-00-00 data.path=data/samples/sft_val.jsonl metric=exact_match",
        "       python runner/train.py stage=dpo init_from=outputs/2026-11-21/10-00-00  # or stage=dpo_lora, or stage=lora",
        "       python runner/train.py resume=outputs/2026-11-21/10-00-00 train.epochs=8  # train longer",
    ]


@pytest.mark.parametrize(
    ("stage", "data_format", "metric", "next_stage"),
    [
        ("pretrain", "text", "metric=perplexity", "stage=sft"),
        ("sft", "chat", "metric=exact_match", "stage=dpo"),
        ("lora", "chat", "metric=exact_match", None),
        ("dpo", "preference", "metric=preference", None),
        ("dpo_lora", "preference", "metric=preference", None),
        ("mine", "chat", "metric=exact_match", None),
    ],
)
def test_next_commands_fit_the_stage(stage: str, data_format: str, metric: str, next_stage: str | None) -> None:
    lines = next_commands(RUN, stage, data_format, SAMPLES / f"{stage}.jsonl", "train.max_steps=20").splitlines()
    assert metric in lines[2] and lines[-1].endswith("train.max_steps=20  # train longer")
    assert [part for line in lines for part in line.split() if part.startswith("stage=")][:1] == ([next_stage] if next_stage else [])


def test_next_commands_ask_for_data_where_the_next_stage_or_the_evaluation_has_none(tmp_path: Path) -> None:
    lines = next_commands(RUN, "pretrain", "text", tmp_path / "my texts.jsonl", None).splitlines()
    assert "data.path=FILE metric=perplexity" in lines[2] and lines[3].endswith("data=own data.path=FILE") and len(lines) == 4  # no resume after early stopping
    (tmp_path / "my texts_val.jsonl").touch()
    assert f"'data.path={tmp_path}/my texts_val.jsonl'" in next_commands(RUN, "pretrain", "text", tmp_path / "my texts.jsonl", None)


def test_next_commands_name_this_python_and_this_checkout_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/python")
    chat = next_commands(tmp_path / "a run", "sft", "chat", None, None).splitlines()[1].removeprefix("next")
    assert shlex.split(chat) == [sys.executable, str(REPO_ROOT / "runner" / "chat.py"), "run=a run"]
    monkeypatch.setattr("common.paths.IS_INSTALLED", True)
    assert next_commands(tmp_path / "run", "sft", "chat", None, None).splitlines()[1] == "next   lm-chat run=run"


def test_resume_command_names_this_python_and_this_checkout_where_they_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_command(RUN) == f"python runner/train.py resume={RUN}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert shlex.split(resume_command(RUN)) == [sys.executable, str(REPO_ROOT / "runner" / "train.py"), f"resume={RUN}"]
    tmp_path.rmdir()
    assert resume_command(RUN).endswith(f"resume={RUN}")
