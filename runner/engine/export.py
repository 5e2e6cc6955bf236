"""Export of a finished run: the folder `model/`."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.filesystem import sync_path, sync_tree
from models.formats import save
from models.language_model import LanguageModel
from runner.checkpoint.format import read_checkpoint_tensors
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.build import build_model
from runner.engine.device import rng
from runner.engine.objectives.config import prepare_stage
from runner.engine.state import TrainState, load_strict, trainable_parameters


def export_model(state: TrainState) -> None:
    """Write `model/` on rank 0: a Hugging Face folder, or a PEFT adapter folder under LoRA. It replaces the previous one only once it is on disk.

    The run's last checkpoint must have been saved: sharded weights are read from it.
    """
    model = _load_unsharded_model(state) if state.dist.sharded else state.model
    target, new, old = (state.run_dir / name for name in ("model", ".tmp-model", ".del-model"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    if state.cfg.stage.lora is not None:
        save.save_adapter(new, model, state.cfg.stage.lora, state.cfg.init_from, Path(state.cfg.data.tokenizer))
    else:
        save.save_model(new, model, state.cfg.model, Path(state.cfg.data.tokenizer))
    sync_tree(new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync_path(state.run_dir)
    shutil.rmtree(old, ignore_errors=True)


def _load_unsharded_model(state: TrainState) -> LanguageModel:
    rng.seed_all(state.cfg.seed)
    model = build_model(state.cfg, load_initial_weights=False)
    prepare_stage(state.cfg.stage, model)
    checkpoint = newest_checkpoint(state.run_dir)
    load_strict(trainable_parameters(model), read_checkpoint_tensors(checkpoint)["model"], checkpoint)
    return model
