"""Splits of a folder: `train-*`, `validation-*` and `test-*` are what their names say."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.sources.files import ReadOptions
from data.sources.splits import resolve_data_files, split_of


@pytest.fixture
def files(tmp_path, monkeypatch):
    """`files(*names)` writes one-row files, makes their folder the current one, and returns a function of data.path and data.val_path."""

    def files(*names):
        monkeypatch.chdir(tmp_path)
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"text": name}) + "\n")
        return resolve

    def resolve(paths, val_path="auto"):
        found = resolve_data_files(paths if isinstance(paths, list) else [paths], val_path, ReadOptions())
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
        "set/train-00000-of-00002.jsonl", "set/train-00001-of-00002.jsonl", "set/validation.jsonl", "set/test.jsonl", "set/extra.jsonl", "set/README.md"
    )
    train, validation, notes = resolve("set")
    assert train == ["set/train-00000-of-00002.jsonl", "set/train-00001-of-00002.jsonl"] and validation == ["set/validation.jsonl"]
    assert notes == [
        "set: by their names, trains on train-00000-of-00002.jsonl, train-00001-of-00002.jsonl, validates on validation.jsonl, leaves out test.jsonl, extra.jsonl"
    ]
    for val_path in (None, "set/extra.jsonl"):
        train, validation, notes = resolve("set", val_path)
        assert len(train) == 2 and validation == [val_path] * (val_path is not None) and "leaves out validation.jsonl, test.jsonl" in notes[0]


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
    assert resolve("pretrain_512.jsonl")[:2] == (["pretrain_512.jsonl"], []) and resolve("data_1.jsonl")[:2] == (["data_1.jsonl"], [])


def test_splits_without_training_files_use_the_others_and_never_the_test_file(files):
    resolve = files("a.jsonl", "b.jsonl", "b_val.jsonl", "test.jsonl")
    train, validation, notes = resolve(".")
    assert (train, validation) == (["a.jsonl", "b.jsonl"], ["b_val.jsonl"]) and notes == [
        ".: by their names, trains on a.jsonl, b.jsonl, validates on b_val.jsonl, leaves out test.jsonl"
    ]
    assert resolve(["a.jsonl", "b.jsonl"]) == (["a.jsonl", "b.jsonl"], ["b_val.jsonl"], [])


def test_splits_without_a_file_to_train_on_are_refused(files):
    with pytest.raises(UserError) as error:
        files("set/test.jsonl", "set/dev.jsonl")("set")
    assert "no file to train on" in error.value.message and error.value.setting == "data.path=set" and error.value.fix.startswith("data.path=set/dev.jsonl")


def test_splits_of_a_validation_folder_are_its_validation_files(files):
    resolve = files("train.jsonl", "set/train.jsonl", "set/dev.jsonl", "set/test.jsonl", "plain/a.jsonl")
    assert resolve("train.jsonl", "set")[1] == ["set/dev.jsonl"] and resolve("train.jsonl", "plain")[1] == ["plain/a.jsonl"]
