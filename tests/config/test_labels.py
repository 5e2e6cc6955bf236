"""run.name, run.tags and run.note: text of the user, taken literally, checked, recorded, and never a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_fixtures import TINY_RUN
from hydra.core.override_parser.overrides_parser import OverridesParser

from common.errors import UserError
from runner.config.compose import compose_config
from runner.config.overrides import absolutize_path
from runner.engine.config import LabelConfig
from runner.run_dir.contents import check_fields


def labels(*typed: str) -> tuple[str, list[str], str]:
    run = compose_config([absolutize_path(override) for override in typed]).run
    return run.name, list(run.tags), run.note


TEXTS = ["what's new (part 2), and why: {x} [y]", 'with "quotes" = and \\', "42", "1e-4", "true", "模型 一", "a, b"]


def test_note_is_the_text_that_was_typed() -> None:
    parsed = OverridesParser.create().parse_overrides([absolutize_path(f"run.note={text}") for text in TEXTS])
    assert [
        override.value() if isinstance(override.value(), str) else override.value().text for override in parsed
    ] == TEXTS


def test_one_tag_is_a_list_of_one_and_a_name_may_have_spaces() -> None:
    assert labels("run.name=base (v2)", "run.tags=sft:lora", f"run.note={TEXTS[0]}") == (
        "base (v2)",
        ["sft:lora"],
        TEXTS[0],
    )
    assert absolutize_path("run.tags=[a,b-1]") == "run.tags=[a,b-1]"


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "a\\b", ".hidden", "~", "a\x1b[31mb", "a\u202eb", "a\nb", "x" * 81, "${seed}"]
)
def test_name_that_is_a_path_or_not_one_line_is_refused(name: str) -> None:
    with pytest.raises(UserError) as refused:
        LabelConfig(name, [], "")
    assert refused.value.setting.startswith("run.name") and refused.value.fix


@pytest.mark.parametrize("tags", [["a b"], [""], ["<b>"], ["x" * 41], ["a"] * 21, ["a/b"]])
def test_tag_that_is_no_tag_is_refused(tags: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        LabelConfig("", tags, "")
    assert refused.value.setting.startswith("run.tags") and refused.value.fix


def test_note_is_limited_and_reads_no_environment() -> None:
    for note in ("x" * 501, "two\nlines", "a\tb", "${oc.env:HOME}"):
        with pytest.raises(UserError, match=r"run\.note"):
            LabelConfig("", [], note)
    for override in ("run.note=${oc.env:HOME}", "run.name='${oc.env:HOME}'", "run.tags=[${oc.env:HOME}]"):
        with pytest.raises(UserError, match="no interpolation"):
            absolutize_path(override)


def test_quoted_note_of_two_lines_is_quoted_once() -> None:
    """As .hydra/overrides.yaml has it; the error is about the line break then."""
    assert absolutize_path("run.note='two\nlines'") == "run.note='two\nlines'"


def test_name_with_commas_is_left_to_a_sweep() -> None:
    assert absolutize_path("run.name=a,b") == "run.name=a,b" and absolutize_path("run.note=a,b") == "run.note='a,b'"


def test_run_json_of_an_earlier_version_has_empty_labels() -> None:
    fields = check_fields({"status": "completed", "outcome": None})
    assert (fields["name"], fields["tags"], fields["note"]) == ("", [], "")


@pytest.mark.slow
def test_labels_are_recorded_printed_and_changed_without_training(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started = call(
        *TINY_RUN, "run.name=base (v2)", "run.tags=[a,b]", "run.note=it's new, and small", f"hydra.run.dir={folder}"
    )
    fields = json.loads((folder / "run.json").read_text())
    assert (fields["name"], fields["tags"], fields["note"], fields["model"]) == (
        "base (v2)",
        ["a", "b"],
        "it's new, and small",
        "tiny",
    )
    assert "base (v2)" in started.stdout and "it's new, and small" in started.stdout
    metrics = (folder / "metrics.jsonl").read_bytes()
    changed = call(f"resume={folder}", "run.note=kept")
    after = json.loads((folder / "run.json").read_text())
    assert changed.returncode == 0 and (after["note"], after["name"], after["status"]) == (
        "kept",
        "base (v2)",
        "completed",
    )
    assert (
        (folder / "metrics.jsonl").read_bytes() == metrics and after["exact"] and after["attempt"] == fields["attempt"]
    )
