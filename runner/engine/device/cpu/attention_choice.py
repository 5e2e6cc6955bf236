"""Which kernel computes attention on the CPU: measured at the start of a long run, on its own shapes, kept for later runs, and repeated on resume."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEFAULT = "auto"  # blocks of 64 queries
FUSED = "fused"
CANDIDATES = (DEFAULT, "blocks-32", "blocks-128", FUSED)
WORTHWHILE = 0.9  # another kernel than the default takes at most this share of its time: a choice by chance would change the bits of a run for nothing
TURNS, PASSES = 4, 2  # of each kernel; several turns, because a training that starts beside this one disturbs some of them
ROW_LIMIT, TOKEN_LIMIT = 4, 2_048  # measured at a time: the order of kernels is that of larger batches, too
MAX_CHOICE_BYTES = 10_000


@dataclass(frozen=True)
class AttentionShape:
    """What one layer computes in one micro-batch."""

    rows: int
    tokens: int  # per row
    documents: int  # per row
    heads: int
    key_heads: int
    head_width: int
    dtype: str  # of torch: float32 or bfloat16


@dataclass(frozen=True)
class AttentionChoice:
    kernel: str  # one of `models.layers.attention.CPU_KERNELS`
    reason: str  # for the header of the log
    has_fused: bool = False  # this process can compute the fused kernel


def common_choice(choices: list[list[Any]]) -> AttentionChoice:
    """Return the choice of all ranks from (kernel, reason, has_fused) of each: that of the first, unless it is a kernel that some rank cannot compute."""
    kernel, reason, has_fused = choices[0]
    if kernel == FUSED and not all(rank_has_fused for *_, rank_has_fused in choices):
        return AttentionChoice(DEFAULT, "blocks of queries: a rank has no fused kernel", has_fused)
    return AttentionChoice(kernel, reason, has_fused)


def repeat_choice(saved: object, shape: AttentionShape, folder: Path) -> AttentionChoice:
    """Return the kernel of a checkpoint, `saved` of its environment; the default where this machine cannot compute it, which the resume reports."""
    from models.layers.attention import CPU_KERNELS
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    if not isinstance(saved, str) or saved not in CPU_KERNELS:
        return AttentionChoice(DEFAULT, "")
    if saved == FUSED:
        try:
            _load_fused(shape, folder)
        except KernelsUnavailableError as error:
            return AttentionChoice(DEFAULT, f"blocks of queries: the fused kernel of the checkpoint is not available, {error}")
    return AttentionChoice(saved, f"{saved}, as its checkpoint", has_fused=saved == FUSED)


def _load_fused(shape: AttentionShape, folder: Path) -> None:
    """Raise KernelsUnavailableError if this machine cannot compute the fused kernel for `shape`."""
    import torch

    from models.layers.cpu_kernels.fused_attention import check_product, supports
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels

    dtype = getattr(torch, shape.dtype)
    if not supports(dtype, shape.head_width):
        raise KernelsUnavailableError(f"not for heads of {shape.head_width} numbers in {shape.dtype}")
    load_kernels(folder)
    check_product(dtype, shape.head_width)


def choose_attention(shape: AttentionShape, folder: Path, facts: Mapping[str, Any]) -> AttentionChoice:
    """Return the fastest kernel for `shape`, forward and backward.

    `folder`: a private one for compiled programs; a choice made before is taken from it. `facts` (JSON values): the processor, the libraries and all
    else that the time depends on.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    unavailable = ""
    try:
        _load_fused(shape, folder)
    except KernelsUnavailableError as error:
        unavailable = f"; no fused kernel: {error}"
    file = _choice_file(shape, folder, facts, has_fused=not unavailable)
    times = _read_times(file)
    if times is None:
        measured = measure_kernels(shape, [name for name in CANDIDATES if not (unavailable and name == FUSED)])
        _write_times(file, measured)
        times = _read_times(file) or measured  # those of another run that has measured at the same time
    kernel = _fastest(times)
    listed = ", ".join(f"{name.replace(DEFAULT, 'blocks-64')} {seconds * 1000:.1f}" for name, seconds in times.items())
    return AttentionChoice(kernel, f"{kernel.replace(DEFAULT, 'blocks-64')} (measured, ms a layer: {listed}){unavailable}", has_fused=not unavailable)


def find_choice(shape: AttentionShape, folder: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the kernel that `choose_attention` would take without measuring; None if it would measure. Nothing is compiled or loaded."""
    times = _read_times(_choice_file(shape, folder, facts, has_fused=True)) or _read_times(_choice_file(shape, folder, facts, has_fused=False))
    return _fastest(times) if times else None


def _choice_file(shape: AttentionShape, folder: Path, facts: Mapping[str, Any], has_fused: bool) -> Path:
    key = json.dumps([asdict(shape), dict(facts), not has_fused], sort_keys=True)
    return folder / "cpu_kernels" / f"choice-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _fastest(times: Mapping[str, float]) -> str:
    best = min(times, key=lambda name: times[name])
    return best if times[best] <= WORTHWHILE * times[DEFAULT] else DEFAULT


def measure_kernels(shape: AttentionShape, kernels: list[str]) -> dict[str, float]:
    """Return kernel -> the shortest time of a forward and a backward pass, seconds; kernels that cannot compute `shape` are left out.

    They take turns of several passes, of which the first is not counted: oneDNN keeps the programs of the last few products only.
    """
    import torch

    from models.layers.attention import attention
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    (q, k, v), mask = _make_inputs(shape)
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for name in [*times] * TURNS:
        with suppress(KernelsUnavailableError):
            for number in range(PASSES + 1):
                started = time.perf_counter()
                out = attention(q, k, v, mask, 0.0, name)
                torch.autograd.grad(out, (q, k, v), out.detach())
                if number:
                    times[name].append(time.perf_counter() - started)
    return {name: min(each) for name, each in times.items() if each}


def _make_inputs(shape: AttentionShape) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return random queries, keys and values, and the mask; torch's global generator is not used."""
    import torch

    from models.layers.attention import document_mask

    B, T = min(shape.rows, ROW_LIMIT), min(shape.tokens, TOKEN_LIMIT)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(B, T, heads, shape.head_width, generator=generator).to(getattr(torch, shape.dtype)).transpose(1, 2).requires_grad_()
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    ]
    if shape.documents <= 1:
        return inputs, None
    ids = torch.arange(T) * shape.documents // shape.tokens
    mask = document_mask(ids.expand(B, T), 0.0)
    assert isinstance(mask, torch.Tensor)
    return inputs, mask


def _read_times(file: Path) -> dict[str, float] | None:
    """Return kernel -> seconds that `_write_times` has written; None for anything else."""
    with suppress(OSError, ValueError, RecursionError):
        with file.open("rb") as opened:
            times = json.loads(opened.read(MAX_CHOICE_BYTES))
        if isinstance(times, dict) and DEFAULT in times and all(name in CANDIDATES and isinstance(each, float) and each > 0 for name, each in times.items()):
            return times
    return None


def _write_times(file: Path, times: Mapping[str, float]) -> None:
    """Write the file unless there is one: runs that measure at the same time then take the same kernel. A folder that cannot be written to is no error."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            complete = Path(folder) / file.name
            complete.write_text(json.dumps(times), encoding="utf-8")
            try:
                os.link(complete, file)
            except FileExistsError:
                if _read_times(file) is None:  # damaged
                    os.replace(complete, file)
