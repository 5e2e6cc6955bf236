"""The training loop: one for every stage. Read `train` and `train_steps` first, then `train_step`."""

from __future__ import annotations

import math
import os
import shutil
import traceback
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from common.errors import DivergedError, Interrupted, Outcome, StopRequested, TrainingError, UserError, resume_command
from data.store.reader import DamagedStoreError
from runner.checkpoint.compatibility import DATA_FINGERPRINT, TOKENIZER_FINGERPRINT, run_rules
from runner.diagnostics.symptoms import troubleshooting
from runner.engine.device.compile import describe_compile_error, is_compile_error
from runner.engine.device.cpu import keep_freed_memory
from runner.engine.device.heartbeat import enter
from runner.engine.device.rng import get_rng_state, is_varying_kernel, set_rng_state
from runner.engine.device.signals import StopRequests
from runner.engine.evaluation import evaluate_if_due
from runner.engine.export import choose_weights, export_model
from runner.engine.objectives.objective import mask_dummy_batch
from runner.engine.open_logs import open_logs
from runner.engine.optim.schedules import lr_at
from runner.engine.state import StepCounts, StepOutput, TrainState, propagate_failure
from runner.engine.step_metrics import Throughput, flush_steps, log_step

if TYPE_CHECKING:
    from torch import Tensor
    from torch.profiler import profile

    from data.batching.batch import Batch
    from runner.engine.objectives.objective import LossSums

PROFILE_WARMUP = 2  # steps before those of train.profile
DIVERGED_FACTOR = 2  # a run has diverged if its final loss is higher than this times that of a uniform distribution
# or than this, if the gradient norms of its last DEAD_STEPS are exactly 0: no step can change it any more
DEAD_FACTOR, DEAD_STEPS = 0.99, 2


def train(state: TrainState, stop_requested: Callable[[], bool] | None = None) -> float:
    """Train from the newest checkpoint to the last step, and export the model; return the loss of the exported weights,
    which a sweep compares.

    `stop_requested` replaces the stop requests that the run was built with. Raises Interrupted, after the last
    completed step (0: none) is saved, if there is one on some rank; StopRequested if a signal comes while the checkpoint
    is loaded; TrainingError if training fails. Whatever is raised, the last completed step is saved first if that is
    possible (`save_before_failure`).
    """
    if stop_requested:
        state.stop = StopRequests(stop_requested)
    try:
        start_or_resume(state)
        try:
            train_steps(state)
            return finish(state)
        except StopRequested:
            save_and_interrupt(state)
        except Exception as error:
            if is_varying_kernel(error):
                text = f"the model needs an operator whose bits vary on a GPU: {str(error).partition('.')[0]}"
                raise UserError(text, "train.deterministic=true", "train.deterministic=false") from error
            if not is_compile_error(error):
                raise
            if state.stop() and state.dist.size == 1:  # the signal has ended the compiler, too
                save_and_interrupt(state)
            raise TrainingError(describe_compile_error(error)) from error
    except BaseException as error:
        save_before_failure(state, error)
        if isinstance(error, DamagedStoreError):
            # the other lines are the traceback of a data worker
            raise TrainingError(str(error).splitlines()[-1]) from error
        # exit code 2 means that nothing was trained
        if isinstance(error, UserError) and state.progress.step > state.first_step:
            raise TrainingError(f"{error.message} ({error.setting}); {error.fix}") from error
        raise
    finally:
        state.dist.disarm_watchdog()
        state.checkpoints.close()


def start_or_resume(state: TrainState) -> None:
    """Load the newest checkpoint if there is one, and open the logs at the position that it names."""
    with state.stop.interrupting("before the first step") if state.dist.size == 1 else nullcontext():
        state.checkpoints.load_newest(state, state.compatibility, run_rules(state.cfg), state.total_steps)
    state.first_step = state.progress.step
    fingerprints = (
        f"{fact} {str(state.compatibility[fact])[:12]}" for fact in (DATA_FINGERPRINT, TOKENIZER_FINGERPRINT)
    )
    state.dist.check_agreement([f"step {state.progress.step}", *fingerprints])
    if not state.finished and state.dist.is_rank_zero:
        shutil.rmtree(state.run_dir / "model", ignore_errors=True)  # an earlier, shorter run may have exported it
        state.metadata.update(export=None)
    open_logs(state)


