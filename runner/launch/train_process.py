"""Body of a training process (the only one of a run, or one rank): build the run, train it, record how it ended."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import (
    DISK_ERRORS,
    FAILED,
    INTERRUPTED,
    OK,
    PEER_LOST,
    Interrupted,
    Outcome,
    PeerLostError,
    StopRequested,
    TrainingError,
    UserError,
    print_safely,
    report_user_error,
)
from common.filesystem import describe_disk_error
from common.settings import setting_values
from runner.checkpoint.compatibility import DATA_FINGERPRINT, WRITTEN_BY, recorded_environment, settings_fingerprint
from runner.config.compose import to_config
from runner.config.snapshot import load_overrides
from runner.engine.config import Config
from runner.engine.device.cpu import RunningTrainings
from runner.engine.device.signals import StopFlag
from runner.engine.device.spinning import adapt_spinning
from runner.launch.recovery import read_stored_files
from runner.reporting.live import LivePage
from runner.run_dir.contents import GitReader, is_sweep_dir
from runner.run_dir.metadata import STATUS_OF_OUTCOME, RunMetadata
from runner.run_dir.saved_config import reject_interpolations
from runner.tracking.bar import open_console
from runner.tracking.run_end import NextCommand, RunEnd, commands_after_divergence, commands_to_continue, next_commands

if TYPE_CHECKING:
    from runner.engine.state import TrainState

# gloo, NCCL and their stores raise a plain RuntimeError when a peer dies or does not come; only its text tells
PEER_TIMEOUT_TEXTS = (
    "Timed out waiting",
    "Wait timeout",
    "wait timeout",
    "Timeout waiting for key",
    "collective operation timeout",
)
PEER_LOST_TEXTS = (
    "closed by peer",
    "reset by peer",
    "Connection refused",  # the other has exited before they met
    "Broken pipe",
    "remote process exited",
    *PEER_TIMEOUT_TEXTS,
)


def train_or_verify(config: Config, metadata: RunMetadata, stop: StopFlag) -> float:
    """Train in the run directory of `metadata`, from its newest checkpoint if there is one; return the loss that a
    sweep compares.
    """
    with RunningTrainings().registered(), adapt_spinning():
        try:
            if config.train.verify_resume:
                return _verify_resume(config, metadata, stop)
            return _train(config, metadata, stop)
        except StopRequested:  # before the first step of this attempt
            # the import of torch does so at its end; if interrupted, its exit functions would print
            logging.getLogger("torch").setLevel(logging.WARNING)
            metadata.finish(Outcome.INTERRUPTED)
            raise Interrupted(metadata.fields["step"], metadata.folder) from None


def train_as_rank(config: Config, metadata: RunMetadata, stop: StopFlag) -> int:
    """Run `train_or_verify` in one of several ranks; report any failure and return the exit code."""
    try:
        train_or_verify(config, metadata, stop)
    except Interrupted:
        return INTERRUPTED
    except UserError as error:
        return report_user_error(error)
    except TrainingError as error:
        _report_failure(str(error), metadata, error.outcome)
        return PEER_LOST if isinstance(error, PeerLostError) else FAILED
    except Exception as error:
        traceback.print_exc()
        _report_failure(f"{type(error).__name__}: {error}", metadata)
        return FAILED
    return OK


def config_from_json(values: Any, source: Path) -> Config:
    """Return the config that another process of the run has composed; `source` is named in errors.

    No interpolation is resolved.
    """
    return to_config(reject_interpolations(values, "", source))


def _report_failure(error: str, metadata: RunMetadata, outcome: Outcome = Outcome.FAILED) -> None:
    """Print `error` unless the launcher will: it reads run.json for rank 0 and logs/rank<k>.log for the others."""
    if metadata.fields["status"] == "running":
        with suppress(OSError):
            metadata.finish(outcome, error)
    if metadata.is_writer:
        metadata.reread()  # on a full disk run.json may lack the error
    if not metadata.is_writer or metadata.fields["status"] != "failed":
        print_safely(f"error: {error}", sys.stderr)


def _train(config: Config, metadata: RunMetadata, stop: StopFlag) -> float:
    git = GitReader() if metadata.is_writer else None
    # other ranks would wait for this one
    with stop.interrupting("before the first step") if config.distributed.name == "single" else nullcontext():
        from runner.engine.build import build_run
    with _outside_errors(config, metadata.folder):
        state = build_run(config, metadata, stop)
    if git is not None:
        metadata.stored_files = read_stored_files(metadata.folder, metadata.folder)
        _record_attempt(state, git)
    with _live_page(state):
        return _train_and_record(state)


@contextmanager
def _live_page(state: TrainState) -> Iterator[None]:
    """Write report.html of the run while the block trains, and once more at its end."""
    if not (state.metadata.is_writer and state.cfg.tracker.page):
        yield
        return
    page = LivePage(state.metadata, state.logger.warning)
    state.logger.after_record = page.record_logged
    try:
        yield
    except UserError:
        raise  # a refused launch changes nothing in the directory
    except BaseException:
        page.write()
        raise
    page.write()


def _train_and_record(state: TrainState) -> float:
    from runner.engine.loop import train

    config = state.cfg
    try:
        with _outside_errors(config, state.metadata.folder), _memory_errors(state):
            loss = train(state)
            state.logger.flush()
    except (UserError, StopRequested):
        raise
    except (Interrupted, TrainingError) as error:
        _record_end(state, error.outcome, None if isinstance(error, Interrupted) else str(error))
        raise
    except BaseException as error:
        _record_end(state, Outcome.FAILED, f"{type(error).__name__}: {error}")
        raise
    _record_end(state, Outcome.COMPLETED)
    return loss


def _record_attempt(state: TrainState, git: GitReader) -> None:
    """Write what this attempt computes with to run.json, and its commit to the facts that checkpoints store."""
    import torch

    environment, commit, cfg = recorded_environment(state.compatibility), git.result(), state.cfg
    state.compatibility |= {f"{WRITTEN_BY}.{name}": value for name, value in commit.items()}
    chosen = {
        "attention": getattr(cfg.model, "attention", None),
        "precision": cfg.precision.name,
        "settings": settings_fingerprint(cfg),
    }
    fingerprints = state.metadata.fields["fingerprints"] | {"data": state.compatibility[DATA_FINGERPRINT]}
    state.metadata.describe_attempt(
        fingerprints,
        commit | {"fingerprint": environment.pop("code")},
        environment=environment,
        interop_threads=torch.get_num_interop_threads(),
        total_steps=state.total_steps,
        **chosen,
        exact=True,
    )


@contextmanager
def _outside_errors(config: Config, folder: Path) -> Iterator[None]:
    """Raise PeerLostError for the errors of a collective whose peer died, TrainingError for errors of the disk that no
    retry has mended.
    """
    try:
        yield
    except RuntimeError as error:
        text = next((text for text in PEER_LOST_TEXTS if text in str(error)), None)
        if config.distributed.name == "single" or text is None:
            raise
        raise PeerLostError(f"another rank does not answer ({text}); logs/rank<k>.log may have the cause") from error
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise TrainingError(
            f"{error.filename or 'a file'} could not be written or read: {describe_disk_error(error, folder)}"
        ) from error


@contextmanager
def _memory_errors(state: TrainState) -> Iterator[None]:
    """Raise TrainingError for a lack of memory, with what was measured and what needs less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # that of PyTorch is a RuntimeError
        from runner.engine.device.compile import is_out_of_memory
        from runner.planning.alternatives import describe_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise TrainingError(describe_out_of_memory(state, error)) from error


