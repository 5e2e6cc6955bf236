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
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from models.decoder import Decoder
from runner.engine import durable, randomness
from runner.engine.disk import Pieces, make_folder
from runner.engine.distributed import placed, whole
from runner.engine.identity import changes
from runner.engine.run import Progress, Run, RunFailed
from runner.engine.writer import Outcome

Files = dict[str, Callable[[], Pieces]]

FORMAT = 1  # of state.json
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(run: Run) -> None:
    """Copy the state to the leading rank's host memory and hand it to its writer thread; each step is saved once."""
    assert not run.unread, "what a checkpoint says of its steps must be known"
    step, folder = run.progress.step, run.folder / "checkpoints"
    if run.world.leader_says(step == run.saved_step):
        return None
    started = time.perf_counter()
    random = run.world.gather(randomness.capture())
    run.world.reshard(run.model)
    model, optimizer = (_copied(tensors, run.world.leads) for tensors in (learning(run.model), run.optimizers.state()))
    if not run.world.leads:
        return None
    try:
        state = json.dumps(_state(run, random), indent=1).encode()
    except OSError as error:  # the logs it points into could not be written
        return _failed(run, error)
    files: Files = {
        "model.safetensors": partial(_pieces, model),
        "optimizer.safetensors": partial(_pieces, optimizer),
        "state.json": lambda: state,
    }
    retention = Retention(run.cfg.train.keep_checkpoints, run.cfg.train.keep_every, run.progress.best_step)
    run.writer.submit(name_of(step), partial(_commit, folder, name_of(step), files, _size(model) + _size(optimizer), retention))
    run.saved_step = step
    run.save_stall += time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest few, every so many steps, and the best."""

    newest: int
    every: int  # steps; 0: none
    best: int | None  # step of the best evaluation, if it was saved

    def protects(self, step: int) -> bool:
        return step == self.best or (self.every > 0 and step % self.every == 0)


def _commit(folder: Path, name: str, files: Files, size: int, retention: Retention) -> None:
    """On the writer thread. Only what is on the disk for good may be called latest, or push an older one out."""
    make_folder(folder)
    durable.write_folder(folder, name, files, {}, expected=size)
    durable.hint(folder, "latest", name)
    note_best(folder, retention.best)
    durable.prune(folder, retention.newest, protect={path.name for path in folder.glob("step-*") if retention.protects(int(path.name[5:]))})


def note_best(folder: Path, step: int | None) -> None:
    """`best` names the best step among those saved; an evaluation that falls between two saves leaves no mark."""
    if step is not None and (folder / name_of(step)).is_dir():
        durable.hint(folder, "best", name_of(step))


def _pieces(tensors: dict[str, Tensor]) -> list[bytes | memoryview]:
    """A safetensors file (https://huggingface.co/docs/safetensors) as its header and the memory of each tensor: nothing is copied.

    Also on the writer thread. No NaN is ever committed, however it came into the memory of a healthy run.
    """
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        if not _finite(tensor):
            raise RunFailed(f"{name} is no longer finite and was not saved; resume= continues from the checkpoint before")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return [len(text).to_bytes(8, "little") + text, *parts]


def _finite(tensor: Tensor) -> bool:
    low, high = tensor.aminmax()  # a NaN anywhere comes out as both; isfinite() takes longer than writing the file
    return math.isfinite(low.item() + high.item())


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def poll(run: Run) -> None:
    """Say what the writer has finished since the last call; stop a run whose saves keep failing."""
    _account(run, run.writer.poll())


def commit(run: Run) -> None:
    """Save, and see it on the disk; what fails is tried again until it passes or RunFailed is raised."""
    while True:
        save(run)
        see_out(run)
        if run.world.leader_says(run.saved_step == run.progress.step):
            return


def see_out(run: Run) -> None:
    """Wait until what was handed to the writer is on the disk, or has failed."""
    _account(run, run.writer.wait())


def _account(run: Run, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is None:
            run.failed_saves = 0
            run.track.say(f"saved {outcome.name} in {outcome.seconds:.2f} s")
            run.note(checkpoint=outcome.name, step=int(outcome.name[5:]), degraded=None)
        elif isinstance(outcome.error, OSError):
            _failed(run, outcome.error)
        else:
            raise outcome.error


def _failed(run: Run, error: OSError) -> None:
    """A full or broken disk: go on with the last good checkpoint, say so, and stop when it does not pass."""
    run.failed_saves += 1
    run.saved_step = 0
    run.track.warn(str(error))
    run.note(degraded=f"step {run.progress.step}: {error}")
    if run.failed_saves >= run.cfg.train.max_failed_saves:
        raise RunFailed(f"{run.failed_saves} saves in a row failed, the last one with: {error}")


def newest_of(folder: Path) -> Path:
    """The newest checkpoint of a run folder that proves whole; FileNotFoundError where none does."""
    found, _ = durable.newest(folder / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    return found


def load_newest(run: Run) -> bool:
    """Continue from the newest checkpoint that proves whole; False where there is none yet.

    Raises ValueError(what, where, fix) if the checkpoint is of another model, stage, tokenizer or data.
    """
    folder, passed_over = durable.newest(run.folder / "checkpoints")
    for name, reason in passed_over:
        run.track.warn(f"checkpoint {name} passed over: {reason}")
    if folder is None:
        if passed_over:
            raise ValueError(
                "no checkpoint of this run is whole: " + "; ".join(f"{name}: {reason}" for name, reason in passed_over),
                str(run.folder / "checkpoints"),
                "bring one back, or start a new run",
            )
        return False
    load(run, folder)
    return True


def load(run: Run, folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise ValueError(
            f"the checkpoint has format {state.get('format')}, this program reads format {FORMAT}",
            str(folder),
            "use the version of the program that wrote it, or init_from= for its weights",
        )
    if state["progress"]["step"] > run.total_steps:
        raise ValueError(
            f"the run already stands at step {state['progress']['step']}", f"train.max_steps={run.total_steps}", "give a larger number; a run does not go back"
        )
    _agree(run, state["facts"], folder)
    fill(learning(run.model), safetensors.torch.load_file(folder / "model.safetensors"), folder)
    run.optimizers.load_state(safetensors.torch.load_file(folder / "optimizer.safetensors"))
    run.precision.load_state(state["scaler"])
    run.progress = Progress(**state["progress"])
    run.saved_step = run.progress.step
    run.log_position, run.tracker_id = state["log"], state["tracker_id"]
    restore_random(run, [state["random"], *state.get("random of other ranks", ())])


def restore_random(run: Run, states: list[dict[str, Any]]) -> None:
    """A rank that was not there when the checkpoint was saved begins with a random state of its own."""
    rank = run.world.rank
    if rank < len(states):
        randomness.restore(states[rank])
    else:
        randomness.seed_all((run.cfg.seed + rank + run.progress.step * run.world.size) % 2**32)


def learning(model: Decoder) -> dict[str, Tensor]:
    """What training changes, by name; a tied tensor appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _state(run: Run, random: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "progress": dataclasses.asdict(run.progress),
        "scaler": run.precision.state(),
        "random": random[0],
        **({"random of other ranks": random[1:]} if len(random) > 1 else {}),
        "log": run.track.position(),
        "tracker_id": run.track.tracker_id,
        "facts": run.facts,
    }


def _copied(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """On the host. Those that ranks share are gathered one at a time, by all of them; most keep nothing of it."""
    copies = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())
        assert gathered.dtype == torch.float32, f"{name} would be saved as {gathered.dtype}"
        if keep:
            copies[name] = gathered.to("cpu", copy=True).contiguous()
    return copies


def fill(into: dict[str, Tensor], state: dict[str, Tensor], folder: Path) -> None:
    differ = {
        f"{name}: {_shape(into.get(name))} here, {_shape(state.get(name))} there"
        for name in into.keys() | state.keys()
        if _shape(into.get(name)) != _shape(state.get(name))
    }
    if differ:
        raise ValueError(
            "the checkpoint's tensors do not fit this model:\n  " + "\n  ".join(sorted(differ)[:12]),
            str(folder),
            "resume with the model the run was started with",
        )
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(placed(state[name].to(tensor.device), like=tensor))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape))


def _agree(run: Run, stored: dict[str, Any], folder: Path) -> None:
    """Refuse what would make this another run; say, and put on record, what changes its course or its bits."""
    found = changes(stored, run.facts)
    if found["refused"]:
        raise ValueError(
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