def train_steps(state: TrainState) -> None:
    """Run the remaining steps, and everything that is due between them."""
    cfg, progress, checkpoints = state.cfg, state.progress, state.checkpoints
    evaluate_or_pause(state)  # a resumed run may have been stopped before the evaluation of its last step
    throughput = Throughput(state.dist.is_device_idle)
    with (
        state.stop.working_on("after this micro-batch, then saving"),
        closing(state.loader.iter_steps(progress.step, state.total_steps, state.stop)) as steps,
        profile_steps(state) if cfg.train.profile and state.dist.is_rank_zero else nullcontext() as profiler,
    ):
        # a rank whose loader fails joins the sum in which the others wait, at the start of `train_step`
        steps_of_ranks = propagate_failure(steps, partial(state.all_reduce_or_raise, StepCounts()))
        for batches in throughput.timed(steps_of_ranks):
            if state.finished:  # early stopping
                break
            epoch = progress.step // state.loader.steps_per_epoch
            lr = lr_at(progress.step, state.total_steps, cfg.optimizer.lr, cfg.schedule)
            throughput.count(step_with_retries(state, batches, lr).counts.tokens)
            log_step(state, lr, epoch, throughput)
            state.is_consistent = True
            checkpoints.report_finished()
            if is_out_of_time := state.stop.is_out_of_time(cfg.train.max_hours):
                state.logger.info(f"train.max_hours={cfg.train.max_hours:g} is over")
            state.check_stop(is_out_of_time)
            if profiler:
                profiler.step()
            with throughput.paused():
                # a checkpoint is not written twice, and that of a pause has the evaluation
                if state.is_due(cfg.train.save_every) and progress.step != state.pause_step:
                    checkpoints.save_async(progress.step, state)
                evaluate_or_pause(state)


def evaluate_or_pause(state: TrainState) -> None:
    """Do what `evaluate_if_due` does, unless this step has it; raise StopRequested on every rank if this is the
    evaluation of train.stop_at, at which no earlier attempt has paused.
    """
    if state.progress.evaluated_step == state.progress.step:
        return
    evaluate_if_due(state)
    if state.cfg.train.stop_at and state.is_at_pause and not state.finished:
        # an attempt that pauses at a checkpoint from before the evaluation saves none of its own
        paused = {"outcome": Outcome.PAUSED, "step": state.progress.step}.items()
        has_paused = any(paused <= attempt.items() for attempt in state.metadata.fields["attempts"][:-1])
        pauses = state.dist.is_rank_zero and not has_paused
        if pauses:
            state.logger.info(
                f"train.stop_at={state.cfg.train.stop_at:g} is reached: step {state.progress.step} of {state.total_steps}"
            )
        state.check_stop(pauses)


def profile_steps(state: TrainState) -> profile:
    """Return a profiler that writes a trace of `train.profile` steps, after those that warm up."""
    from torch.profiler import profile, schedule

    steps = state.cfg.train.profile

    def write(trace: profile) -> None:
        file, traced = state.run_dir / "profile.json", state.progress.step - state.first_step - PROFILE_WARMUP
        with suppress(OSError):
            file.unlink()
        trace.export_chrome_trace(str(file))
        if file.is_file():
            state.logger.info(f"a trace of {min(steps, traced)} steps is in {file}; open it at https://ui.perfetto.dev")
        else:
            state.logger.warning(f"the trace of train.profile={steps} could not be written to {file}")

    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    return profile(schedule=schedule(wait=0, warmup=PROFILE_WARMUP, active=steps, repeat=1), on_trace_ready=write)


def step_with_retries(state: TrainState, batches: list[Batch], lr: float) -> StepOutput:
    """Run one optimizer step, repeated with a smaller loss scale while fp16 overflows.

    Its results stay on the device.
    """
    progress = state.progress
    while state.precision.should_retry((output := train_step(state, batches, lr)).gradients):
        progress.overflows += 1
        state.is_consistent = True  # the update was skipped, so the run is at the previous step
        state.check_stop()
    progress.step += 1
    progress.examples += output.counts.examples
    progress.loss_tokens += output.counts.loss_tokens
    progress.tokens += output.counts.tokens
    state.pending_steps.append(output)
    return output


def train_step(state: TrainState, batches: list[Batch], lr: float) -> StepOutput:
    """Update the parameters once, with gradient accumulation.

    The loss is normalized over the step: the items of all micro-batches and ranks are counted first, then every loss is
    divided by that count.

    The host does not wait for the device, except with experts (their numbers of tokens determine shapes) and fp16.
    Raises StopRequested between two micro-batches. Whatever is raised before the update abandons the step: the random
    state is that of its start.
    """
    dist, objective, precision = state.dist, state.objective, state.precision
    rng_at_start = get_rng_state()
    sums: LossSums = {}
    losses: list[Tensor] = []  # of each micro-batch
    try:
        state.wrapped.train()
        counts = [
            StepCounts(objective.count(batch), batch.num_supervised_tokens, batch.num_tokens, len(batch.names))
            for batch in batches
        ]
        items, *numbers = state.all_reduce_or_raise([sum(column) for column in zip(*counts, strict=True)])
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                state.check_stop()
            enter("in a training step", state.progress.step)
            dist.arm_watchdog()
            with dist.no_sync_until_last(state.wrapped, is_last=number == len(batches)):
                with precision.autocast():
                    parts = mask_dummy_batch(batch, objective.loss(state.wrapped, batch.to(dist.device)))
                # DDP and FSDP average gradients over ranks; the sum is needed
                precision.backward(parts["loss"] / (items / dist.size))
            losses.append(parts["loss"].detach())
            for name, part in parts.items():
                sums[name] = sums[name] + part.detach() if name in sums else part.detach()
        state.optimizers.set_lr(lr)
        state.optimizers.steps_done = state.progress.step
    except BaseException:
        set_rng_state(rng_at_start)
        raise
    state.is_consistent = False  # until the step is counted and logged
    gradients = precision.clip_and_update(state.optimizers, state.cfg.optimizer.grad_clip)
    if dist.device.type == "cpu":
        keep_freed_memory()
    names = [batch.names for batch in batches]
    step_counts = StepCounts(items, *map(int, numbers))
    return StepOutput(state.progress.step + 1, names, step_counts, sums, losses, gradients)


