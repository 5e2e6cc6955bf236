"""Splits of a folder: `train-*`, `validation-*` and `test-*` are what their names say."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.sources.files import ReadOptions
from data.sources.splits import resolve_data_files, resolve_evaluation_files, split_of


@pytest.fixture
def files(tmp_path, monkeypatch):
    """`files(*names)` writes one-row files, makes their folder the current one, and returns a function of data.path and
    data.val_path.
    """

    def files(*names):
        monkeypatch.chdir(tmp_path)
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"text": name}) + "\n")
        return resolve

    def resolve(paths, val_path="auto"):
        found = resolve_data_files(
            paths if isinstance(paths, list) else [paths], {"": val_path} if val_path else {}, ReadOptions()
        )
        train, validation = (
            sorted(str(source.path.absolute().relative_to(tmp_path)) for source in sources)
            for sources in ([source for group in found.train for source in group], found.validation)
        )
        return train, validation, found.notes

    return files


@pytest.mark.parametrize(
    "name, split",
    [
        ("train-00000-of-00002.parquet", "train"), ("train.jsonl.gz", "train"), ("Train_sft.jsonl", "train"), ("gsm8k_train.csv", "train"), ("train/a.jsonl", "train"),
        ("validation-00000-of-00001.parquet", "validation"), ("val.json", "validation"), ("dev.tsv", "validation"), ("x_val.jsonl", "validation"),
        ("test.csv", "test"), ("test_sft-00000-of-00001.parquet", "test"), ("test/deep/a.jsonl", "test"), ("gsm8k-test.jsonl.xz", "test"),
        ("pretrain.jsonl", None), ("a_test_of_time.txt", None), ("contest.txt", None), ("validated.txt", None), ("data_1.jsonl", None), ("latest.txt", None),
    ],
)  # fmt: skip
def test_split_of_a_file_is_in_its_name_or_folder(name, split):
    assert split_of(Path("/data") / name, Path("/data")) == split


def test_splits_of_a_folder_train_on_train_files_only(files):
    """Before: trained on all of them, the test file included."""
    resolve = files(
        "set/train-00000-of-00002.jsonl",
        "set/train-00001-of-00002.jsonl",
        "set/validation.jsonl",
        "set/test.jsonl",
        "set/extra.jsonl",
        "set/README.md",
    )
    train, validation, notes = resolve("set")
    assert train == ["set/train-00000-of-00002.jsonl", "set/train-00001-of-00002.jsonl"] and validation == [
        "set/validation.jsonl"
    ]
    assert notes == [
        "set: by their names, trains on train-00000-of-00002.jsonl, train-00001-of-00002.jsonl, validates on validation.jsonl, leaves out test.jsonl, extra.jsonl"
    ]
    for val_path in (None, "set/extra.jsonl"):
        train, validation, notes = resolve("set", val_path)
        assert (
            len(train) == 2
            and validation == [val_path] * (val_path is not None)
            and "leaves out validation.jsonl, test.jsonl" in notes[0]
        )


def test_splits_apply_to_a_glob_unless_it_names_one_of_them(files):
    resolve = files("train.jsonl", "test.jsonl", "dev.jsonl")
    assert resolve("*.jsonl")[:2] == (["train.jsonl"], ["dev.jsonl"])
    assert resolve("test*.jsonl")[:2] == (["test.jsonl"], [])
    assert resolve("test.jsonl")[:2] == (["test.jsonl"], [])  # a file that is named is what the user wants


def test_splits_beside_a_single_training_file_are_its_validation(files):
    resolve = files(
        "train.jsonl",
        "validation.jsonl",
        "test.jsonl",
        "train_b.jsonl",
        "dev_b.jsonl",
        "pretrain_512.jsonl",
        "pretrain_val.jsonl",
        "data_1.jsonl",
        "data_val.jsonl",
    )
    assert resolve("train.jsonl")[:2] == (["train.jsonl"], ["validation.jsonl"])
    assert resolve("train_b.jsonl")[:2] == (["train_b.jsonl"], ["dev_b.jsonl"])
    assert resolve("pretrain_512.jsonl")[:2] == (["pretrain_512.jsonl"], []) and resolve("data_1.jsonl")[:2] == (
        ["data_1.jsonl"],
        [],
    )


def test_splits_of_files_whose_extension_is_hidden_are_found(files):
    """Windows hides the .txt that it appends.

    Before: rows_val.jsonl.txt was no validation file of rows.jsonl.txt.
    """
    resolve = files(
        "rows.jsonl.txt",
        "rows_val.jsonl.txt",
        "my_train.jsonl.txt",
        "my_dev.jsonl.txt",
        "old.jsonl.gz",
        "old_val.jsonl.gz",
    )
    for train, validation in (
        ("rows.jsonl.txt", "rows_val.jsonl.txt"),
        ("my_train.jsonl.txt", "my_dev.jsonl.txt"),
        ("old.jsonl.gz", "old_val.jsonl.gz"),
    ):
        assert resolve(train)[:2] == ([train], [validation])


def test_splits_without_training_files_never_use_the_test_file(files):
    resolve = files("a.jsonl", "b.jsonl", "b_val.jsonl", "test.jsonl")
    train, validation, notes = resolve(".")
    assert (train, validation) == (["a.jsonl", "b.jsonl"], ["b_val.jsonl"]) and notes == [
        ".: by their names, trains on a.jsonl, b.jsonl, validates on b_val.jsonl, leaves out test.jsonl"
    ]
    assert resolve(["a.jsonl", "b.jsonl"]) == (["a.jsonl", "b.jsonl"], ["b_val.jsonl"], [])


def test_splits_without_a_file_to_train_on_are_refused(files):
    with pytest.raises(UserError) as error:
        files("set/test.jsonl", "set/dev.jsonl")("set")
    assert (
        "no file to train on" in error.value.message
        and error.value.setting == "data.path=set"
        and error.value.fix.startswith("data.path=set/dev.jsonl")
    )


@pytest.mark.parametrize("path", ["x" * 300, "missing/train.jsonl"], ids=["long", "missing"])
def test_splits_of_a_missing_file_are_refused(path, files):
    """Before: a traceback, for a name that is too long."""
    with pytest.raises(UserError, match="no such file") as error:
        files()(path)
    assert error.value.setting == f"data.path={path}"


def test_splits_of_a_validation_folder_are_its_validation_files(files):
    resolve = files("train.jsonl", "set/train.jsonl", "set/dev.jsonl", "set/test.jsonl", "plain/a.jsonl")
    assert resolve("train.jsonl", "plain") == (["train.jsonl"], ["plain/a.jsonl"], [])
    assert resolve("train.jsonl", "set")[1:] == (
        ["set/dev.jsonl"],
        ["set: by their names, evaluates on dev.jsonl, leaves out train.jsonl, test.jsonl"],
    )


def test_splits_of_one_folder_for_both_name_each_file_once(files):
    """Before: the note said that the file of data.val_path is left out."""
    resolve = files("set/train.jsonl", "set/dev.jsonl", "set/test.jsonl")
    assert resolve("set", "set/test.jsonl")[1:] == (
        ["set/test.jsonl"],
        ["set: by their names, trains on train.jsonl, leaves out dev.jsonl"],
    )


def test_splits_by_folders_are_named_with_the_folder(files):
    """Before: trains on x.jsonl, validates on x.jsonl, leaves out x.jsonl."""
    notes = files("set/train/x.jsonl", "set/dev/x.jsonl", "set/test/x.jsonl")("set")[2]
    assert notes == ["set: by their names, trains on train/x.jsonl, validates on dev/x.jsonl, leaves out test/x.jsonl"]


def test_splits_do_not_take_a_validation_file_that_is_named_for_training(files):
    """Before: the second entry of data.path lost its only file, and the run ended with a traceback."""
    resolve = files("a.jsonl", "a_val.jsonl")
    train, validation, _ = resolve(["a.jsonl", "a_val.jsonl"])
    assert (train, validation) == (["a.jsonl", "a_val.jsonl"], [])
    with pytest.raises(UserError) as error:
        resolve(["a.jsonl", "a_v*.jsonl"])
    assert error.value.setting == "data.path=a_v*.jsonl" and "data.val_path=null" in error.value.fix


@pytest.mark.parametrize(
    "path, used, left_out",
    [
        ("set", ["dev.jsonl"], "train.jsonl, test.jsonl, extra.jsonl"), ("set/t*.jsonl", ["test.jsonl"], "train.jsonl"), ("two", ["test-1.jsonl"], "b.jsonl"),
        ("set/test*.jsonl", ["test.jsonl"], ""), ("set/train.jsonl", ["train.jsonl"], ""), ("plain", ["a.jsonl", "b.jsonl"], ""),
    ],
)  # fmt: skip
def test_splits_of_an_evaluation_are_never_mixed(path, used, left_out, files):
    files(
        "set/train.jsonl",
        "set/dev.jsonl",
        "set/test.jsonl",
        "set/extra.jsonl",
        "two/test-1.jsonl",
        "two/b.jsonl",
        "plain/a.jsonl",
        "plain/b.jsonl",
    )
    sources, note = resolve_evaluation_files(path, ReadOptions(), "data.path")
    assert [source.path.name for source in sources] == used
    assert note == (
        f"{path}: by their names, evaluates on {', '.join(used)}, leaves out {left_out}" if left_out else ""
    )


def test_splits_of_a_folder_name_the_files_that_are_not_read(files, tmp_path):
    """Before: a file with an unknown extension was left out, without a note."""
    kinds = "files without a known extension, linked folders and broken links"
    resolve = files(
        "set/a.jsonl", "set/more/b.xlsx", "set/part-00001", "set/README.md", "set/.gitattributes", "set/LICENSE"
    )
    assert resolve("set") == (
        ["set/a.jsonl"],
        [],
        [f"set: leaves out {kinds}: more/b.xlsx, part-00001"],
    )
    (tmp_path / "other").mkdir()
    for name, target in (("linked", "other"), ("linked.jsonl", "other"), ("broken.jsonl", "nothing")):
        (tmp_path / "set" / name).symlink_to(tmp_path / target)
    (tmp_path / "set" / "more" / "folder.jsonl").mkdir()
    paths, _, notes = resolve("set")
    assert paths == ["set/a.jsonl"]  # a link by the name of a file was refused
    assert notes == [f"set: leaves out {kinds}: broken.jsonl, linked, linked.jsonl and 2 more"]


def test_splits_of_an_evaluation_that_are_unclear_are_refused(files):
    files("set/train.jsonl", "set/extra.jsonl")
    with pytest.raises(UserError, match="unclear") as error:
        resolve_evaluation_files("set", ReadOptions(), "data.path")
    assert (error.value.setting, error.value.fix) == ("data.path=set", "data.path=set/extra.jsonl")
