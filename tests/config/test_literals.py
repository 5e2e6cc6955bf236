"""Paths in overrides are taken as the shell passes them, whatever characters they have."""

import os
from pathlib import Path

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.config.literals import literal_output, literal_path, parse_value
from runner.config.overrides import absolutize_path

NAMES = (
    "数据.jsonl", "my file, v=2.jsonl", "a(1).jsonl", "it's \"q\".jsonl", "[x].jsonl", "{a: b}", "choice(a.jsonl,b.jsonl)", " sp ", "10", "1e3", "true", "*.jsonl",
    "a#b%&!.jsonl", "x\ty.jsonl", "'q'.jsonl", "b\\.jsonl", "trail\\", "~x.jsonl", "a.jsonl,b.jsonl", "-dash.jsonl", "a=b", "@x", "café.jsonl",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES, "a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_path_of_an_existing_file_is_taken_literally(folder: Path, name: str) -> None:
    """Before: `data.path=数据.jsonl` was `token recognition error`, `my file, v=2.jsonl` a sweep."""
    for key in ("data.path", "data.val_path", "data.tokenizer", "init_from"):
        assert parse_value(absolutize_path(f"{key}={name}")) == str(folder / name)
    for key in ("data.cache", "hydra.run.dir"):
        assert parse_value(literal_output(f"{key}={name}")) == name


def test_path_with_special_characters_is_composed(folder: Path) -> None:
    typed = ["data=own", "data.path=my file, v=2.jsonl", "data.val_path=数据.jsonl", "data.cache=a=b, (新)"]
    data = compose_config([absolutize_path(override) for override in typed]).data
    assert (data.path, data.val_path, data.cache) == (
        str(folder / "my file, v=2.jsonl"),
        str(folder / "数据.jsonl"),
        "a=b, (新)",
    )


@pytest.mark.parametrize(
    ("typed", "paths"),
    [
        ("[数据.jsonl,b.jsonl]", ["数据.jsonl", "b.jsonl"]),
        ("[a.jsonl, 'my file, v=2.jsonl']", ["a.jsonl", "my file, v=2.jsonl"]),
        ('["my file, v=2.jsonl",数据.jsonl]', ["my file, v=2.jsonl", "数据.jsonl"]),
        ("[a(1).jsonl,a=b]", ["a(1).jsonl", "a=b"]),
    ],
)
def test_list_of_paths_may_have_special_characters(folder: Path, typed: str, paths: list[str]) -> None:
    assert parse_value(literal_path(f"data.path={typed}")) == [str(folder / path) for path in paths]


def test_path_with_commas_is_a_sweep_where_no_file_has_that_name(folder: Path) -> None:
    assert literal_path("data.path=数据.jsonl,b.jsonl") == f"data.path='{folder}/数据.jsonl',{folder}/b.jsonl"
    os.remove("a.jsonl,b.jsonl")
    assert literal_path("data.path=a.jsonl,b.jsonl") == f"data.path={folder}/a.jsonl,{folder}/b.jsonl"


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("无.jsonl", "data.path='无.jsonl'"),
        ("new dir/x.jsonl", "data.path='new dir/x.jsonl'"),
        ("a=c", "data.path='a=c'"),
    ],
)
def test_path_that_does_not_exist_is_no_error_of_the_grammar(folder: Path, typed: str, named: str) -> None:
    assert literal_path(f"data.path={typed}") == named  # the check of the data files names what is missing


@pytest.mark.parametrize("typed", ["my file, v=3.jsonl", "[a.jsonl,数据2.jsonl]"])
def test_missing_file_of_a_list_is_named(folder: Path, typed: str) -> None:
    with pytest.raises(UserError) as error:
        literal_path(f"data.path={typed}")
    assert error.value.message.startswith("no such file or folder: ") and "did you mean" in error.value.fix


@pytest.mark.parametrize(
    "override",
    [
        "data.val_path=null",
        "data.tokenizer=auto",
        "init_from=scratch",
        "data.path=${oc.env:HOME}/x",
        "data.path='${oc.env:HOME}/x y'",
    ],
)
def test_value_that_is_no_path_stays(folder: Path, override: str) -> None:
    assert absolutize_path(override) == override
