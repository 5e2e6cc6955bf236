"""What a finished run is for: the folder `model/`."""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors.torch

from common.filesystem import sync_dir, sync_tree
from models.decoder import Decoder
from models.formats import save
from runner.checkpoint.manager import load_strict, newest_checkpoint, trainable_parameters
from runner.engine.build import build_model
from runner.engine.device import rng
from runner.engine.objectives.stage import build_objective
from runner.engine.state import TrainState


def export_model(state: TrainState) -> None:
    """Write `model/`: an HF folder, or a PEFT adapter folder under LoRA. Until the new one is on the disk the former one stays.

    By the leading rank, once its last checkpoint is committed."""
    model = _unsharded_model(state) if state.dist.sharded else state.model
    target, fresh, former = (state.run_dir / name for name in ("model", ".tmp-model", ".del-model"))
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    if state.cfg.stage.lora is not None:
        save.save_adapter(fresh, model, state.cfg.stage.lora, state.cfg.init_from, Path(state.cfg.data.tokenizer))
    else:
        save.save_model(fresh, model, state.cfg.model, Path(state.cfg.data.tokenizer))
    sync_tree(fresh)
    if target.exists():
        target.rename(former)
    fresh.rename(target)
    sync_dir(state.run_dir)
    shutil.rmtree(former, ignore_errors=True)


def _unsharded_model(state: TrainState) -> Decoder:
    """The bare model of ranks that hold it between them, from the checkpoint they have just saved together."""
    rng.seed_all(state.cfg.seed)
    model = build_model(state.cfg, needs_start=False)
    build_objective(state.cfg.stage, model)
    folder = newest_checkpoint(state.run_dir)
    load_strict(trainable_parameters(model), safetensors.torch.load_file(folder / "model.safetensors"), folder)
    return model
