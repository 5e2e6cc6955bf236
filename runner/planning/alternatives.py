"""Settings with which a run needs less memory: each with the estimate of the same formula; smaller micro-batches; and
what a run that has no memory left says.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.limits import parse_yaml, peak_resident_bytes, smallest_limit
from common.paths import command_line
from models.config import LoraConfig
from runner.diagnostics.symptoms import troubleshooting
from runner.engine.config import Config
from runner.planning.facts import DataFacts, Machine, ModelSizes, data_facts, model_facts, resident_bytes, this_machine
from runner.planning.memory import CUDA_CONTEXT, estimate_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.engine.state import TrainState

LARGE_DROP = 4  # from one size to the next: then a size about half as large is proposed, too
LORA = "{rank: 16, alpha: 32, dropout: 0, targets: [all-linear], rslora: false, dora: false, quantize: null, continue_adapter: false}"
REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_ALTERNATIVES = 3


@dataclass(frozen=True)
class MicroBatch:
    size: int  # train.batch_size
    accumulation: int  # train.accumulation_steps
    changes: str = ""  # what differs in the training; "": the rows of a step are the same

    @property
    def overrides(self) -> str:
        return f"train.batch_size={self.size} train.accumulation_steps={self.accumulation}"


def smaller_micro_batch(size: int, accumulation: int) -> MicroBatch | None:
    """Return the largest micro-batch of at most half the size with which a step has the same rows; None for a size of
    1.

    13 x 1 becomes 1 x 13, 15 x 1 becomes 5 x 3, 7 x 4 becomes 2 x 14.
    """
    rows = size * accumulation
    return next(
        (MicroBatch(smaller, rows // smaller) for smaller in range(size // 2, 0, -1) if rows % smaller == 0), None
    )


def half_micro_batch(size: int, accumulation: int) -> MicroBatch | None:
    """Return a micro-batch of half the size, rounded up, where one of the same rows per step is smaller by LARGE_DROP;
    otherwise None. A step has other rows.
    """
    same_rows = smaller_micro_batch(size, accumulation)
    if same_rows is None or same_rows.size * LARGE_DROP >= size:
        return None
    half, rows = (size + 1) // 2, size * accumulation
    steps = max(1, round(rows / half))
    return MicroBatch(half, steps, f"{half * steps} rows per step instead of {rows}")


@dataclass(frozen=True)
class Alternative:
    """Settings with which a run might fit, and the estimate of the same formula for them."""

    overrides: str
    memory: int  # bytes
    fits: bool
    changes: str = ""  # what differs in the training, where that is not named by the override itself


def find_alternatives(
    cfg: Config, model: ModelSizes, data: DataFacts, machine: Machine, ranks: int, process: int
) -> list[Alternative]:
    """Return settings that need less memory, each with its estimate.

    One change at a time, and all that fit together where none is enough.
    """
    found = []

    def add(overrides: str, changed: Config, model: ModelSizes, data: DataFacts, changes: str = "") -> bool:
        memory = estimate_memory(changed, model, data, machine, ranks, process).of_device
        found.append(Alternative(overrides, memory, memory <= machine.memory, changes))
        return found[-1].fits

    per_batch = min(cfg.train.batch_size, data.sequences)
    size, accumulation, smallest = cfg.train.batch_size, cfg.train.accumulation_steps, data
    fits = False
    while not fits and (same_rows := smaller_micro_batch(size, accumulation)) is not None:
        half = half_micro_batch(size, accumulation)
        for micro_batch in (half, same_rows) if half is not None else (same_rows,):
            size, accumulation = micro_batch.size, micro_batch.accumulation
            rows = math.ceil(data.shape.rows * min(size, per_batch) / per_batch)
            smallest = replace(data, shape=replace(data.shape, rows=rows), micro_batches=accumulation)
            changed = with_train(cfg, batch_size=size, accumulation_steps=accumulation)
            fits = add(micro_batch.overrides, changed, model, smallest, micro_batch.changes)
    for mode in ("selective", "full"):
        if cfg.train.activation_checkpointing in ("none", "selective") and mode != cfg.train.activation_checkpointing:
            changed = with_train(cfg, activation_checkpointing=mode)
            add(f"train.activation_checkpointing={mode}", changed, model, data)
    bf16 = replace(cfg, precision=replace(cfg.precision, name="bf16"))
    if cfg.precision.name in ("fp32", "tf32"):
        add("precision=bf16", bf16, model, data)
    lora = f"'stage.lora={LORA}'"
    if adapters := with_lora(cfg):
        add(lora, *adapters, data)
    if not any(alternative.fits for alternative in found):
        together = with_train(bf16, batch_size=size, accumulation_steps=accumulation, activation_checkpointing="full")
        text = f"{MicroBatch(size, accumulation).overrides} train.activation_checkpointing=full precision=bf16"
        if not add(text, together, model, smallest) and (adapters := with_lora(together)):
            add(f"{text} {lora}", *adapters, smallest)
    return found


def with_train(cfg: Config, **values: Any) -> Config:
    return replace(cfg, train=replace(cfg.train, **values))


def with_lora(cfg: Config) -> tuple[Config, ModelSizes] | None:
    """Return the config with adapters, and the sizes of its model; None where there are some already, where weights
    start from scratch, or where the model takes none.
    """
    if cfg.stage.lora is not None or cfg.init_from == "scratch":
        return None
    changed = replace(cfg, stage=replace(cfg.stage, lora=LoraConfig(**parse_yaml(LORA))))
    try:
        return changed, model_facts(changed)
    except UserError:  # no layer takes an adapter
        return None


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
    except Exception:  # the formula needs memory and facts that may be missing: the cause is reported all the same
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
    optimizer = filter(torch.is_tensor, state.optimizers.state_dict().values())
    gradients = (p.grad for p in parameters if p.grad is not None)
    return {"weights": _bytes(parameters), "gradients": _bytes(gradients), "optimizer": _bytes(optimizer)}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
