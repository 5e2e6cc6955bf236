"""One run from its typed config: weights found, record kept, signals heard, engine called."""

from __future__ import annotations

import dataclasses

from runner.engine.config import Config
from runner.engine.run import Interrupted, Run, RunFailed, build_run
from runner.engine.signals import StopFlag
from runner.launch import lineage
from runner.launch.record import Record
from runner.launch.refusal import is_refusal


def start(config: Config, record: Record) -> float:
    """Train in the folder of `record`, from its newest checkpoint if it has one; returns the loss a sweep compares.

    Raises a refusal (nothing was trained, and run.json is as it was), RunFailed, or Interrupted (saved, resume= continues).
    """
    before = dict(record.fields)
    try:
        shared = lineage.fingerprints(config)
        if before["init_from"] is None:
            config = dataclasses.replace(config, init_from=lineage.resolve(config, record.folder, shared))
        elif config.init_from == "auto":  # decided once in the life of a run
            config = dataclasses.replace(config, init_from=before["init_from"])
        record.running(stage=config.stage.name, init_from=config.init_from, fingerprints=shared)
        with StopFlag() as stop:
            return _proven(config, record) if config.train.verify_resume else _train(config, record, stop)
    except BaseException as error:
        if is_refusal(error):
            record.undo(before)
        elif record.fields["status"] == "running":
            record.finish("failed", f"{type(error).__name__}: {error}")
        raise


def _train(config: Config, record: Record, stop: StopFlag) -> float:
    from runner.engine.loop import train

    run = build_run(config, record.folder, attempt=record.attempt, note=record.update)
    record.update(fingerprints=record.fields["fingerprints"] | {"data": run.facts["content of the data"]})
    try:
        loss = train(run, stop)
    except Interrupted:
        _close(run, record, "interrupted")
        raise
    except BaseException as error:
        if not is_refusal(error):
            _close(run, record, "failed", str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}")
        raise
    _close(run, record, "completed")
    return loss


def _close(run: Run, record: Record, status: str, error: str | None = None) -> None:
    """The last word of a training that took place, on the console and in run.json."""
    progress = run.progress
    metrics = {
        "loss": next(reversed(progress.last_losses), None),
        "val_loss": progress.eval_loss,
        "best_val_loss": progress.best_loss,
        "best_step": progress.best_step,
    }
    run.track.finish(status, {name: value for name, value in metrics.items() if value is not None} | ({"error": error} if error else {}))
    record.finish(status, error, step=progress.step, tokens=progress.tokens, metrics=metrics, tracker_id=run.track.tracker_id)


def _proven(config: Config, record: Record) -> float:
    """train.verify_resume: not a training but a proof that stopping one changes nothing."""
    from runner.engine.verify import verify

    found = verify(config, record.folder)
    if found:
        raise RunFailed("a stopped and resumed run differs from the one that was never stopped: " + "; ".join(found))
    print("verified: stopped half way and resumed, the run ends in the same bits as the run that was never stopped")
    record.finish("completed")
    return 0.0