def _record_end(state: TrainState, outcome: Outcome, error: str | None = None) -> None:
    """Write how training ended to the console, the trackers and run.json."""
    progress = state.progress
    metrics = {
        "loss": next(reversed(progress.recent_losses), None),
        "training_rows_loss" if state.pipeline.evaluates_training_rows else "val_loss": progress.eval_loss,
    }
    if not state.pipeline.evaluates_training_rows:
        metrics |= {"best_val_loss": progress.best_loss, "best_step": progress.best_step}
    state.logger.finish(STATUS_OF_OUTCOME.get(outcome, outcome), _run_end(state, outcome, metrics), error or "")
    # 0: nothing was loaded
    counters = (
        {"step": progress.step, "tokens": progress.tokens, "loss_tokens": progress.loss_tokens} if progress.step else {}
    )
    state.metadata.finish(outcome, error, **counters, metrics=metrics, tracker_id=state.logger.tracker_id)


def _run_end(state: TrainState, outcome: Outcome, metrics: dict[str, Any]) -> RunEnd:
    """Return what the last lines of the run say."""
    from runner.engine.step_metrics import peak_memory
    from runner.reporting.runs import REPORT_FILE

    export = state.metadata.fields.get("export") if outcome == Outcome.COMPLETED else None
    checkpoint = state.metadata.fields.get("checkpoint")
    return RunEnd(
        step=state.progress.step,
        total_steps=state.total_steps,
        tokens=state.progress.tokens,
        loss_tokens=state.progress.loss_tokens,
        metrics=metrics,
        run_dir=state.run_dir,
        checkpoint=checkpoint and state.checkpoints.dir / checkpoint,
        model=f"{export['weights']} weights, step {export['step']:,}" if export else None,
        page=state.run_dir / REPORT_FILE if state.cfg.tracker.page else None,
        peak_memory=peak_memory(state.dist.device),
        memory_of="tensors on the GPU" if state.dist.device.type == "cuda" else "this process",
        commands=_next_commands(state, outcome),
        is_job=is_sweep_dir(state.run_dir.parent),
        prints_commands=outcome not in (Outcome.INTERRUPTED, Outcome.PAUSED),
    )


