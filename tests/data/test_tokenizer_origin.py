"""data.tokenizer: which folder it means, and that a tokenizer with other tokens than the weights is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from data.config import DataConfig
from data.tokenize.origin import SAMPLE_TOKENIZER, copy_tokenizer, resolve_tokenizer, tokenizer_of_weights
from data.tokenize.tokenizer import Tokenizer
from runner.config.compose import compose_config


@pytest.fixture(scope="module")
def data() -> DataConfig:
    return compose_config([]).data


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of 6,400 tokens like the sample's, of which two have other ids."""
    folder = shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "other")
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


def with_tokenizer(data: DataConfig, setting: Path | str, **changes: object) -> DataConfig:
    return dataclasses.replace(data, tokenizer=str(setting), **changes)


def test_tokenizer_auto_is_that_of_the_folder_and_the_samples_from_scratch(
    data: DataConfig, other_tokenizer: Path
) -> None:
    assert data.tokenizer == "auto"
    assert resolve_tokenizer(data, str(other_tokenizer)) == other_tokenizer
    assert resolve_tokenizer(data, "scratch") == SAMPLE_TOKENIZER


@pytest.mark.parametrize("layout", ["run", "pth beside", "pth of minimind", "adapter"])
def test_tokenizer_of_weights_is_found_where_each_format_has_it(
    tmp_path: Path, other_tokenizer: Path, layout: str
) -> None:
    if layout == "run":
        weights, expected = tmp_path / "run", shutil.move(other_tokenizer, tmp_path / "run" / "model")
    elif layout == "adapter":
        weights, expected = tmp_path / "adapter", other_tokenizer
        weights.mkdir()
        (weights / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other_tokenizer)}))
    else:
        weights = (other_tokenizer if layout == "pth beside" else tmp_path / "out") / "full_sft_768.pth"
        weights.parent.mkdir(exist_ok=True)
        weights.touch()
        expected = other_tokenizer if layout == "pth beside" else shutil.move(other_tokenizer, tmp_path / "model")
    assert tokenizer_of_weights(weights) == Path(expected)


def test_tokenizer_adapters_of_each_other_have_none(tmp_path: Path) -> None:
    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(tmp_path / base)})
        )
    assert tokenizer_of_weights(tmp_path / "one") is None


@pytest.mark.parametrize("file, in_fix", [(None, "data.tokenizer=DIR"), ("tokenizer.model", "save_pretrained")])
def test_weights_without_a_tokenizer_are_refused_with_the_way_out(
    data: DataConfig, tmp_path: Path, file: str | None, in_fix: str
) -> None:
    (tmp_path / "weights").mkdir()
    if file:
        (tmp_path / "weights" / file).touch()
    with pytest.raises(UserError, match="come without a tokenizer") as error:
        resolve_tokenizer(data, str(tmp_path / "weights"))
    assert in_fix in error.value.fix and "data.tokenizer=DIR" in error.value.fix
    assert resolve_tokenizer(with_tokenizer(data, SAMPLE_TOKENIZER), str(tmp_path / "weights")) == SAMPLE_TOKENIZER


def test_typed_tokenizer_of_the_same_size_with_other_tokens_is_refused(data: DataConfig, other_tokenizer: Path) -> None:
    with pytest.raises(UserError, match="6,398 of 6,400 and 6,400 tokens have the same id") as error:
        resolve_tokenizer(with_tokenizer(data, SAMPLE_TOKENIZER), str(other_tokenizer))
    assert "data.tokenizer=auto" in error.value.fix and "init_from=scratch" in error.value.fix
    assert resolve_tokenizer(with_tokenizer(data, SAMPLE_TOKENIZER), "scratch") == SAMPLE_TOKENIZER


@pytest.mark.parametrize("part", ["merges", "normalizer", "pre_tokenizer"])
def test_typed_tokenizer_that_splits_texts_in_another_way_is_refused(
    data: DataConfig, tmp_path: Path, part: str
) -> None:
    folder = shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "other")
    stored = json.loads((folder / "tokenizer.json").read_text())
    if part == "merges":
        stored["model"]["merges"].reverse()
    else:
        stored[part] = (
            {"type": "NFC"}
            if part == "normalizer"
            else {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        )
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="split into them in another way"):
        resolve_tokenizer(with_tokenizer(data, folder), str(SAMPLE_TOKENIZER))


