"""The choices between kernels of a run on the CPU, products of 16-bit matrices and attention, by what this machine can
compute: recorded, and repeated on resume.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from models.language_model import LanguageModel
from models.layers.attention import FUSED_KERNEL
from models.layers.cpu_kernels.fused_attention import check_product, supports
from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
from models.layers.cpu_kernels.upcast_products import upcast_products
from runner.checkpoint.compatibility import cpu_model
from runner.engine.device.compile import set_inductor_cache

NATIVE, UPCAST, KERNEL = "native", "fp32", "cpp"
MAX_KERNEL_NAME = 40  # characters of a name from a checkpoint in a message


@dataclass(frozen=True)
class KernelChoice:
    """One choice between kernels that compute the same, each exact to its documented rounding."""

    fact: str  # its name among the facts of a run's environment, and in the log
    default: str
    others: tuple[str, ...]  # the last that this machine can compute is the best
    apply: Callable[[str], None]
    labels: Mapping[str, str]  # kernel -> name in the log
    # raises KernelsUnavailableError where this machine cannot compute the kernel
    load: Callable[[str], None] = lambda kernel: None


class ChosenKernel(NamedTuple):
    """A kernel of a `KernelChoice`."""

    kernel: str
    reason: str  # for the header of the log; "": nothing was chosen
    available: tuple[str, ...]  # kernels that this process can compute


def best_kernel(choice: KernelChoice) -> ChosenKernel:
    """Return the best kernel that this machine can compute."""
    names, absent = [choice.default], ""
    for name in choice.others:
        try:
            choice.load(name)
            names.append(name)
        except KernelsUnavailableError as error:
            absent += f"; no {name} kernel: {error}"
    return ChosenKernel(names[-1], choice.labels[names[-1]] + absent, tuple(names))


def kernel_of_checkpoint(choice: KernelChoice, saved: object) -> ChosenKernel:
    """Return the kernel of a checkpoint, `saved` in its environment; the default where this machine cannot compute it,
    which the resume reports.
    """
    if saved in (None, choice.default):
        return ChosenKernel(choice.default, "", (choice.default,))
    kernel = str(saved)
    if kernel in choice.others:
        try:
            choice.load(kernel)
            return ChosenKernel(kernel, f"{choice.labels[kernel]}, as its checkpoint", (choice.default, kernel))
        except KernelsUnavailableError as error:
            problem = f"the {kernel} kernel of the checkpoint is not available, {error}"
    else:
        problem = f"that of the checkpoint, {kernel[:MAX_KERNEL_NAME]}, is none of this program and these settings"
    return ChosenKernel(choice.default, f"{choice.labels[choice.default]}: {problem}", (choice.default,))


def agree_on_kernel(choice: KernelChoice, ranks: Sequence[Sequence[Any]]) -> ChosenKernel:
    """Return the kernel of all ranks from the `ChosenKernel` of each, as JSON: that of the first, unless some rank
    cannot compute it.
    """
    kernel, reason, available = ranks[0]
    if all(kernel in rank_available for _, _, rank_available in ranks):
        return ChosenKernel(kernel, reason, tuple(available))
    return ChosenKernel(
        choice.default, f"{choice.labels[choice.default]}: a rank has no {kernel} kernel", tuple(available)
    )


def are_16_bits_fast(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of 16 bits at least as fast as those in fp32: with AMX, or for bf16
    with AVX-512 of AMD (that of Intel has half the rate, benchmarks/results/instruction_peak.md), or on an ARM that has
    it. Not where the environment hides instructions.
    """
    if not os.environ.keys().isdisjoint(("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")):
        return False
    if dtype == torch.float16:
        return torch.cpu._is_amx_fp16_supported()
    if platform.machine() in ("arm64", "aarch64"):
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    is_amd = torch.cpu._is_avx512_bf16_supported() and cpu_model().startswith("AMD")
    return is_amd or torch.cpu._is_amx_tile_supported()


def product_choice(dtype: torch.dtype, muons: Sequence[Any], *, has_kernel: bool) -> KernelChoice:
    """Return the choice of how this process multiplies 16-bit matrices: those of the model in `dtype`, and those of
    updates by `muons`, optimizers with a `dtype`, which are in bf16 unless that is slow.

    `has_kernel`: also by the C++ kernel, the faster of the others. Compiling it takes seconds, which only a long run
    gets back.
    """
    is_16_bit = dtype != torch.float32

    def apply(kernel: str) -> None:
        if is_16_bit:
            upcast_products(kernel != NATIVE, by_kernel=kernel == KERNEL)
        for part in muons:
            part.dtype = torch.bfloat16 if kernel == NATIVE else torch.float32

    return KernelChoice(
        fact="products",
        default=NATIVE,
        others=(UPCAST, KERNEL) if has_kernel and dtype == torch.bfloat16 else (UPCAST,),
        apply=apply,
        labels={
            NATIVE: "in 16 bits",
            UPCAST: "in float32 and rounded" if is_16_bit else "Muon in float32",
            KERNEL: "by the C++ kernel",
        },
        load=load_products,
    )


def load_products(kernel: str) -> None:
    """Raise KernelsUnavailableError if this torch does not let its products be replaced; for the C++ kernel, if it is
    not compiled or torch has no AVX-512.
    """
    if not hasattr(torch.library, "get_kernel"):
        raise KernelsUnavailableError("torch.library.get_kernel is missing")
    if kernel != KERNEL:
        return
    if not (capability := torch.backends.cpu.get_cpu_capability()).startswith("AVX512"):
        raise KernelsUnavailableError(f"it needs AVX-512, and torch uses {capability}")
    load_kernels(set_inductor_cache())


def attention_choice(dtype: torch.dtype, head_width: int, models: Sequence[LanguageModel]) -> KernelChoice:
    """Return the choice of the C++ kernel of attention, with those of SwiGLU and of gradients of weights. It was
    the fastest on every processor (benchmarks/results/attention.md), and needs less memory.
    """

    def apply(kernel: str) -> None:
        for model in models:
            model.use_attention_kernel(kernel)

    return KernelChoice(
        fact="attention",
        default="auto",
        others=(FUSED_KERNEL,),
        apply=apply,
        labels={"auto": "blocks of queries", FUSED_KERNEL: FUSED_KERNEL},
        load=lambda kernel: load_attention(dtype, head_width),
    )


def load_attention(dtype: torch.dtype, head_width: int) -> None:
    """Raise KernelsUnavailableError if this machine cannot compute attention by the C++ kernel."""
    if not supports(dtype, head_width):
        raise KernelsUnavailableError(f"not for heads of {head_width} numbers in {dtype}")
    load_kernels(set_inductor_cache())
    check_product(dtype, head_width)
