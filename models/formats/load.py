"""Read models and weights: the `model/` of a run, Hugging Face and PEFT folders, MiniMind .pth files."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.guarded_files import DOWNLOAD_HINT, check_source_file
from models.config import LoraConfig, ModelConfig
from models.families.transformers import TransformersConfig
from models.formats.json_files import (
    base_model_of,
    family_of_base,
    is_adapter_dir,
    model_dir,
    read_config_of_weights,
    read_model_config,
)
from models.formats.peft import StoredAdapter, read_adapter
from models.formats.stored_size import check_size_of_weights, weight_files
from models.formats.tensor_files import (
    PTH_HINT,
    check_finite,
    read_tensors,
    read_torch_file,
    to_decoder_names,
    to_floats,
)
from models.language_model import LanguageModel, create_model
from models.layers.adapter import weight_shape
from models.lora import (
    add_adapters,
    add_lora,
    check_adapters_are_called,
    linear_layers_of,
    merge_adapters,
)

HEAD_KEY, EMBEDDING_KEY = "lm_head.weight", "model.embed_tokens.weight"  # the two names of a tied weight
MAX_NAMES = 6  # tensors that an error names of each kind


def load_model(source: Path, family: str | None = None) -> LanguageModel:
    """Return the fp32 model of what `load_weights` reads, for inference; an adapter is not merged and can be disabled."""
    folder = model_dir(source)
    if is_adapter_dir(folder):
        model = load_model(base_model_of(folder), family_of_base(folder, family))
        merge_adapters(model)  # if the base model is itself an adapter of another base model
        add_stored_adapter(model, read_adapter(folder), folder)
    else:
        model = model_with_weights(read_config_of_weights(folder, family), folder)
    return model.eval()


def model_with_weights(cfg: ModelConfig, source: Path) -> LanguageModel:
    """Return an fp32 model of `cfg` with the weights that `load_weights` reads from `source`."""
    check_size_of_weights(cfg, source)
    model = create_model(cfg)
    load_into(model, load_weights(source, cfg.family), source)
    return model


def add_stored_adapter(model: LanguageModel, adapter: StoredAdapter, folder: Path) -> None:
    """Add the adapter in `folder` to its base model.

    Raises UserError, naming the tensor, if it does not fit.
    """
    layers, state = linear_layers_of(model), model.state_dict()
    try:
        for (path, matrix), tensor in adapter.matrices.items():  # before anything of their size is allocated
            if path not in layers.adaptable:
                raise KeyError(f"{path} {layers.refused.get(path, 'is no linear layer of the base model')}")
            rows, columns = weight_shape(layers.adaptable[path])
            if tensor.shape[matrix == "A"] != (columns if matrix == "A" else rows):
                raise KeyError(f"{path}.lora_{matrix} of shape {tuple(tensor.shape)} is not of its layer")
        for name, tensor in adapter.replaced.items():
            if name not in state or state[name].shape != tensor.shape:
                raise KeyError(f"{name} of shape {tuple(tensor.shape)} is no tensor of the base model")
        if adapter.replaced:
            load_into(model, state | adapter.replaced, folder)
        add_adapters(model, adapter.layers)
        model.load_state_dict(adapter.parameters(), strict=False)  # each of them was compared above or when it was read
    except KeyError as error:
        fix = "choose another adapter, or correct base_model_name_or_path in its adapter_config.json"
        raise UserError(f"the adapter does not fit its base model: {error.args[0]}", folder, fix) from error


def weights_under_adapter(lora: LoraConfig | None, source: Path) -> Path:
    """Return where the frozen weights of a run that starts from `source` come from: `source`, or the base model of the
    adapter that it trains on.
    """
    return base_model_of(model_dir(source)) if lora is not None and lora.continue_adapter else source


def add_run_adapter(model: LanguageModel, lora: LoraConfig, source: str) -> None:
    """Add the adapter of a run that starts from `source` to its frozen model: a new one, or that of `source`."""
    if lora.continue_adapter:
        continue_adapter(model, Path(source), lora.dropout)
    else:
        add_lora(model, lora)
    # a plan has no data on the meta device, which code of transformers reads
    if isinstance(model.cfg, TransformersConfig) and not next(model.parameters()).is_meta:
        check_adapters_are_called(model)


def continue_adapter(model: LanguageModel, source: Path, dropout: float) -> None:
    """Add the adapter of the run or PEFT folder `source` to its base model, to train it on.

    Raises UserError for one that has more than matrices.
    """
    folder = model_dir(source)
    adapter = read_adapter(folder)
    if adapter.replaced:
        message = f"the adapter has tensors of the base model, which no adapter of this program trains on: {', '.join(list(adapter.replaced)[:MAX_NAMES])}"
        raise UserError(
            message,
            folder,
            "stage.lora.continue_adapter=false merges it into its base model and trains a new adapter",
        )
    layers = {path: dataclasses.replace(cfg, dropout=dropout) for path, cfg in adapter.layers.items()}
    add_stored_adapter(model, adapter._replace(layers=layers), folder)


def load_weights(source: Path, family: str | None = None) -> dict[str, Tensor]:
    """Return fp32 weights by name from a run, a Hugging Face folder, a PEFT folder (merged into its base model) or a
    MiniMind .pth file.

    The names are those of the model `family`; None: of the one that `read_model_config` chooses.
    """
    if source.is_file():
        # of MiniMind: half precision under the decoder's parameter names, tied weights twice
        return to_floats(read_torch_file(source, PTH_HINT), source)
    folder = model_dir(source)
    if is_adapter_dir(folder):
        with torch.random.fork_rng(devices=[]):  # its random numbers are not those of the model that is built
            merge_adapters(model := load_model(folder, family))
        return model.state_dict()
    # a checkpoint of a run has none, and the names of the model
    cfg = read_model_config(folder, family) if (folder / "config.json").exists() else None
    stored = read_weights(folder)
    if isinstance(cfg, TransformersConfig):
        from models.transformers_adapter.model import to_transformers_names

        return to_transformers_names(stored, cfg, str(folder))
    if cfg is None:
        if any(".lora." in name for name in stored):
            fix = f"python runner/export.py run={source} to=NEW format=merged, then init_from=NEW"
            raise UserError("these are the weights of an adapter without its base model", source, fix)
        return stored
    return to_floats(to_decoder_names(stored, cfg.to_hf_config()["model_type"], cfg), folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the stored tensors of a model folder.

    Raises UserError if there are none, for a name in two files, and for quantized weights.
    """
    files = weight_files(folder)
    if not files:
        fix = "give the folder of a finished run, a Hugging Face folder, or a .pth file"
        raise UserError("the folder has no model*.safetensors and no pytorch_model*.bin", folder, fix)
    state: dict[str, Tensor] = {}
    for file in files:
        check_source_file(file)
        stored = read_tensors(file) if file.suffix == ".safetensors" else read_torch_file(file, DOWNLOAD_HINT)
        if twice := next((name for name in stored if name in state), None):
            raise UserError(f"two files of weights have a tensor {twice}", file, DOWNLOAD_HINT)
        state |= stored
    for name, tensor in state.items():
        if tensor.dtype.itemsize == 1 and tensor.ndim > 1 and tensor.dtype != torch.bool and name.endswith("weight"):
            raise UserError(
                f"{name} is stored as {str(tensor.dtype)[6:]}: quantized weights are not read",
                folder,
                "choose the folder of the original weights",
            )
    return state


