"""torch.compile: whether and in which mode the layers are compiled; errors of compilers and those of a lack of memory.

`train.compile=auto` decides from settings.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import paths
from common.errors import UserError, print_note
from common.filesystem import is_complete_program, is_private_dir, write_atomic_files

if TYPE_CHECKING:
    import torch

    from models.config import ModelConfig

COMPILE_MODES = ("auto", "off", "default", "reduce-overhead", "max-autotune")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # record CUDA graphs on a GPU
MAX_REASON = 300  # characters
BREAK_EVEN_FLOPS = {"cpu": 1e14, "cuda": 3e16}  # of a run that gains as much as compiling costs; cpu: per thread
# of a RuntimeError of PyTorch
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "status_alloc_failed",
)


@dataclass(frozen=True)
class CompileDecision:
    mode: str  # off, or a mode of torch.compile
    reason: str  # for the header of the log
    is_long_run: bool = False  # long enough to compile, whether or not the model can be compiled


def resolve_compile_mode(
    requested: str, planned_flops: float, device: torch.device, threads: int, model: ModelConfig, is_packed: bool
) -> CompileDecision:
    """Return the mode for a run of `planned_flops`; `requested` is train.compile."""
    if device.type == "mps":
        check_mps_compile(requested)
        return CompileDecision(
            "off", "off (auto: compiled layers are not used on mps)" if requested == "auto" else "off"
        )
    if requested != "auto":
        return CompileDecision(requested, requested, requested != "off")
    break_even = BREAK_EVEN_FLOPS["cuda"] if device.type == "cuda" else BREAK_EVEN_FLOPS["cpu"] * threads
    is_long = planned_flops >= break_even
    if model.has_dynamic_shapes:
        return CompileDecision("off", "off (auto: the number of tokens per expert varies)", is_long)
    if device.type == "cpu" and is_packed and model.has_attention_dropout:
        return CompileDecision("off", "off (auto: slower with attention dropout in packed rows)", is_long)
    if not cpp_compiler():
        return CompileDecision("off", "off (auto: no C++ compiler, neither g++ nor CXX)", is_long)
    mode = "default" if is_long else "off"
    return CompileDecision(
        mode,
        f"{mode} (auto: {planned_flops:.1e} FLOPs planned, worthwhile from {break_even:.0e})",
        is_long,
    )


def check_mps_compile(requested: str) -> None:
    """Raise UserError for compiled layers on mps: whether torch.compile gives exact gradients there was never tested."""
    if requested not in ("auto", "off"):
        raise UserError(
            f"train.compile={requested} is not supported on mps", f"train.compile={requested}", "train.compile=off"
        )


def check_cuda_graphs(mode: str, device: torch.device, micro_batches: int) -> None:
    """Refuse CUDA graphs for steps of several micro-batches: a graph reuses its output memory, so the gradients of one
    micro-batch would be overwritten before they are added up (https://github.com/pytorch/pytorch/issues/169545).
    """
    if mode in CUDA_GRAPH_MODES and device.type == "cuda" and micro_batches > 1:
        raise UserError(
            f"train.compile={mode} records CUDA graphs, which need one micro-batch per step, got {micro_batches}",
            f"train.compile={mode}",
            "train.compile=default, or train.accumulation_steps=1 with a larger train.batch_size",
        )


def cpp_compiler() -> list[str]:
    """Return the compiler of torch.compile and its arguments, as CXX="g++ -O2" has them; [] if there is none."""
    command = os.environ.get("CXX", "g++")
    parts = [command] if shutil.which(command) else command.split()
    return parts if parts and shutil.which(parts[0]) else []


def set_inductor_cache() -> Path:
    """Set the folder of compiled programs, and a compiler whose arguments torch can use; return the folder."""
    folder = _inductor_cache()
    if len(command := cpp_compiler()) > 1:  # torch and the C++ kernels take the path of a program
        content = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'.encode()
        # torch knows a compiler by its name
        name = "-".join(Path(part).name for part in command if part[0] != "-")[:50]
        program = folder.absolute() / f"compiler-{hashlib.sha256(content).hexdigest()[:16]}" / name
        if not os.access(program, os.X_OK):
            made = program.with_name(f"{name}.{os.getpid()}")  # executable before another process can find it
            write_atomic_files([(made, content)])
            made.chmod(0o700)
            made.replace(program)
        os.environ["CXX"] = str(program)
    return folder


def _inductor_cache() -> Path:
    """Keep compiled programs between runs, unless the user has set a directory: loading one takes a second. Return
    their folder.

    A program in the cache is executed. So its folder is never one that a config names (data.cache of an unknown run
    directory), and one that another user owns, or that its group or others may write to, is replaced by an empty one
    for this process. The same holds for `.cache`, in which it could be replaced. Who may write to the folder above that
    can change this code, or the user's profile.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    folder = (
        (Path.home() if paths.IS_INSTALLED else paths.REPO_ROOT)
        / ".cache"
        / ("lm_runner_compiled" if paths.IS_INSTALLED else "compiled")
    )
    if shared := next((each for each in (folder.parent, folder) if not _is_private(each)), None):
        fix = f"chmod go-w {shared}; or TORCHINDUCTOR_CACHE_DIR=DIR"
        print_note(
            f"compiled programs are not kept: {shared} must be a folder of yours that no other user may write to; {fix}"
        )
        folder = Path(tempfile.mkdtemp(prefix="compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    remove_incomplete_programs(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def tag_compiled_programs(fingerprint: str) -> None:
    """Let this process use only kept programs that code of this fingerprint has compiled; a tag that the user has set
    counts, too.

    torch finds a program by its forward pass: after an update of this code, a program kept from before would compute
    the gradients of operators of `models.layers.ops.custom_op` as they were, without an error.
    """
    import torch

    config, user_tag = torch.compiler.config, os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    config.cache_key_tag = tag = f"{user_tag} {fingerprint}".strip()
    # A value that is set holds in its thread only, and autograd compiles the backward pass of a GPU in threads of its
    # own. They read what the
    # environment variable was when torch was imported.
    entries = getattr(config, "_config", {})
    if hasattr(entries.get("cache_key_tag"), "env_value_default"):
        entries["cache_key_tag"].env_value_default = tag


def remove_incomplete_programs(folder: Path) -> None:
    """Delete compiled programs that a killed compiler or a full disk has left incomplete: torch would load them, and
    fail, in every later run.

    A program that another process is writing is left: that process holds its lock.
    """
    for program in folder.glob("*/*.so"):
        with suppress(OSError):
            if not is_complete_program(program) and not _is_locked(
                folder / "locks" / f"{program.name.partition('.')[0]}.lock"
            ):
                program.unlink()


def _is_locked(file: Path) -> bool:
    import fcntl

    if not file.exists():
        return False
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_compile_error(error: BaseException) -> bool:
    """Return whether torch.compile has raised `error`."""
    return any(kind.__module__.startswith(("torch._dynamo", "torch._inductor")) for kind in type(error).__mro__)


def describe_compile_error(error: BaseException) -> str:
    """Return what the compiler says, one line, and what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "error: " in line), lines[0] if lines else type(error).__name__)
    return f"torch.compile failed: {reason[:MAX_REASON]}; train without it: train.compile=off"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that this machine, or its GPU, has no memory left."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)
    )


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to the folder, which is created if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return is_private_dir(folder, stat.S_IWGRP | stat.S_IWOTH)
    except OSError:
        return False
