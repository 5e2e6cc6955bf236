"""Models in the formats of others: Hugging Face and PEFT folders, MiniMind's .pth files; and the `model/` of our own runs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from models.decoder import Decoder
from models.formats.hf_config import read_hf_config
from models.formats.minimind import read_pth
from models.formats.peft import base_model_of, is_adapter_dir, merge_adapter_into, read_adapter
from models.formats.tensors import EMBEDDING_KEY, HEAD_KEY, read_tensors, tensor_table
from models.lora import add_lora, load_adapter, merge_adapters


def load_model(folder: Path) -> Decoder:
    """The model of a run's, a Hugging Face or a PEFT folder in fp32, for inference; an adapter stays switchable beside its base."""
    folder = _model_folder(folder)
    if is_adapter_dir(folder):
        model = load_model(base_model_of(folder))
        merge_adapters(model)  # a base that is itself an adapter over another base
        cfg, state = read_adapter(folder)
        add_lora(model, cfg)
        try:
            load_adapter(model, {f"{path}.lora.default.{matrix}": tensor for (path, matrix), tensor in state.items()})
        except KeyError as error:
            raise UserError("this adapter was not made for its base", str(folder), str(error.args[0])) from error
    else:
        model = Decoder(read_hf_config(folder))
        load_into(model, load_weights(folder), str(folder))
    return model.eval()


def load_weights(source: Path) -> dict[str, Tensor]:
    """fp32 weights by name from a run, a Hugging Face folder, a PEFT folder (merged into its base) or a MiniMind .pth file."""
    if source.is_file():
        return read_pth(source)
    folder = _model_folder(source)
    if is_adapter_dir(folder):
        return merge_adapter_into(load_weights(base_model_of(folder)), folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(
            "there are no weights here", str(source), "give the folder of a finished run, a Hugging Face folder with model.safetensors, or a .pth file"
        )
    return {name: tensor.float() for file in files for name, tensor in read_tensors(file).items()}


def load_into(model: Decoder, state: dict[str, Tensor], source: str) -> None:
    """Fill every tensor of `model` from `state`; ValueError(what, where, fix) with a table if a name or a shape differs."""
    own = model.state_dict()
    if model.cfg.tie_word_embeddings and EMBEDDING_KEY in state:
        # Files hold a tied tensor once or twice; where two differ, one of them would be lost without a word.
        state = {HEAD_KEY: state[EMBEDDING_KEY]} | state
        if not torch.equal(state[HEAD_KEY], state[EMBEDDING_KEY]):
            raise UserError(f"{HEAD_KEY} is not {EMBEDDING_KEY}: these weights are not tied", source, "set model.tie_word_embeddings=false")
    faults = {
        "missing": [f"{name} {tuple(own[name].shape)}" for name in own if name not in state],
        "not of this model": [f"{name} {tuple(state[name].shape)}" for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, not {tuple(own[name].shape)}" for name in own if name in state and own[name].shape != state[name].shape
        ],
    }
    if any(faults.values()):
        raise UserError(tensor_table(faults), source, "choose the model=... these weights were made with, or other weights")
    model.load_state_dict(state)


def _model_folder(source: Path) -> Path:
    """`source`, or the finished model inside it where it is a run."""
    return source / "model" if (source / "model").is_dir() else source
