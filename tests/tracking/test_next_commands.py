"""Last lines of a completed run: the commands fit the stage, and can be typed as they are where they are printed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from common.errors import UserError, report_user_error, resume_command
from common.paths import REPO_ROOT
from runner.tracking.run_end import SAMPLES, NextCommand, commands_after_divergence, commands_to_continue, next_commands

RUN = REPO_ROOT / "outputs" / "2026-11-21" / "10-00-00"


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)
    monkeypatch.setattr("shutil.which", lambda name: sys.executable)


DECODER = {"model.family": "decoder", "data.val_path": "auto"}


def typed(commands: tuple[NextCommand, ...]) -> list[str]:
    return [shlex.join(command.arguments) for command in commands]


def test_next_commands_of_a_run_on_the_sample() -> None:
    commands = next_commands(RUN, "sft", "chat", SAMPLES / "sft.jsonl", "train.epochs=8", DECODER)
    assert typed(commands) == [
        "python runner/chat.py run=outputs/2026-11-21/10-00-00",
        "python runner/evaluate.py run=outputs/2026-11-21/10-00-00 data.path=data/samples/sft_val.jsonl metric=exact_match",
        "python runner/train.py stage=dpo init_from=outputs/2026-11-21/10-00-00",
        "python runner/train.py resume=outputs/2026-11-21/10-00-00 train.epochs=8",
        "python runner/export.py run=outputs/2026-11-21/10-00-00 to=FOLDER format=gguf",
    ]
    assert commands[2].purpose.endswith("or stage=dpo_lora, or stage=lora") and commands[3].purpose == "train longer"


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
    lines = typed(next_commands(RUN, stage, data_format, SAMPLES / f"{stage}.jsonl", "train.max_steps=20", DECODER))
    assert metric in lines[1] and lines[-2].endswith("train.max_steps=20")
    assert [part for line in lines for part in line.split() if part.startswith("stage=")] == (
        [next_stage] if next_stage else []
    )


def test_next_commands_export_a_model_of_transformers_in_its_own_format() -> None:
    assert typed(next_commands(RUN, "sft", "chat", None, None, {"model.family": "transformers"}))[-1].endswith(
        "to=FOLDER format=hf"
    )


@pytest.mark.parametrize(
    ("settings", "export_format"),
    [
        ({"model.family": "transformers", "stage.lora.rank": 8}, "merged"),
        ({"model.family": "decoder", "model.num_experts": "4", "model.norm_topk_prob": "false"}, "hf"),
        (
            {"model.family": "decoder", "model.num_experts": 4, "model.norm_topk_prob": True, "stage.lora.rank": 8},
            "gguf",
        ),
    ],
)
def test_next_commands_export_in_a_format_that_exists(settings: dict[str, object], export_format: str) -> None:
    assert typed(next_commands(RUN, "lora", "chat", None, None, settings))[-1].endswith(f"format={export_format}")


def test_next_commands_evaluate_the_validation_file_of_the_run() -> None:
    for path, shown in (("/tmp/v.jsonl", "/tmp/v.jsonl"), ("{a: v.jsonl}", "FILE"), (None, "FILE")):
        lines = typed(next_commands(RUN, "sft", "chat", None, None, {"data.val_path": path}))
        assert f"data.path={shown} metric" in lines[1]


def test_next_commands_ask_for_data_where_the_next_stage_has_none(tmp_path: Path) -> None:
    lines = typed(next_commands(RUN, "pretrain", "text", tmp_path / "my texts.jsonl", None, DECODER))
    assert "data.path=FILE metric=perplexity" in lines[1] and lines[2].endswith("data=own data.path=FILE")
    assert not [line for line in lines if "resume=" in line]  # no resume after early stopping
    (tmp_path / "my texts_val.jsonl").touch()
    assert (
        f"'data.path={tmp_path}/my texts_val.jsonl'"
        in typed(next_commands(RUN, "pretrain", "text", tmp_path / "my texts.jsonl", None, DECODER))[1]
    )


def test_next_commands_name_this_python_and_checkout_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/python")
    assert next_commands(tmp_path / "a run", "sft", "chat", None, None, DECODER)[0].arguments == (
        sys.executable,
        str(REPO_ROOT / "runner" / "chat.py"),
        "run=a run",
    )
    monkeypatch.setattr("common.paths.IS_INSTALLED", True)
    assert typed(next_commands(tmp_path / "run", "sft", "chat", None, None, DECODER))[0] == "lm-chat run=run"


def test_next_commands_name_the_whole_path_inside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hydra.job.chdir=true` trains there; the shell is in another directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").touch()
    assert commands_to_continue(tmp_path, True)[0].arguments[-1] == f"resume={tmp_path}"


def test_commands_after_divergence_keep_overrides_and_lower_the_rate() -> None:
    overrides = ["stage=sft", "optimizer.lr=0.03", "data.path=my texts.jsonl"]
    again, resume = commands_after_divergence(RUN, 0.03, overrides, can_resume=True)
    assert again.arguments[2:] == ("stage=sft", "data.path=my texts.jsonl", "optimizer.lr=0.003")
    assert resume.arguments[2:] == ("resume=outputs/2026-11-21/10-00-00", "optimizer.lr=0.003")
    assert commands_after_divergence(RUN, 0.03, overrides, can_resume=False) == (again,)
    # the overrides of a branch are those of its trunk: they would train from its start
    [of_branch] = commands_after_divergence(RUN, 0.03, overrides, can_resume=True, is_branch=True)
    assert of_branch.arguments == resume.arguments and not of_branch.purpose.startswith("or")


def test_commands_to_continue_say_whether_something_is_saved() -> None:
    (saved,), (new,) = commands_to_continue(RUN, True), commands_to_continue(RUN, False)
    assert (
        saved.arguments == new.arguments == (*saved.arguments[:2], "resume=outputs/2026-11-21/10-00-00")
        and saved.purpose != new.purpose
    )


def test_resume_command_names_this_python_and_checkout_where_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resume_command(RUN) == f"python runner/train.py resume={RUN}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert shlex.split(resume_command(RUN)) == [sys.executable, str(REPO_ROOT / "runner" / "train.py"), f"resume={RUN}"]
    tmp_path.rmdir()
    assert resume_command(RUN).endswith(f"resume={RUN}")


def test_fix_of_an_error_names_the_installed_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.paths.IS_INSTALLED", True)
    report_user_error(UserError("there are no runs yet", "all=true", "start one: python runner/train.py stage=sft"))
    assert "fix:   start one: lm-train stage=sft" in capsys.readouterr().err
