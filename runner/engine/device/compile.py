"""Whether the layers are compiled: `train.compile=auto` decides from the words alone, so that a resumed run decides the same."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    import torch

COMPILE_MODES = ("auto", "off", "default", "reduce-overhead", "max-autotune")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # those that record CUDA graphs, on a GPU
# Floating-point operations a run must plan before its compiled layers have won back what compiling them costs (docs/speed.md)
BREAK_EVEN_FLOPS = {"cpu": 1e14, "cuda": 3e16}  # of a processor: for each thread


@dataclass(frozen=True)
class CompileDecision:
    mode: str  # off, or what torch.compile calls it
    said: str  # for the header


def resolve_compile_mode(word: str, operations: float, device: torch.device, threads: int, experts: bool) -> CompileDecision:
    if word != "auto":
        return CompileDecision(word, word)
    if experts:
        return CompileDecision("off", "off (auto: what an expert gets has another size each time)")
    if not find_compiler():
        return CompileDecision("off", "off (auto: there is no C++ compiler, g++ or what CXX names)")
    pays = BREAK_EVEN_FLOPS["cuda"] if device.type == "cuda" else BREAK_EVEN_FLOPS["cpu"] * threads
    planned = f"{operations:.1e} operations planned, {pays:.0e} pay for it"
    return CompileDecision("default", f"default (auto: {planned})") if operations >= pays else CompileDecision("off", f"off (auto: {planned})")


def check_cuda_graphs(word: str, device: torch.device, batches: int) -> None:
    """`batches`: micro-batches of a step. A recorded graph puts its results where it put them the time before: with several micro-batches a
    gradient would be written over before it is added up (https://github.com/pytorch/pytorch/issues/169545)."""
    if word in CUDA_GRAPH_MODES and device.type == "cuda" and batches > 1:
        raise UserError(
            "CUDA graphs cannot add up the gradients of several micro-batches",
            f"train.compile={word}, {batches} micro-batches a step",
            "use train.compile=default, or train.accumulation_steps=1 with a larger train.batch_size",
        )


def find_compiler() -> str | None:
    """What torch translates its programs with."""
    return shutil.which(os.environ.get("CXX", "g++"))


def set_inductor_cache(cache: Path) -> None:
    """Between runs, unless the user has a place for them: a layer that was compiled once is read in a second."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled"))
