"""Export of a finished run: the folder `model/`, with the best or the last weights."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.errors import TrainingError
from common.filesystem import describe_disk_error, sync_path, sync_tree
from models.formats import save
from models.language_model import LanguageModel
from runner.checkpoint.format import read_checkpoint_tensors, read_model_tensors
from runner.checkpoint.manager import newest_checkpoint
from runner.checkpoint.saving import find_best_weights, save_freeing_space
from runner.engine.build import build_model, initial_weights_of
from runner.engine.device import rng
from runner.engine.evaluation import evaluate_loss, stop_ids
from runner.engine.objectives.config import prepare_stage
from runner.engine.optim.groups import AVERAGE
from runner.engine.state import TrainState, finite_or_none, load_strict, saved_tensors


@dataclass(frozen=True)
class ExportedWeights:
    """The weights of `model/`, as run.json records them.

    Readers (evaluate.py, leaderboards, samplers) name them by it.
    """

    weights: str  # best, last or ema
    step: int
    loss: float | None  # of the evaluation of exactly these weights; None: there was none
    source: Path | None  # folder with their tensors; None: the model in memory


def choose_weights(state: TrainState) -> ExportedWeights:
    """Return the weights that export.weights means. Every rank returns the same step and loss.

    ema: the model has them from here on.
    """
    progress, wanted = state.progress, state.cfg.export.weights
    is_evaluated = state.is_evaluation_due or state.stopped_early
    checkpoint = newest_checkpoint(state.run_dir) if state.dist.sharded and state.dist.is_rank_zero else None
    last = ExportedWeights("last", progress.step, progress.eval_loss if is_evaluated else None, checkpoint)
    if wanted == "ema" or (wanted == "auto" and state.cfg.train.ema_decay):
        if not state.optimizers.averages:  # the run had no train.ema_decay until its last step
            state.logger.warning("no step was averaged: the last weights are exported")
            return last
        state.optimizers.use_averages()
        loss = finite_or_none(evaluate_loss(state)["loss"]) if state.val_loaders else None
        return replace(last, weights="ema", loss=loss)
    if wanted == "last" or state.pipeline.evaluates_training_rows or progress.best_step is None:
        return last
    if progress.best_step == progress.step:
        return replace(last, weights="best", loss=progress.best_loss)
    source = find_best_weights(state.checkpoints.dir, progress.best_step) if state.dist.is_rank_zero else None
    if state.dist.broadcast_flag(source is None):
        state.logger.warning(
            f"the weights of the best evaluation, step {progress.best_step}, are not on disk: the last weights are exported"
        )
        return last
    return ExportedWeights("best", progress.best_step, progress.best_loss, source)


def export_model(state: TrainState, exported: ExportedWeights) -> None:
    """Write `model/` on rank 0: a Hugging Face folder, or a PEFT adapter folder under LoRA.

    It replaces the previous one only once it is on disk.

    The run's last checkpoint must have been saved: sharded weights are read from it. Raises TrainingError if the disk
    refuses.
    """
    state.logger.show_activity("writing model/", 0, 1, "folders")
    model = state.model if exported.source is None else _load_unsharded_model(state, exported)
    try:
        save_freeing_space(
            partial(_write_folder, state, model),
            state.checkpoints.dir,
            state.checkpoints.retention,
            state.logger.warning,
        )
    except OSError as error:
        need = sum(tensor.nbytes for tensor in model.state_dict().values())
        raise TrainingError(
            f"model/ was not written: {describe_disk_error(error, state.run_dir, need)}; step {state.progress.step} is saved, and resume= writes model/"
        ) from error
    state.logger.show_activity("writing model/", 1, 1, "folders")
    state.metadata.update(export={"weights": exported.weights, "step": exported.step, "loss": exported.loss})
    loss = "" if exported.loss is None else f", evaluation loss {exported.loss:.4f}"
    state.logger.info(f"model/ has the {exported.weights} weights: step {exported.step}{loss}")


def _write_folder(state: TrainState, model: LanguageModel) -> None:
    """Write `model` to `model/` of the run.

    If that raises OSError, the previous folder is there as before.
    """
    target, new, old = (state.run_dir / name for name in ("model", ".tmp-model", ".del-model"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    if state.cfg.stage.lora is not None:
        base = str(initial_weights_of(state.cfg) or "scratch")
        save.save_adapter(new, model, state.cfg.stage.lora, base, state.tokenizer.folder, stop_ids=stop_ids(state))
    else:
        save.save_model(new, model, state.cfg.model, state.tokenizer.folder, stop_ids(state))
    sync_tree(new)
    if target.exists():
        _move_away(target, old)
    try:
        new.rename(target)
    except OSError:
        with suppress(OSError):
            old.rename(target)
        raise
    sync_path(state.run_dir)
    shutil.rmtree(old, ignore_errors=True)


def _move_away(folder: Path, to: Path) -> None:
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:  # overlayfs does not rename a folder of a lower layer
            raise
        shutil.rmtree(folder)


def _load_unsharded_model(state: TrainState, exported: ExportedWeights) -> LanguageModel:
    assert (source := exported.source)
    rng.seed_all(state.cfg.seed)
    model = build_model(state.cfg, load_initial_weights=False)
    prepare_stage(state.cfg.stage, model, state.cfg.init_from)
    tensors = read_model_tensors(source)
    if exported.weights == "ema":
        suffix = f"/{AVERAGE}"
        optimizer = read_checkpoint_tensors(source)["optimizer"].items()
        tensors |= {name.removesuffix(suffix): average for name, average in optimizer if name.endswith(suffix)}
    load_strict(saved_tensors(model), tensors, source)
    return model
