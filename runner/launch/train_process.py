"""What every process of a run does, be it the only one or one of many ranks: build the run, train it, say how it ended."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf

from common import errors, exit_codes
from common.errors import Interrupted, TrainingError
from runner.engine.config import Config
from runner.engine.state import TrainState
from runner.launch.signals import StopFlag
from runner.run_dir import saved_config
from runner.run_dir.metadata import RunMetadata

PEER_LOST_MESSAGES = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Timed out waiting", "collective operation timeout")


class PeerLostError(TrainingError):
    """Another rank has gone. Why, it knows."""


def train_or_verify(config: Config, record: RunMetadata, stop: StopFlag) -> float:
    """Train in the folder of `record`, from its newest checkpoint if it has one; returns the loss a sweep compares."""
    return _verify_resume(config, record) if config.train.verify_resume else _train(config, record, stop)


def train_as_rank(config: Config, record: RunMetadata, stop: StopFlag) -> int:
    """`carry` for one rank of many: whatever ends it is told, and becomes its exit code."""
    try:
        train_or_verify(config, record, stop)
    except Interrupted:
        return exit_codes.INTERRUPTED
    except TrainingError as error:
        _report_failure(str(error), record)
        return exit_codes.PEER_LOST if isinstance(error, PeerLostError) else exit_codes.FAILED
    except Exception as error:  # whatever it is: the process that waits for us hears of it by our code and our last line
        if errors.is_user_error(error):
            return errors.report_user_error(error)
        traceback.print_exc()
        _report_failure(f"{type(error).__name__}: {error}", record)
        return exit_codes.FAILED
    return exit_codes.OK


def _report_failure(error: str, record: RunMetadata) -> None:
    """Whoever has started us finds the cause in our log, or, of the first rank, in run.json: then it is theirs to tell."""
    if record.fields["status"] == "running":
        with suppress(OSError):
            record.finish("failed", error)
    if record.writes:
        record.reread()  # a full disk may have kept none of it
    if not record.writes or record.fields["status"] != "failed":
        print(f"error: {error}", file=sys.stderr, flush=True)


def config_from_json(config: object, place: Path) -> Config:
    """What another process of the run has composed, as values: nothing in it is looked up or run."""
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved_config.reject_interpolations(config, "", place)))
    assert isinstance(found, Config)
    return found


def _train(config: Config, record: RunMetadata, stop: StopFlag) -> float:
    from runner.engine.build import build_run
    from runner.engine.loop import train

    with _peer_errors(config):
        run = build_run(config, record.folder, attempt=record.attempt, note=record.update)
    record.update(fingerprints=record.fields["fingerprints"] | {"data": run.facts["content of the data"]})
    try:
        with _peer_errors(config):
            loss = train(run, stop)
    except Interrupted:
        _record_end(run, record, "interrupted")
        raise
    except BaseException as error:
        if not errors.is_user_error(error):
            _record_end(run, record, "failed", str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}")
        raise
    _record_end(run, record, "completed")
    return loss


@contextmanager
def _peer_errors(config: Config) -> Iterator[None]:
    """Around what ranks do together: one that waits for another in vain says so."""
    try:
        yield
    except RuntimeError as error:  # what torch's backends raise, each in words of its own
        sign = next((sign for sign in PEER_LOST_MESSAGES if sign in str(error)), None)
        if config.distributed.name == "single" or sign is None:
            raise
        raise PeerLostError(f"another rank does not answer ({sign}); logs/rank<k>.log may say why") from error


def _record_end(run: TrainState, record: RunMetadata, status: str, error: str | None = None) -> None:
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


def _verify_resume(config: Config, record: RunMetadata) -> float:
    """train.verify_resume: not a training but a proof that stopping one changes nothing."""
    from runner.engine.verify_resume import verify_resume

    with _peer_errors(config):
        found = verify_resume(config, record.folder)
    if found:
        raise TrainingError("a stopped and resumed run differs from the one that was never stopped: " + "; ".join(found))
    print("verified: stopped half way and resumed, the run ends in the same bits as the run that was never stopped")
    record.finish("completed")
    return 0.0
