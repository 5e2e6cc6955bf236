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


def export_model(run: TrainState) -> None:
    """Write `model/`: an HF folder, or a PEFT adapter folder under LoRA. Until the new one is on the disk the former one stays.

    By the leading rank, once its last checkpoint is committed."""
    model = _unsharded_model(run) if run.world.sharded else run.model
    target, fresh, former = (run.folder / name for name in ("model", ".tmp-model", ".del-model"))
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    if run.cfg.stage.lora is not None:
        save.save_adapter(fresh, model, run.cfg.stage.lora, run.cfg.init_from, Path(run.cfg.data.tokenizer))
    else:
        save.save_model(fresh, model, run.cfg.model, Path(run.cfg.data.tokenizer))
    sync_tree(fresh)
    if target.exists():
        target.rename(former)
    fresh.rename(target)
    sync_dir(run.folder)
    shutil.rmtree(former, ignore_errors=True)


def _unsharded_model(run: TrainState) -> Decoder:
    """The bare model of ranks that hold it between them, from the checkpoint they have just saved together."""
    rng.seed_all(run.cfg.seed)
    model = build_model(run.cfg, needs_start=False)
    build_objective(run.cfg.stage, model)
    folder = newest_checkpoint(run.folder)
    load_strict(trainable_parameters(model), safetensors.torch.load_file(folder / "model.safetensors"), folder)
    return model