def _next_commands(state: TrainState, outcome: Outcome) -> tuple[NextCommand, ...]:
    train, stage, paths = state.cfg.train, state.cfg.stage, state.cfg.data.paths
    has_checkpoint = state.metadata.fields.get("checkpoint") is not None
    try:
        if outcome == Outcome.DIVERGED:
            can_resume = has_checkpoint and not state.finished
            is_branch = bool(state.metadata.fields.get("branched_from"))
            overrides = load_overrides(state.metadata.folder)
            return commands_after_divergence(state.run_dir, state.cfg.optimizer.lr, overrides, can_resume, is_branch)
        if outcome != Outcome.COMPLETED:
            return commands_to_continue(state.run_dir, has_checkpoint)
        longer = f"train.max_steps={2 * train.max_steps}" if train.max_steps else f"train.epochs={2 * train.epochs}"
        path = Path(paths[0]) if len(paths) == 1 else None
        longer_or_none = None if state.stopped_early else longer
        settings = setting_values(state.cfg)
        return next_commands(state.run_dir, stage.name, stage.data_format, path, longer_or_none, settings)
    except (OSError, UserError):  # e.g. the current directory or .hydra/ was deleted; the run has ended as it has
        return ()


def _verify_resume(config: Config, metadata: RunMetadata, stop: StopFlag) -> float:
    """Run the proof of train.verify_resume instead of a training. A stop request ends it wherever it is."""
    with stop.interrupting("the verification"), _outside_errors(config, metadata.folder):
        from runner.engine.verify_resume import verify_resume

        differences = verify_resume(config, metadata.folder)
    if differences:
        raise TrainingError("a stopped and resumed run differs from an uninterrupted one: " + "; ".join(differences))
    open_console(config.tracker.console).print(
        "verified: a run that is stopped half way and resumed is bitwise equal to an uninterrupted run"
    )
    metadata.finish(Outcome.COMPLETED)
    return 0.0