def test_typed_tokenizer_with_another_template_has_the_same_tokens(data: DataConfig, tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    assert resolve_tokenizer(with_tokenizer(data, folder), str(SAMPLE_TOKENIZER)) == folder


def test_tokenizer_written_again_by_transformers_is_the_same_one(data: DataConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoTokenizer.from_pretrained(SAMPLE_TOKENIZER).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (SAMPLE_TOKENIZER / "tokenizer.json").read_bytes()
    assert resolve_tokenizer(with_tokenizer(data, tmp_path), str(SAMPLE_TOKENIZER)) == tmp_path


def test_minimind_tokenizer_is_found_from_the_data_of_its_checkout(
    data: DataConfig, tmp_path: Path, other_tokenizer: Path
) -> None:
    minimind = with_tokenizer(data, "minimind", path=str(tmp_path / "minimind" / "dataset" / "pretrain_t2t_mini.jsonl"))
    with pytest.raises(UserError, match="MiniMind's tokenizer is not found") as error:
        resolve_tokenizer(minimind, "scratch")
    assert "data.tokenizer=DIR/model" in error.value.fix and str(tmp_path / "minimind" / "model") in error.value.message
    found = shutil.move(other_tokenizer, tmp_path / "minimind" / "model")
    assert resolve_tokenizer(minimind, "scratch") == Path(found)
    assert resolve_tokenizer(minimind, str(SAMPLE_TOKENIZER)) == SAMPLE_TOKENIZER  # the weights decide


@pytest.mark.parametrize("stage", ["pretrain", "sft", "lora", "dpo"])
def test_minimind_experiments_use_its_tokenizer(stage: str) -> None:
    assert compose_config([f"experiment=minimind_{stage}", "data.path=rows.jsonl"]).data.tokenizer == "minimind"


def test_tokenizer_copy_replaces_the_copy_of_an_earlier_launch(tmp_path: Path, other_tokenizer: Path) -> None:
    (other_tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    for source in (other_tokenizer, SAMPLE_TOKENIZER):
        copy_tokenizer(source, tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").fingerprint == Tokenizer.load(SAMPLE_TOKENIZER).fingerprint
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_tokenizer_copy_has_the_generation_config_of_the_weights(tmp_path: Path, other_tokenizer: Path) -> None:
    """A typed tokenizer folder and an adapter may have none; what a tokenizer folder says about sampling is not about a
    model from scratch.
    """
    settings = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [2, 0]}
    adapter, base, copy = tmp_path / "adapter", tmp_path / "base", tmp_path / "copy"
    adapter.mkdir(), base.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (base / "generation_config.json").write_text(json.dumps(settings))
    copy_tokenizer(other_tokenizer, copy, str(adapter))
    assert json.loads((copy / "generation_config.json").read_text()) == settings
    (other_tokenizer / "generation_config.json").write_text(json.dumps(settings))
    copy_tokenizer(other_tokenizer, copy)
    assert json.loads((copy / "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.json", "chat_template.jinja"])
def test_tokenizer_file_that_is_a_link_to_the_outside_is_not_copied(
    tmp_path: Path, other_tokenizer: Path, name: str
) -> None:
    (other_tokenizer / name).unlink(missing_ok=True)
    (tmp_path / "secret.key").write_text("{}")
    (other_tokenizer / name).symlink_to(tmp_path / "secret.key")
    with pytest.raises(UserError, match="this is a link") as caught:
        copy_tokenizer(other_tokenizer, tmp_path / "run" / "tokenizer")
    assert caught.value.setting == str(other_tokenizer / name) and not (tmp_path / "run" / "tokenizer").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_tokenizer_opens_regular_files_only(other_tokenizer: Path, make: Callable[[Path], None]) -> None:
    make(other_tokenizer / "generation_config.json")
    with pytest.raises(UserError, match="neither a regular file|this is a link"):
        Tokenizer.load(other_tokenizer)


def test_tokenizer_folder_of_a_run_that_is_a_link_is_refused(tmp_path: Path, other_tokenizer: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer").symlink_to(other_tokenizer)
    with pytest.raises(UserError, match="this is a link"):
        tokenizer_of_weights(tmp_path / "run")


def test_tokenizer_of_the_hub_cache_is_read_through_links_copied_as_files(
    tmp_path: Path, other_tokenizer: Path
) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(other_tokenizer.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "typed").symlink_to(snapshot)
    for typed in (snapshot, tmp_path / "typed"):
        assert Tokenizer.load(typed).fingerprint == Tokenizer.load(other_tokenizer).fingerprint
    copy_tokenizer(snapshot, tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy") and not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())
    (snapshot / "added_tokens.json").symlink_to("../../../secret.key")
    (tmp_path / "secret.key").write_text("{}")
    with pytest.raises(UserError, match="this is a link"):  # out of the cache of this model
        copy_tokenizer(snapshot, tmp_path / "copy")
