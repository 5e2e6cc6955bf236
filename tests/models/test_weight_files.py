"""Files of weights in model folders: the ones that transformers takes, read without executing anything; nothing missing
is made up.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import write_folder
from safetensors.torch import load_file, save_file
from tiny_models import max_difference
from torch import Tensor
from transformers_families import write_family

from common.errors import UserError
from models.formats.json_files import read_model_config
from models.formats.load import load_model, load_weights
from models.formats.stored_size import check_size_of_weights, weight_files

IDS = torch.arange(3, 40)[None]


@pytest.fixture(params=["qwen3", "olmo2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of the decoder, or of transformers."""
    (write_folder if request.param == "qwen3" else write_family)(tmp_path / "model", request.param)
    return tmp_path / "model"


def changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_torch_files(folder: Path, count: int) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if count == 1:
        return torch.save(state, folder / "pytorch_model.bin")
    index = {name: f"pytorch_model-{i % count + 1:05d}-of-{count:05d}.bin" for i, name in enumerate(state)}
    for file in set(index.values()):
        torch.save({name: state[name] for name in state if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("count", [1, 3])
def test_torch_files_load_like_safetensors(folder: Path, count: int) -> None:
    with torch.no_grad():
        expected = load_model(folder)(IDS).logits
        as_torch_files(folder, count)
        check_size_of_weights(read_model_config(folder), folder)
        assert max_difference(load_model(folder)(IDS).logits, expected) == 0


def test_safetensors_come_before_torch_files_and_other_variants_are_not_read(folder: Path) -> None:
    expected = load_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    (folder / "model.fp16.safetensors").write_bytes(b"no weights")
    assert weight_files(folder) == [folder / "model.safetensors"] and load_weights(folder).keys() == expected.keys()


class Executed:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"a": Executed()}, protocol=2), b"PK\x03\x04" + bytes(100), b"", pickle.dumps([1], protocol=2)],
)
def test_torch_file_that_holds_no_weights_is_refused_and_not_executed(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match="not a file of weights|more than weights"):
        load_weights(folder)
    assert not Path("executed").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", "sub/model.safetensors"])
def test_index_names_files_of_its_folder_only(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="weight_map must give the name of a file in this folder"):
        load_weights(folder)


def test_missing_file_of_an_index_is_named(folder: Path) -> None:
    as_torch_files(folder, 3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(
        UserError, match=r"1 of 3 files of weights are missing, e\.g\. pytorch_model-00002-of-00003\.bin"
    ):
        load_weights(folder)


def test_one_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors")
    with pytest.raises(UserError, match="two files of weights have a tensor"):
        load_weights(folder)


def test_weights_without_a_head_are_refused_and_not_initialized(folder: Path) -> None:
    changed(folder, lambda state: state.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"missing") as error:
        load_model(folder)
    assert "lm_head.weight" in error.value.message


def test_missing_unknown_and_misshaped_tensors_are_listed(folder: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        del state["model.layers.1.self_attn.q_proj.weight"]
        state["model.layers.7.extra.weight"] = torch.zeros(2)
        state["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(3, 5)

    with pytest.raises(UserError) as error:
        load_model(changed(folder, change))
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.7.extra.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ):
        assert name in error.value.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    changed(folder, lambda state: state.update({name: state[name].to(dtype)}))
    with pytest.raises(UserError, match=rf"{name} is stored as \w+: quantized weights are not read"):
        load_weights(folder)


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes", "mxfp4"])
def test_quantized_config_is_refused(folder: Path, method: str) -> None:
    fields = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="quantized weights cannot be trained"):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["starcoder2", "qwen3"])
def test_tied_model_with_another_head_in_its_file_is_refused(name: str, tmp_path: Path) -> None:
    if name == "qwen3":
        write_folder(tmp_path, name, tie_word_embeddings=True)
    else:
        write_family(tmp_path, name)
    changed(tmp_path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"] + 1}))
    with pytest.raises(UserError, match="these weights are not tied") as error:
        load_model(tmp_path)
    assert '"tie_word_embeddings": false in the config.json' in error.value.fix
    fields = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert not load_model(tmp_path).cfg.tie_word_embeddings
