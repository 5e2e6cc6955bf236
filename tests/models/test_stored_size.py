"""Sizes that a folder claims are compared with its files and with the memory before anything is allocated."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, LLAMA, TOKENIZER, TOP_TWO, YARN, config, lora_config, random_model

from common.errors import UserError
from common.limits import machine_memory
from models.config import MAX_TENSORS
from models.formats.load import load_model, load_weights
from models.formats.save import save_adapter, save_model
from models.formats.stored_size import MAX_HEADER_BYTES, stored_size
from models.language_model import create_model
from models.lora import add_lora

LORA = lora_config(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "down_proj"])
VARIANTS: list[dict[str, Any]] = [
    *({}, LLAMA, EXPERTS, TOP_TWO, YARN, {"tie_word_embeddings": False}),
    {"qk_norm": False, "attention_bias": True, "attention_out_bias": True},
    {"qk_norm": False, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", random_model(), config(), TOKENIZER)
    return tmp_path / "model"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_header(path: Path, header: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


@pytest.mark.parametrize("changes", VARIANTS)
def test_size_from_the_settings_is_that_of_the_model(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    parameters = list(model.parameters())
    assert model.cfg.size() == (sum(p.numel() for p in parameters), len(parameters))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**7},
        {"vocab_size": 2**40},
        {"hidden_size": 2**30},
        {"intermediate_size": 2**40},
        {"num_hidden_layers": 10**30},
        {"head_dim": 2**50},
    ],
)
def test_config_json_of_another_size_than_the_weights_is_refused(changes: dict[str, int], folder: Path) -> None:
    rewrite(folder / "config.json", **changes)
    with pytest.raises(UserError, match="the weights do not fit the model"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "64"},
        {"vocab_size": 64.5},
        {"num_hidden_layers": True},
        {"hidden_size": None},
        {"rms_norm_eps": "0"},
        {"num_hidden_layers": []},
    ],
)
def test_config_json_with_a_field_of_another_type_is_refused(changes: dict[str, Any], folder: Path) -> None:
    rewrite(folder / "config.json", **changes)
    with pytest.raises(UserError, match="a field is missing or has another type"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**7}, f"at most {MAX_TENSORS:,}"),
        ({"vocab_size": 2**40}, "GiB in fp32"),
        ({"hidden_size": 2**40}, "GiB in fp32"),
    ],
)
def test_model_that_cannot_fit_into_memory_is_refused_before_it_is_created(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        create_model(config(**changes))


def test_adapters_that_cannot_fit_into_memory_are_refused() -> None:
    with pytest.raises(UserError, match="more than fit into"):
        add_lora(random_model(), lora_config(rank=machine_memory(), alpha=1.0, dropout=0.0, targets=["q_proj"]))


def test_rank_of_adapter_config_must_be_that_of_the_tensors(tmp_path: Path, folder: Path) -> None:
    model = random_model()
    add_lora(model, LORA)
    save_adapter(tmp_path / "adapter", model, LORA, str(folder), TOKENIZER)
    rewrite(tmp_path / "adapter" / "adapter_config.json", r=10**9)
    with pytest.raises(UserError, match="no adapter of rank r=1000000000"):
        load_model(tmp_path / "adapter")


def test_adapter_of_another_width_is_refused_before_it_is_multiplied(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    model = random_model()
    add_lora(model, LORA)
    save_adapter(tmp_path / "adapter", model, LORA, str(folder), TOKENIZER)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{prefix}A.weight": torch.zeros(4, 10**6), f"{prefix}B.weight": torch.zeros(10**6, 4)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    for load in (load_model, load_weights):
        with pytest.raises(UserError, match="the adapter does not fit its base model"):
            load(tmp_path / "adapter")


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"{" * 100_000, id="deep"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}', id="negative shape"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 0]}}', id="no shape"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 0]}}', id="float"),
        pytest.param(b'{"a": 1}', id="no entry"),
        pytest.param(b"[]", id="list"),
    ],
)
def test_header_of_weights_that_is_damaged_is_refused(header: bytes, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(UserError, match="the file of weights is damaged"):
        stored_size([tmp_path / "model.safetensors"])


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 2**63, 100])
def test_header_longer_than_the_file_or_the_limit_is_refused(length: int, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", b"{}", length)
    with pytest.raises(UserError, match="its header has"):
        stored_size([tmp_path / "model.safetensors"])


def test_tensors_that_are_larger_than_their_file_are_refused(folder: Path) -> None:
    write_header(
        folder / "model.safetensors",
        b'{"a": {"dtype": "F32", "shape": [1048576, 1048576], "data_offsets": [0, 4398046511104]}}',
    )
    with pytest.raises(UserError, match="the file of weights is damaged"):
        load_model(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(4398046511104 + 200)
    with pytest.raises(UserError, match="the file of weights is damaged.*the file has 4,398"):
        load_model(folder)


def test_weights_of_another_size_are_refused_before_they_are_read(folder: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1048576, 1048576], "data_offsets": [0, 4398046511104]}}'
    write_header(folder / "model.safetensors", header)
    with open(folder / "model.safetensors", "r+b") as file:  # on no disk space
        file.truncate(4398046511104 + 8 + len(header))
    with pytest.raises(UserError, match="the weights do not fit the model"):
        load_model(folder)


def test_pth_with_tensors_larger_than_the_file_is_refused(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "expanded.pth")
    torch.save({"model.norm.weight": torch.zeros(1000).to_sparse()}, tmp_path / "sparse.pth")
    torch.save({"model.norm.weight": torch.zeros(10**6)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "compressed.pth", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for entry in plain.infolist():
            compressed.writestr(entry.filename, plain.read(entry))
    assert list(load_weights(tmp_path / "plain.pth")) == ["model.norm.weight"]
    for name in ("expanded", "sparse", "compressed"):
        with pytest.raises(UserError, match="not a file of weights"):
            load_weights(tmp_path / f"{name}.pth")
