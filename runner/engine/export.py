"""What a finished run is for: the folder `model/`."""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors.torch

from models import hub
from models.decoder import Decoder
from runner.engine import randomness
from runner.engine.build import build_model
from runner.engine.checkpoint import fill, learning, newest_of
from runner.engine.disk import sync_folder, sync_tree
from runner.engine.run import Run
from runner.engine.stage import prepare


def export(run: Run) -> None:
    """Write `model/`: an HF folder, or a PEFT adapter folder under LoRA. Until the new one is on the disk the former one stays.

    By the leading rank, once its last checkpoint is committed."""
    model = _gathered(run) if run.world.sharded else run.model
    target, fresh, former = (run.folder / name for name in ("model", ".tmp-model", ".del-model"))
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    if run.cfg.stage.lora is not None:
        hub.save_adapter(fresh, model, run.cfg.stage.lora, run.cfg.init_from, Path(run.cfg.data.tokenizer))
    else:
        hub.save_model(fresh, model, run.cfg.model, Path(run.cfg.data.tokenizer))
    sync_tree(fresh)
    if target.exists():
        target.rename(former)
    fresh.rename(target)
    sync_folder(run.folder)
    shutil.rmtree(former, ignore_errors=True)


def _gathered(run: Run) -> Decoder:
    """The bare model of ranks that hold it between them, from the checkpoint they have just saved together."""
    randomness.seed_all(run.cfg.seed)
    model = build_model(run.cfg, needs_start=False)
    prepare(run.cfg.stage, model)
    folder = newest_of(run.folder)
    fill(learning(model), safetensors.torch.load_file(folder / "model.safetensors"), folder)
    return model
