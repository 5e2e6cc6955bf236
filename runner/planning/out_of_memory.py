"""What a run that has no memory left says: what was measured, and the overrides that need less."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from common.limits import peak_resident_bytes, smallest_limit
from common.paths import command_line
from runner.diagnostics.symptoms import troubleshooting
from runner.planning.alternatives import Alternative, find_alternatives
from runner.planning.data import data_facts
from runner.planning.machine import Machine, resident_bytes, this_machine
from runner.planning.memory import CUDA_CONTEXT
from runner.planning.model import model_facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.engine.state import TrainState

REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_ALTERNATIVES = 3


def describe_out_of_memory(state: TrainState, error: BaseException) -> str:
    """Return one line: where, the peak by part, and overrides in the order of what they cost.

    `error` is what the step raised.
    """
    import torch

    found = REQUESTED.search(str(error))
    requested = round(float(found[1]) * UNITS[found[2]]) if found else 0
    amount = (
        f", {_mib(requested)} more were asked for"
        if requested
        else f" ({type(error).__name__}: {str(error).partition('.')[0][:200]})"
    )
    device = state.dist.device
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()
    parts = (
        f"out of memory after step {state.progress.step}{amount}, {limit_text(device)}: {measured_parts(state, peak)}"
    )
    try:
        alternatives = smaller_settings(state, peak, requested)
    # the formula needs memory, too, and of other models facts that may be missing: the cause is reported all the same
    except Exception:
        alternatives = []
    fixes = [
        f"{each.overrides} (about {_mib(each.memory)} in all{', ' + each.changes if each.changes else ''})"
        for each in alternatives
    ]
    return f"{parts}; {', or '.join(fixes) or 'a smaller train.batch_size'}; {' '.join(command_line('plan'))} with the same overrides lists more; {troubleshooting('out-of-memory')}"


def limit_text(device: torch.device) -> str:
    """Return the limit that the process may have hit, and what sets it."""
    import torch

    if device.type != "cuda":
        size, origin = smallest_limit()
        return f"the limit is {_mib(size)} ({origin})"
    free, total = torch.cuda.mem_get_info(device)
    return f"the GPU has {_mib(total)}, {_mib(free)} are free"


def measured_parts(state: TrainState, peak: int) -> str:
    """Return the peak of the memory, and what of it are tensors that stay from step to step."""
    stay = live_bytes(state)
    # a step needs all of them
    stay["gradients"] = max(stay["gradients"], _bytes(p for p in state.model.parameters() if p.requires_grad))
    name = (
        "activations, logits and temporary tensors"
        if state.dist.device.type == "cuda"
        else "activations, logits, program and data"
    )
    stay[name] = max(0, peak - sum(stay.values()))
    return f"peak {_mib(peak)} ({', '.join(f'{part} {_mib(size)}' for part, size in stay.items())})"


def memory_limit(machine: Machine, peak: int, requested: int) -> int:
    """Return the bytes that the process could get: it has had `peak`, and `requested` more were refused.

    That of the device if it lies between both, else (other programs, fragments, another limit) half way.
    """
    import torch

    others = machine.memory - machine.available - torch.cuda.memory_reserved() if machine.device == "cuda" else 0
    known = machine.memory - max(0, others)
    had = peak + CUDA_CONTEXT if machine.device == "cuda" else peak
    return known if had <= known < had + requested else had + requested // 2


def smaller_settings(state: TrainState, peak: int, requested: int) -> list[Alternative]:
    """Return overrides that need at most what the process could get, the first MAX_ALTERNATIVES of them; the smallest
    if none does.
    """
    cfg, ranks = state.cfg, max(1, state.dist.size // state.cfg.distributed.nnodes)  # of this machine
    model, data = model_facts(cfg), data_facts(cfg, state.pipeline, state.tokenizer, state.dist.size)
    machine, process = this_machine(cfg.device), 0
    limit = memory_limit(machine, peak, requested)
    if machine.device == "cpu":
        with suppress(OSError, AttributeError):  # another C library than that of GNU
            ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system: what stays is used
        process, limit = resident_bytes() - sum(live_bytes(state).values()), limit * ranks
    found = find_alternatives(cfg, model, data, dataclasses.replace(machine, memory=limit), ranks, process)
    fitting = [alternative for alternative in found if alternative.fits]
    return fitting[:MAX_ALTERNATIVES] or sorted(found, key=lambda alternative: alternative.memory)[:1]


def live_bytes(state: TrainState) -> dict[str, int]:
    """Return the bytes of the tensors that stay from step to step, as far as there are any now."""
    import torch

    parameters = [p for model in (state.model, *state.objective.extra_models) for p in model.parameters()]
    optimizer = (
        value
        for part in state.optimizers.parts
        for entry in part.state.values()
        for value in entry.values()
        if torch.is_tensor(value)
    )
    gradients = (p.grad for p in parameters if p.grad is not None)
    return {"weights": _bytes(parameters), "gradients": _bytes(gradients), "optimizer": _bytes(optimizer)}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
