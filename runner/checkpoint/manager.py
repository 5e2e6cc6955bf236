"""What a checkpoint holds and how it comes back: everything the next step reads, whole or not at all.

step-00000120/ model.safetensors      what learns, fp32 (adapters only under LoRA; tied tensors once)
               optimizer.safetensors  the optimizers' state by parameter name
               state.json             progress, scaler, random states, positions in the logs, facts about the run
               MANIFEST.json          sizes and checksums, written last
How it gets onto the disk is durable.py's business.
"""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from common.errors import TrainingError, UserError
from common.filesystem import make_dirs
from models.decoder import Decoder
from runner.checkpoint import atomic_dir
from runner.checkpoint.async_writer import SaveResult
from runner.checkpoint.compatibility import diff_facts
from runner.checkpoint.format import CHECKPOINT_FORMAT, FileContents, checkpoint_name, describe_shape, safetensors_chunks, total_bytes
from runner.engine.device import rng
from runner.engine.device.mesh import distribute_like, full_tensor
from runner.engine.state import Progress, TrainState


def save_async(run: TrainState) -> None:
    """Copy the state to the leading rank's host memory and hand it to its writer thread; each step is saved once."""
    assert not run.unread, "what a checkpoint says of its steps must be known"
    step, folder = run.progress.step, run.folder / "checkpoints"
    if run.world.leader_says(step == run.saved_step):
        return None
    started = time.perf_counter()
    random = run.world.gather(rng.get_rng_state())
    run.world.reshard(run.model)
    model, optimizer = (_copy_tensors(tensors, run.world.leads) for tensors in (trainable_parameters(run.model), run.optimizers.state()))
    if not run.world.leads:
        return None
    try:
        state = json.dumps(_progress_state(run, random), indent=1).encode()
    except OSError as error:  # the logs it points into could not be written
        return _handle_failure(run, error)
    files: FileContents = {
        "model.safetensors": partial(safetensors_chunks, model),
        "optimizer.safetensors": partial(safetensors_chunks, optimizer),
        "state.json": lambda: state,
    }
    retention = RetentionPolicy(run.cfg.train.keep_checkpoints, run.cfg.train.keep_every, run.progress.best_step)
    run.writer.submit(
        checkpoint_name(step), partial(_write_checkpoint, folder, checkpoint_name(step), files, total_bytes(model) + total_bytes(optimizer), retention)
    )
    run.saved_step = step
    run.save_stall += time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the newest few, every so many steps, and the best."""

    newest: int
    every: int  # steps; 0: none
    best: int | None  # step of the best evaluation, if it was saved

    def protects(self, step: int) -> bool:
        return step == self.best or (self.every > 0 and step % self.every == 0)


def _write_checkpoint(folder: Path, name: str, files: FileContents, size: int, retention: RetentionPolicy) -> None:
    """On the writer thread. Only what is on the disk for good may be called latest, or push an older one out."""
    make_dirs(folder)
    atomic_dir.write_atomic_dir(folder, name, files, {}, expected=size)
    atomic_dir.write_pointer(folder, "latest", name)
    mark_best(folder, retention.best)
    atomic_dir.prune_dirs(folder, retention.newest, protect={path.name for path in folder.glob("step-*") if retention.protects(int(path.name[5:]))})


def mark_best(folder: Path, step: int | None) -> None:
    """`best` names the best step among those saved; an evaluation that falls between two saves leaves no mark."""
    if step is not None and (folder / checkpoint_name(step)).is_dir():
        atomic_dir.write_pointer(folder, "best", checkpoint_name(step))


def report_finished(run: TrainState) -> None:
    """Say what the writer has finished since the last call; stop a run whose saves keep failing."""
    _handle_result(run, run.writer.poll())


def save_blocking(run: TrainState) -> None:
    """Save, and see it on the disk; what fails is tried again until it passes or RunFailed is raised."""
    while True:
        save_async(run)
        wait_for_save(run)
        if run.world.leader_says(run.saved_step == run.progress.step):
            return


def wait_for_save(run: TrainState) -> None:
    """Wait until what was handed to the writer is on the disk, or has failed."""
    _handle_result(run, run.writer.wait())


def _handle_result(run: TrainState, outcomes: list[SaveResult]) -> None:
    for outcome in outcomes:
        if outcome.error is None:
            run.failed_saves = 0
            run.track.say(f"saved {outcome.name} in {outcome.seconds:.2f} s")
            run.note(checkpoint=outcome.name, step=int(outcome.name[5:]), degraded=None)
        elif isinstance(outcome.error, OSError):
            _handle_failure(run, outcome.error)
        else:
            raise outcome.error


def _handle_failure(run: TrainState, error: OSError) -> None:
    """A full or broken disk: go on with the last good checkpoint, say so, and stop when it does not pass."""
    run.failed_saves += 1
    run.saved_step = 0
    run.track.warn(str(error))
    run.note(degraded=f"step {run.progress.step}: {error}")
    if run.failed_saves >= run.cfg.train.max_failed_saves:
        raise TrainingError(f"{run.failed_saves} saves in a row failed, the last one with: {error}")


def newest_checkpoint(folder: Path) -> Path:
    """The newest checkpoint of a run folder that proves whole; FileNotFoundError where none does."""
    found, _ = atomic_dir.newest_valid(folder / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    return found


def load_newest(run: TrainState) -> bool:
    """Continue from the newest checkpoint that proves whole; False where there is none yet.

    Raises ValueError(what, where, fix) if the checkpoint is of another model, stage, tokenizer or data.
    """
    folder, passed_over = atomic_dir.newest_valid(run.folder / "checkpoints")
    for name, reason in passed_over:
        run.track.warn(f"checkpoint {name} passed over: {reason}")
    if folder is None:
        if passed_over:
            raise UserError(
                "no checkpoint of this run is whole: " + "; ".join(f"{name}: {reason}" for name, reason in passed_over),
                str(run.folder / "checkpoints"),
                "bring one back, or start a new run",
            )
        return False
    load_checkpoint(run, folder)
    return True


def load_checkpoint(run: TrainState, folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    if state.get("format") != CHECKPOINT_FORMAT:
        raise UserError(
            f"the checkpoint has format {state.get('format')}, this program reads format {CHECKPOINT_FORMAT}",
            str(folder),
            "use the version of the program that wrote it, or init_from= for its weights",
        )
    if state["progress"]["step"] > run.total_steps:
        raise UserError(
            f"the run already stands at step {state['progress']['step']}", f"train.max_steps={run.total_steps}", "give a larger number; a run does not go back"
        )
    _check_compatible(run, state["facts"], folder)
    load_strict(trainable_parameters(run.model), safetensors.torch.load_file(folder / "model.safetensors"), folder)
    run.optimizers.load_state(safetensors.torch.load_file(folder / "optimizer.safetensors"))
    run.precision.load_state(state["scaler"])
    run.progress = Progress(**state["progress"])
    run.saved_step = run.progress.step
    run.log_position, run.tracker_id = state["log"], state["tracker_id"]
    restore_rng(run, [state["random"], *state.get("random of other ranks", ())])


def restore_rng(run: TrainState, states: list[dict[str, Any]]) -> None:
    """A rank that was not there when the checkpoint was saved begins with a random state of its own."""
    rank = run.world.rank
    if rank < len(states):
        rng.set_rng_state(states[rank])
    else:
        rng.seed_all((run.cfg.seed + rank + run.progress.step * run.world.size) % 2**32)


def trainable_parameters(model: Decoder) -> dict[str, Tensor]:
    """What training changes, by name; a tied tensor appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _progress_state(run: TrainState, random: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": CHECKPOINT_FORMAT,
        "progress": dataclasses.asdict(run.progress),
        "scaler": run.precision.state(),
        "random": random[0],
        **({"random of other ranks": random[1:]} if len(random) > 1 else {}),
        "log": run.track.position(),
        "tracker_id": run.track.tracker_id,
        "facts": run.facts,
    }


