"""One run from its typed config: weights found, record kept, signals heard, engine called."""
from __future__ import annotations

import dataclasses

from runner.engine.config import Config
from runner.engine.run import Interrupted, RunFailed, build_run
from runner.engine.signals import StopFlag
from runner.launch import lineage
from runner.launch.record import Record
from runner.launch.refusal import is_refusal


def start(config: Config, record: Record) -> float:
    """Train in the folder of `record`, from its newest checkpoint if it has one; returns the loss a sweep compares.

    Raises a refusal (nothing was trained), RunFailed, or Interrupted (saved, resume= continues).
    """
    try:
        shared = lineage.fingerprints(config)
        init_from = record.fields["init_from"] or lineage.resolve(config, record.folder, shared)
        config = dataclasses.replace(config, init_from=init_from)
        record.running(stage=config.stage.name, init_from=init_from, fingerprints=shared)
        with StopFlag() as stop:
            return _proven(config, record) if config.train.verify_resume else _train(config, record, stop)
    except BaseException as error:
        _note_end(record, error)
        raise


def _train(config: Config, record: Record, stop: StopFlag) -> float:
    run = build_run(config, record.folder, attempt=record.attempt, note=record.update)
    status, error = "failed", None
    try:
        from runner.engine.loop import train

        loss = train(run, stop)
        status = "completed"
        return loss
    except Interrupted:
        status = "interrupted"
        raise
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        metrics = {"loss": run.progress.last_losses[-1] if run.progress.last_losses else None, "val_loss": run.progress.eval_loss, "best_val_loss": run.progress.best_loss, "best_step": run.progress.best_step}
        facts = {"step": run.progress.step, "tokens": run.progress.tokens, "metrics": metrics}
        run.track.finish(status, {name: value for name, value in metrics.items() if value is not None} | ({"error": error} if error else {}))
        record.update(**facts, tracker_id=run.track.tracker_id)
        if status == "completed":
            record.finish("completed")


def _proven(config: Config, record: Record) -> float:
    """train.verify_resume: not a training but a proof that stopping one changes nothing."""
    from runner.engine.verify import verify

    found = verify(config, record.folder)
    if found:
        raise RunFailed("a stopped and resumed run differs from the one that was never stopped: " + "; ".join(found))
    print("verified: stopped half way and resumed, the run ends in the same bits as the run that was never stopped")
    record.finish("completed")
    return 0.0


def _note_end(record: Record, error: BaseException) -> None:
    if is_refusal(error):  # nothing was trained: the folder may be used again once the words are right
        untouched = record.fields["step"] == 0
        record.update(status="new" if untouched else "interrupted", error=error.args[0])
    elif isinstance(error, Interrupted):
        record.finish("interrupted")
    else:
        record.finish("failed", str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}")
