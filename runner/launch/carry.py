"""What every process of a run does, be it the only one or one of many ranks: build the run, train it, say how it ended."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf

from runner.engine.config import Config
from runner.engine.run import Interrupted, Run, RunFailed
from runner.engine.signals import StopFlag
from runner.launch import refusal, stored
from runner.launch.record import Record

LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Timed out waiting", "collective operation timeout")


class Alone(RunFailed):
    """Another rank has gone. Why, it knows."""


def carry(config: Config, record: Record, stop: StopFlag) -> float:
    """Train in the folder of `record`, from its newest checkpoint if it has one; returns the loss a sweep compares."""
    return _proven(config, record) if config.train.verify_resume else _trained(config, record, stop)


def as_rank(config: Config, record: Record, stop: StopFlag) -> int:
    """`carry` for one rank of many: whatever ends it is told, and becomes its exit code."""
    try:
        carry(config, record, stop)
    except Interrupted:
        return refusal.INTERRUPTED
    except RunFailed as error:
        _tell(str(error), record)
        return refusal.ALONE if isinstance(error, Alone) else refusal.FAILED
    except Exception as error:  # whatever it is: the process that waits for us hears of it by our code and our last line
        if refusal.is_refusal(error):
            return refusal.report(error)
        traceback.print_exc()
        _tell(f"{type(error).__name__}: {error}", record)
        return refusal.FAILED
    return refusal.DONE


def _tell(error: str, record: Record) -> None:
    """Whoever has started us finds the cause in our log, or, of the first rank, in run.json: then it is theirs to tell."""
    if record.fields["status"] == "running":
        with suppress(OSError):
            record.finish("failed", error)
    if record.writes:
        record.reread()  # a full disk may have kept none of it
    if not record.writes or record.fields["status"] != "failed":
        print(f"error: {error}", file=sys.stderr, flush=True)


def handed_over(config: object, place: Path) -> Config:
    """What another process of the run has composed, as values: nothing in it is looked up or run."""
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), stored.plain(config, "", place)))
    assert isinstance(found, Config)
    return found


def _trained(config: Config, record: Record, stop: StopFlag) -> float:
    from runner.engine.build import build_run
    from runner.engine.loop import train

    with _peers(config):
        run = build_run(config, record.folder, attempt=record.attempt, note=record.update)
    record.update(fingerprints=record.fields["fingerprints"] | {"data": run.facts["content of the data"]})
    try:
        with _peers(config):
            loss = train(run, stop)
    except Interrupted:
        _close(run, record, "interrupted")
        raise
    except BaseException as error:
        if not refusal.is_refusal(error):
            _close(run, record, "failed", str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}")
        raise
    _close(run, record, "completed")
    return loss


@contextmanager
def _peers(config: Config) -> Iterator[None]:
    """Around what ranks do together: one that waits for another in vain says so."""
    try:
        yield
    except RuntimeError as error:  # what torch's backends raise, each in words of its own
        sign = next((sign for sign in LOST if sign in str(error)), None)
        if config.distributed.name == "single" or sign is None:
            raise
        raise Alone(f"another rank does not answer ({sign}); logs/rank<k>.log may say why") from error


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

    with _peers(config):
        found = verify(config, record.folder)
    if found:
        raise RunFailed("a stopped and resumed run differs from the one that was never stopped: " + "; ".join(found))
    print("verified: stopped half way and resumed, the run ends in the same bits as the run that was never stopped")
    record.finish("completed")
    return 0.0