def load_into(model: LanguageModel, state: dict[str, Tensor], source: str | Path) -> None:
    """Load every tensor of `model` from `state`.

    Raises UserError, naming `source`, if a name or a shape differs, or for values that are not finite.
    """
    own = model.state_dict()
    if model.cfg.tie_word_embeddings and EMBEDDING_KEY in state and HEAD_KEY in own:
        state = {HEAD_KEY: state[EMBEDDING_KEY]} | state  # files hold a tied weight once or twice
    _check_tied(own, state, source)
    mismatches = {
        "missing": [f"{name} {tuple(own[name].shape)}" for name in own if name not in state],
        "unknown": [f"{name} {tuple(state[name].shape)}" for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
            for name in own
            if name in state and own[name].shape != state[name].shape
        ],
        "of another type": [
            f"{name} {str(state[name].dtype)[6:]}"
            for name in own
            if name in state and own[name].is_floating_point() != state[name].is_floating_point()
        ],
    }
    if any(mismatches.values()):
        raise UserError(
            _mismatch_table(mismatches), source, "choose the model=... that these weights belong to, or other weights"
        )
    model.load_state_dict(state)
    check_finite(model.state_dict(), source)  # of the copy in memory: the files are read once


def _check_tied(own: dict[str, Tensor], state: dict[str, Tensor], source: str | Path) -> None:
    """Raise UserError if `state` has two different tensors for one weight of the model: load_state_dict would drop one
    of them without an error.
    """
    names = defaultdict(list)
    for name, tensor in own.items():
        if name in state and state[name].shape == tensor.shape:
            names[tensor.data_ptr()].append(name)
    for first, *others in names.values():
        for other in others:
            if state[first] is not state[other] and not torch.equal(state[first], state[other]):
                fix = 'choose weights whose output layer is tied; "tie_word_embeddings": false in the config.json of a Hugging Face model that has both unties it'
                raise UserError(f"these weights are not tied: {other} differs from {first}", source, fix)


def _mismatch_table(mismatches: dict[str, list[str]]) -> str:
    lines = ["the weights do not fit the model:"]
    for kind, names in mismatches.items():
        lines += [f"  {len(names)} {kind}"] if names else []
        lines += [f"    {name}" for name in names[:MAX_NAMES]]
        lines += ["    ..."] if len(names) > MAX_NAMES else []
    return "\n".join(lines)
