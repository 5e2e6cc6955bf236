"""What a run that has no memory left says: what was measured, and the overrides that need less."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.limits.memory import peak_resident_bytes
from runner.diagnostics.symptoms import troubleshooting
from runner.planning.alternatives import Alternative, find_alternatives
from runner.planning.facts.data import data_facts
from runner.planning.facts.machine import Machine, resident_bytes, this_machine
from runner.planning.facts.model import model_facts
from runner.planning.memory import CPU_LIBRARIES, estimate_memory

if TYPE_CHECKING:
    from torch import Tensor

    from runner.engine.state import TrainState

TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")  # of a RuntimeError of PyTorch
REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B|\d+ bytes)")
MAX_ALTERNATIVES = 3
PLAN = "python runner/plan.py with the same overrides lists more"


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and any(text in str(error).lower() for text in TEXTS))


def describe_out_of_memory(state: TrainState, error: BaseException) -> str:
    """Return one line: where, the peak by part, and overrides in the order of what they cost. `error` is what the step raised."""
    requested = REQUESTED.search(str(error))
    amount = f", {_size(requested[1])} more were asked for" if requested else f" ({type(error).__name__}: {str(error).partition('.')[0][:200]})"
    parts = f"out of memory after step {state.progress.step}{amount}: {measured_parts(state)}"
    try:
        alternatives = smaller_settings(state)
    except Exception:  # the formula needs memory, too, and of other models facts that may be missing: the cause is reported all the same
        alternatives = []
    fixes = [f"{alternative.overrides} (about {_mib(alternative.memory)} in all)" for alternative in alternatives]
    return f"{parts}; {', or '.join(fixes) or 'a smaller train.batch_size'}; {PLAN}; {troubleshooting('out-of-memory')}"


def measured_parts(state: TrainState) -> str:
    """Return the peak of the memory, and what of it are tensors that stay from step to step."""
    import torch

    device, models = state.dist.device, [state.model, *state.objective.extra_models]
    trained = [p for model in models for p in model.parameters()]
    stay = {
        "weights": _bytes(trained),
        "gradients": _bytes(p for p in trained if p.requires_grad),  # as large as what is trained, in the middle of the backward pass
        "optimizer": _bytes(value for part in state.optimizers.parts for entry in part.state.values() for value in entry.values() if torch.is_tensor(value)),
    }
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    rest = max(0, peak - sum(stay.values()))
    name = "activations, logits and temporary tensors" if device.type == "cuda" else "activations, logits, program and data"
    return f"peak {_mib(peak)} ({', '.join(f'{part} {_mib(size)}' for part, size in stay.items())}, {name} {_mib(rest)})"


def smaller_settings(state: TrainState) -> list[Alternative]:
    """Return overrides that need less memory than the run has just not got, the first that fit."""
    cfg, ranks = state.cfg, state.dist.size
    facts, data = model_facts(cfg), data_facts(cfg, state.pipeline, state.tokenizer, ranks)
    machine, process = this_machine(cfg.device), resident_bytes()
    if machine.device == "cpu":  # the process has weights and optimizer already, which the formula adds
        process = max(CPU_LIBRARIES, process - _bytes(state.model.parameters()))
    estimate = estimate_memory(cfg, facts, data.shape, data.micro_batches, machine.device, process, ranks)
    total = estimate.total * (ranks if machine.device == "cpu" else 1)
    machine = dataclasses.replace(machine, memory=min(_available(machine), total - 1))  # what the settings of the run need was not there
    found = find_alternatives(cfg, facts, data, machine, process, ranks)
    fitting = [alternative for alternative in found if alternative.fits]
    return (fitting or found[-1:])[:MAX_ALTERNATIVES]


def _available(machine: Machine) -> int:
    """Return the bytes of the device without what other programs have."""
    import torch

    if machine.device == "cpu":
        return machine.memory
    return machine.available + torch.cuda.memory_reserved()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _size(text: str) -> str:
    return _mib(int(text.split()[0])) if text.endswith("bytes") else text


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