def _copy_tensors(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """On the host. Those that ranks share are gathered one at a time, by all of them; most keep nothing of it."""
    copies = {}
    for name, tensor in tensors.items():
        gathered = full_tensor(tensor.detach())
        assert gathered.dtype == torch.float32, f"{name} would be saved as {gathered.dtype}"
        if keep:
            copies[name] = gathered.to("cpu", copy=True).contiguous()
    return copies


def load_strict(into: dict[str, Tensor], state: dict[str, Tensor], folder: Path) -> None:
    differ = {
        f"{name}: {describe_shape(into.get(name))} here, {describe_shape(state.get(name))} there"
        for name in into.keys() | state.keys()
        if describe_shape(into.get(name)) != describe_shape(state.get(name))
    }
    if differ:
        raise UserError(
            "the checkpoint's tensors do not fit this model:\n  " + "\n  ".join(sorted(differ)[:12]),
            str(folder),
            "resume with the model the run was started with",
        )
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(distribute_like(state[name].to(tensor.device), like=tensor))


def _check_compatible(run: TrainState, stored: dict[str, Any], folder: Path) -> None:
    """Refuse what would make this another run; say, and put on record, what changes its course or its bits."""
    found = diff_facts(stored, run.facts)
    if found["refused"]:
        raise UserError(
            "this run is not the one the checkpoint was saved by:\n    " + "\n    ".join(found["refused"]),
            str(folder),
            f"resume with the stored words, or start a new run with init_from={run.folder}",
        )
    for word in found["course"]:
        run.track.say(f"from here on {word}")
    for word in found["inexact"]:
        run.track.warn(f"no longer exact to the bit, {word}")
    if found["inexact"]:
        run.note(exact=False, inexact_because=found["inexact"])
    if found["course"]:
        run.note(changed=found["course"])
