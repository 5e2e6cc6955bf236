"""The model of a run, with the weights that it starts from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from models.formats.load import load_into, load_weights, weights_under_adapter
from models.formats.stored_size import check_size_of_weights
from models.language_model import LanguageModel, create_model, stored_tensors
from models.layers.quantized import quantize_linear_layers
from runner.checkpoint.format import read_model_tensors
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.config import Config
from runner.engine.device.rng import seed_all
from runner.engine.objectives.config import prepare_stage
from runner.engine.objectives.objective import Objective
from runner.engine.state import load_strict, saved_tensors


def build_model(cfg: Config, load_initial_weights: bool) -> LanguageModel:
    """Return a model with random weights from the current seed, or with those of `cfg.init_from`.

    A resumed run needs the initial weights only if its checkpoints do not contain them: under adapters, or for a reference model.
    """
    source = initial_weights_of(cfg) if load_initial_weights or cfg.stage.lora or cfg.stage.needs_reference else None
    if source:
        check_size_of_weights(cfg.model, source)
    model = create_model(cfg.model)
    if source:
        load_into(model, load_weights(source, cfg.model.family), str(source))
    model.activation_checkpointing = cfg.train.activation_checkpointing
    return model


def initial_weights_of(cfg: Config) -> Path | None:
    """Return where the weights of the model come from, without an adapter that is trained on; None: they are random."""
    return None if cfg.init_from == "scratch" else weights_under_adapter(cfg.stage.lora, Path(cfg.init_from))


def prepare_model(cfg: Config, device: torch.device, resumed_run: Path | None) -> tuple[LanguageModel, Objective, dict[str, Tensor]]:
    """Return the model, the objective, and the tensors that no checkpoint holds, by name: of a base model, of a reference. They are the same on every rank."""
    seed_all(cfg.seed)
    model = build_model(cfg, load_initial_weights=resumed_run is None)
    if resumed_run is not None and model.probes_weights and not (cfg.stage.lora or cfg.stage.needs_reference):
        load_saved_weights(model, resumed_run)
    if cfg.stage.lora and cfg.stage.lora.quantize:
        quantize_linear_layers(model, device)
    model = model.to(device)
    is_packed = cfg.data.packing != "none"
    model.kernels_description = model.prepare(is_packed)
    model.has_packed_rows = is_packed
    objective = prepare_stage(cfg.stage, model, cfg.init_from)
    saved = saved_tensors(model)
    frozen = {name: tensor for name, tensor in stored_tensors(model).items() if name not in saved} | objective.frozen_parameters
    return model, objective, frozen


def load_saved_weights(model: LanguageModel, run_dir: Path) -> None:
    """Load the newest valid checkpoint's weights: random ones may not show how a model computes. `TrainState` loads them again with all other state."""
    with suppress(FileNotFoundError):
        checkpoint = newest_checkpoint(run_dir)
        load_strict(saved_tensors(model), read_model_tensors(checkpoint), checkpoint)