def save_and_interrupt(state: TrainState) -> NoReturn:
    flush_steps(state)
    if state.progress.step:
        state.checkpoints.save_blocking(state.progress.step, state)
    outcome = Outcome.PAUSED if state.is_at_pause else Outcome.INTERRUPTED
    raise Interrupted(state.progress.step, state.run_dir, outcome)


def save_before_failure(state: TrainState, error: BaseException) -> None:
    """Save the last completed step before `error` ends the run, so that a fault costs the step in which it happens, not
    `train.save_every` steps.

    Nothing is saved of a diverged run, if the error came while the optimizer updated the weights, and if one of several
    ranks failed at a place where the others cannot know it: a checkpoint needs the random state of each. Weights that
    are not finite are refused by the writer.
    """
    with suppress(Exception):  # what went wrong here is a consequence of `error`, which is the one to report
        state.follow_run_dir()
        # frees the tensors of the failed step: memory may be what is missing
        traceback.clear_frames(error.__traceback__)
        can_save = state.dist.size == 1 or state.has_joined  # otherwise the others wait in a collective, or have exited
        if can_save:
            flush_steps(state)
        step = state.progress.step
        if isinstance(error, (DivergedError, Interrupted, StopRequested)) or step == state.first_step:
            return
        if not can_save and state.checkpoints.saved_step == step:
            # `step` is being written, or on disk
            return state.logger.warning(
                f"the step after {step} is lost; continue with: {resume_command(state.run_dir)}"
            )
        if not (can_save and state.is_consistent):
            reason = "the update of the weights was not finished" if can_save else "the other ranks wait in the step"
            return state.logger.warning(
                f"step {step} cannot be saved, {reason}; continue from the newest checkpoint with: {resume_command(state.run_dir)}"
            )
        try:
            state.checkpoints.save_blocking(step, state)
        except Exception as failure:
            return state.logger.warning(
                f"step {step} could not be saved, {failure}; continue from the newest checkpoint with: {resume_command(state.run_dir)}"
            )
        state.logger.info(f"step {step} is saved; continue with: {resume_command(state.run_dir)}")


def finish(state: TrainState) -> float:
    """Save the last checkpoint and export the model; return the evaluation loss of the exported weights, or the last
    training loss if there was no evaluation.
    """
    progress = state.progress
    state.checkpoints.save_blocking(progress.step, state)
    loss = progress.recent_losses[-1] if progress.eval_loss is None else progress.eval_loss
    check_converged(state, loss)
    exported = choose_weights(state)
    if state.dist.is_rank_zero:
        try:
            with state.stop.interrupting("the export, the run is saved"):
                export_model(state, exported)
        except StopRequested:  # the other ranks have ended: no collective
            raise Interrupted(progress.step, state.run_dir) from None
    if state.stopped_early:
        state.logger.info(
            f"stopped early: no better evaluation in the last {state.cfg.train.patience} (best {progress.best_loss:.4f} at step {progress.best_step}); train.patience=0 trains on"
        )
    loss = loss if exported.loss is None else exported.loss
    return math.inf if loss is None else loss


def check_converged(state: TrainState, loss: float | None) -> None:
    """Raise DivergedError if the final `loss` is far above that of a uniform distribution, or near it with weights that
    no gradient reaches.

    A loss near the uniform one is no divergence by itself: a short run from random weights ends there, too.
    """
    uniform_loss, dead_steps = (
        state.objective.uniform_loss(state.cfg.model.vocab_size),
        state.progress.zero_gradient_steps,
    )
    if uniform_loss is None or loss is None:
        return
    is_dead = dead_steps >= DEAD_STEPS and loss > DEAD_FACTOR * uniform_loss
    if is_dead or loss > DIVERGED_FACTOR * uniform_loss:
        dead = f", and the gradients of the last {dead_steps} steps are exactly 0" if is_dead else ""
        measured = f"the final loss is {loss:.4g}, that of a uniform distribution {uniform_loss:.2f}{dead}"
        raise DivergedError(f"diverged: {measured}; use a smaller optimizer.lr; {troubleshooting('diverging')}")
