"""One of several ranks, for tests: runs the trainings of a JSON file, [{"folder": ..., "overrides": [...], "stop_at":
null}].

"weights": folder of a model of transformers that a training starts from.
"""

import dataclasses
import faulthandler
import json
import sys
from pathlib import Path

import torch
from engine_fixtures import composed

from common.errors import Interrupted, PeerLostError, run_then_hard_exit
from models.formats.json_files import read_model_config
from runner.engine.build import build_run
from runner.engine.loop import train
from runner.run_dir.metadata import RunMetadata


def inject_nonfinite_loss(state, step, with_gradients):
    """Make the loss of `step` not finite, with its gradients or without."""
    original = state.objective.loss

    def loss(model, batch):
        sums = original(model, batch)
        if state.progress.step != step:
            return sums
        return {name: part * float("nan") if with_gradients else part + float("inf") for name, part in sums.items()}

    state.objective.loss = loss


def stop_in_batch(state, rank, is_training, nth):
    """Return a stop request of `rank` alone that arrives in its `nth` batch of training or evaluation, and the list of
    such batches.
    """
    original, calls = state.objective.loss, []

    def loss(model, batch):
        if state.model.training == is_training:
            calls.append(batch)
        return original(model, batch)

    state.objective.loss = loss
    return calls, lambda: state.dist.rank == rank and len(calls) >= nth


def stop_in_export(state):
    """Return a stop request of rank 0 that arrives once the last step is saved."""
    return lambda: state.dist.is_rank_zero and state.checkpoints.saved_step == state.total_steps


def fail_on(state, rank, where):
    """Raise on one rank alone: from its loader before step 3, or in its evaluation."""
    if state.dist.rank != rank:
        return
    iter_steps, loss = state.loader.iter_steps, state.objective.loss

    def failing_steps(*args):
        for number, batches in enumerate(iter_steps(*args), start=1):
            if number == 3:
                raise OSError("the disk of this rank failed")
            yield batches

    def failing_loss(model, batch):
        if not state.model.training:
            raise RuntimeError("this rank cannot evaluate")
        return loss(model, batch)

    if where == "data":
        state.loader.iter_steps = failing_steps
    else:
        state.objective.loss = failing_loss


def fails(state, rank, where):
    fail_on(state, rank, where)
    try:
        train(state)
    except PeerLostError:
        return state.dist.rank != rank
    except (OSError, RuntimeError):
        return state.dist.rank == rank
    return False


def main():
    faulthandler.enable()  # a crash in native code leaves its stacks in the output
    torch.set_num_threads(1)
    for number, training in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        torch.manual_seed(number)  # a training must not depend on the random state that the one before it has left
        run_dir = Path(training["folder"])
        run_dir.mkdir(exist_ok=True)
        config = composed(*training["overrides"])
        if weights := training.get("weights"):
            config = dataclasses.replace(
                config, model=read_model_config(Path(weights), "transformers"), init_from=weights
            )
        state = build_run(config, RunMetadata.detached(run_dir, training.get("attempt", 1)))
        stop_at, ends_in_export = training.get("stop_at"), training.get("stop_in_export")
        if (fault := training.get("nonfinite")) and fault["rank"] == state.dist.rank:
            inject_nonfinite_loss(state, fault["step"], fault["with_gradients"])
        if plan := training.get("fail_on"):
            assert fails(state, **plan), f"rank {state.dist.rank} ended otherwise"
            continue
        if plan := training.get("stop_in"):
            calls, stop_requested = stop_in_batch(state, **plan)
            try:
                train(state, stop_requested)
            except Interrupted:
                assert len(calls) == plan["nth"], f"rank {state.dist.rank} ran {len(calls)} batches"
                continue
            raise AssertionError("not stopped")
        try:
            train(
                state,
                stop_requested=stop_in_export(state)
                if ends_in_export
                else lambda state=state, at=stop_at: state.dist.is_rank_zero and state.progress.step == at,
            )
        except Interrupted:
            assert stop_at is not None or (ends_in_export and state.dist.is_rank_zero)


if __name__ == "__main__":
    run_then_hard_exit(main)
