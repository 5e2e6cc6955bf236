"""Weights that are not finite, or of an integer type, are refused by name: by every reader of weights, and by every
command that loads them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command_fixtures import TINY_MODEL, TINY_RUN, Call
from engine_fixtures import pairwise
from tiny_models import lora_config
from torch import Tensor
from transformers_families import write_family

from common.errors import UserError
from models.formats.load import continue_adapter, load_into, load_model, load_weights
from models.formats.save import save_adapter
from models.language_model import create_model
from models.lora import add_lora
from runner.checkpoint.atomic_dir import MANIFEST_FILE, discard_dir, verify_dir, write_atomic_dir

# both are damaged: the first by name is reported
NORM, LATER = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
MATRIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def one(value: float) -> Callable[[Tensor], Tensor]:
    def damage(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return damage


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": one(float("nan")),
    "infinity": one(float("inf")),
    "float64 beyond float32": lambda tensor: tensor.double() * 0 + 1e300,
    "int64": lambda tensor: (tensor * 100).long(),
    "bool": lambda tensor: tensor > 0,
}
REASON = r"not finite|stored as \w+|of an integer type|of another type|in the checkpoint"
damages = pytest.mark.parametrize("damage", DAMAGES)


def damaged(tensors: dict[str, Tensor], damage: str, *names: str) -> dict[str, Tensor]:
    assert set(names) <= tensors.keys()
    return {name: DAMAGES[damage](tensor) if name in names else tensor for name, tensor in tensors.items()}


def change(file: Path, damage: str, *names: str) -> None:
    safetensors.torch.save_file(damaged(safetensors.torch.load_file(file), damage, *names), file, {"format": "pt"})


def check_refused(source: Path, name: str, read: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=REASON) as error:
        read()
    assert name in error.value.message and str(error.value.setting).startswith(str(source)), error.value.args


def read_both_ways(folder: Path, family: str | None = None) -> list[Callable[[], Any]]:
    """Reads for inference, and for a training that starts from the folder."""

    def initial() -> None:
        model = create_model(load_config(folder, family))
        load_into(model, load_weights(folder, family or model.cfg.family), str(folder))

    return [lambda: load_model(folder, family), initial]


def load_config(folder: Path, family: str | None) -> Any:
    from models.formats.json_files import read_config_of_weights

    return read_config_of_weights(folder, family)


@pytest.mark.parametrize(
    ("damage", "family", "file"),
    pairwise([*DAMAGES], [None, "transformers"], ["model.safetensors", "pytorch_model.bin"]),
)
def test_damaged_tensor_of_a_model_folder_is_refused(
    file: str, family: str | None, damage: str, hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "folder")
    change(folder / "model.safetensors", damage, NORM, LATER)
    if file != "model.safetensors":
        torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / file)
        (folder / "model.safetensors").unlink()
    for read in read_both_ways(folder, family):
        check_refused(folder, NORM, read)


@damages
def test_damaged_tensor_of_a_minimind_file_is_refused(damage: str, hf_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "full_sft_32.pth"
    torch.save(damaged(safetensors.torch.load_file(hf_folder / "model.safetensors"), damage, NORM, LATER), path)
    model = load_model(hf_folder)
    check_refused(path, NORM, lambda: load_into(model, load_weights(path), str(path)))


@pytest.fixture
def adapter(hf_folder: Path, tmp_path: Path) -> Path:
    base, cfg = shutil.copytree(hf_folder, tmp_path / "base"), lora_config(targets=["q_proj", "up_proj"])
    add_lora(model := load_model(base), cfg)
    save_adapter(tmp_path / "adapter", model, cfg, str(base), base)
    return tmp_path / "adapter"


@damages
def test_damaged_tensor_of_an_adapter_is_refused(damage: str, adapter: Path) -> None:
    change(adapter / "adapter_model.safetensors", damage, MATRIX)
    base = load_model(adapter.parent / "base")
    for read in (*read_both_ways(adapter), lambda: continue_adapter(base, adapter, 0.0)):
        check_refused(adapter, MATRIX, read)


@damages
def test_damaged_tensor_of_a_base_model_is_refused_in_the_base_model(damage: str, adapter: Path) -> None:
    """Both tensors are merged with a matrix of the adapter, or stay as they are."""
    base = adapter.parent / "base"
    change(base / "model.safetensors", damage, NORM, LATER)
    for read in read_both_ways(adapter):
        check_refused(base, NORM, read)


@damages
def test_damaged_buffer_of_a_transformers_model_is_refused(damage: str, tmp_path: Path) -> None:
    write_family(folder := tmp_path / "folder", "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    change(folder / "model.safetensors", damage, name)
    for read in read_both_ways(folder):
        check_refused(folder, name, read)


def test_tensor_that_the_model_does_not_read_may_have_any_value(tmp_path: Path) -> None:
    """Published folders of Pythia have masks of bool, and -inf, beside their weights."""
    write_family(folder := tmp_path / "folder", "gpt_neox")
    file, expected = folder / "model.safetensors", load_model(folder).state_dict()
    mask = torch.ones(1, 1, 8, 8).tril().bool()
    tensors = safetensors.torch.load_file(file) | {"gpt_neox.layers.0.attention.bias": mask}
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(float("-inf"))
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model(folder).state_dict().items())


def rewrite_checkpoint(folder: Path, damage: str) -> None:
    """Damage the weights of a checkpoint and write its checksums again: they cannot tell."""
    change(folder / "model.safetensors", damage, NORM, LATER)
    fields = {
        key: value
        for key, value in json.loads((folder / MANIFEST_FILE).read_text()).items()
        if key not in ("files", "name", "sha256")
    }
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}
    discard_dir(folder)
    write_atomic_dir(folder.parent, folder.name, files, fields)
    assert verify_dir(folder) is None


def check_refusing_commands(source: Path, shown: str, name: str, call_command: Call, rows: str) -> None:
    commands = {
        "chat.py": ["prompt=hello", "device=cpu"],
        "evaluate.py": [rows, "metric=perplexity", "device=cpu"],
        "export.py": ["to=exported"],
        "serve.py": ["port=0", "device=cpu"],
    }
    for command, arguments in commands.items():
        ended = call_command(command, f"run={source}", *arguments)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, (command, ended)
        assert (
            re.search(rf"error: .*({REASON})", ended.stderr, re.DOTALL)
            and name in ended.stderr
            and shown in ended.stderr
        ), (command, ended)
    assert not Path("exported").exists()


@pytest.mark.slow
def test_commands_refuse_a_damaged_model_folder(
    hf_folder: Path, workspace: Path, rows: str, call: Call, call_command: Call
) -> None:
    change(shutil.copytree(hf_folder, folder := workspace / "folder") / "model.safetensors", "NaN", NORM, LATER)
    check_refusing_commands(folder, str(folder), NORM, call_command, rows)
    ended = call(
        *(each for each in TINY_RUN if each not in TINY_MODEL), rows, f"init_from={folder}", "hydra.run.dir=out"
    )
    assert ended.returncode == 2 and NORM in ended.stderr and str(folder) in ended.stderr, ended


@pytest.mark.slow
def test_commands_refuse_a_damaged_adapter(
    adapter: Path, workspace: Path, rows: str, call: Call, call_command: Call
) -> None:
    change(adapter / "adapter_model.safetensors", "int64", MATRIX)
    check_refusing_commands(adapter, str(adapter), MATRIX, call_command, rows)
    for stage in ([], ["stage=lora", "stage.data_format=text", "stage.lora.continue_adapter=true"]):
        ended = call(
            *stage,
            *(each for each in TINY_RUN if each not in TINY_MODEL),
            rows,
            f"init_from={adapter}",
            "hydra.run.dir=out",
        )
        assert ended.returncode == 2 and MATRIX in ended.stderr, ended


@pytest.mark.slow
def test_training_refuses_a_damaged_minimind_file(hf_folder: Path, workspace: Path, rows: str, call: Call) -> None:
    tensors = {
        name: tensor.half() for name, tensor in safetensors.torch.load_file(hf_folder / "model.safetensors").items()
    }
    torch.save(damaged(tensors, "NaN", NORM, LATER), path := workspace / "full_sft_32.pth")
    ended = call(
        *(each for each in TINY_RUN if each not in TINY_MODEL),
        rows,
        f"init_from={path}",
        f"data.tokenizer={hf_folder}",
        "hydra.run.dir=out",
    )
    assert ended.returncode == 2 and NORM in ended.stderr, ended


@pytest.mark.slow
def test_commands_refuse_a_damaged_checkpoint(workspace: Path, rows: str, call: Call, call_command: Call) -> None:
    assert call(*TINY_RUN, rows, "hydra.run.dir=run").returncode == 0
    checkpoint = next((workspace / "run" / "checkpoints").glob("step-*"))
    rewrite_checkpoint(checkpoint, "int64")
    check_refusing_commands(checkpoint, checkpoint.name, NORM, call_command, rows)
    for arguments in (
        ("resume=run", "train.max_steps=4"),
        (*(each for each in TINY_RUN if each not in TINY_MODEL), rows, f"init_from={checkpoint}"),
    ):
        ended = call(*arguments)
        assert ended.returncode == 2 and NORM in ended.stderr and checkpoint.name in ended.stderr, ended
