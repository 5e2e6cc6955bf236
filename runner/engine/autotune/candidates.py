"""The choices of a run on the CPU: products of 16-bit matrices, attention, and whether `train.compile=auto` compiles the
layers (a long run times the first one in both ways, on the first micro-batch).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.checkpoint.compatibility import cpu_model
from runner.engine.autotune.kernel_choice import KernelChoice, shortest_times
from runner.engine.device.compile import describe_compile_error, is_compile_error, set_inductor_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from models.language_model import LanguageModel

# whether they are compiled because of a measurement: the fact `compiled` is the mode, whatever has decided it
LAYERS_FACT = "layers"
COMPILED, UNCOMPILED = "compiled", "uncompiled"
LAYER_TURNS, LAYER_PASSES = 3, 2
NATIVE, UPCAST, KERNEL = "native", "fp32", "cpp"


@dataclass(frozen=True)
class LayerCall:
    """A layer, its arguments, and the context of its forward pass. The first positional argument is its input,
    (B, T, D).
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: Callable[[], AbstractContextManager[object]]

    def compute(self) -> None:
        """Compute the forward and the backward pass."""
        import torch

        with self.autocast():
            out = self.layer(*self.args, **self.kwargs)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        trained = [self.args[0], *(p for p in self.layer.parameters() if p.requires_grad)]
        torch.autograd.grad(y, trained, y.detach(), allow_unused=True)  # a layer may have experts without tokens


class _LayerCalledError(Exception):
    """Ends a forward pass when its first layer is called."""


def find_layer_call(
    layer: nn.Module, forward: Callable[[], object], autocast: Callable[[], AbstractContextManager[object]]
) -> LayerCall | None:
    """Return how `forward` calls `layer`, whose input becomes a tensor that needs a gradient; None for an input that
    cannot have one. Nothing after the layer is computed.
    """
    import torch

    calls: list[LayerCall] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(layer, args, kwargs, autocast))
        raise _LayerCalledError

    hook = layer.register_forward_pre_hook(record, with_kwargs=True)
    with torch.random.fork_rng(devices=[]), suppress(_LayerCalledError), autocast():
        try:
            forward()
        finally:
            hook.remove()
    if not calls or not calls[0].args or not calls[0].args[0].is_floating_point():
        return None
    x, *others = calls[0].args
    return LayerCall(layer, (x.detach().requires_grad_(), *others), calls[0].kwargs, autocast)


def compile_choice(
    workload: Mapping[str, Any], call: LayerCall, compiled: Callable[[], AbstractContextManager[object]]
) -> KernelChoice:
    """Return the choice whether layers are compiled. `compiled()` returns a context in which they are."""
    return KernelChoice(
        fact=LAYERS_FACT,
        default=COMPILED,
        others=(UNCOMPILED,),
        workload=workload,
        measure=partial(measure_layers, call, compiled),
        apply=lambda kernel: None,
    )


def measure_layers(
    call: LayerCall, compiled: Callable[[], AbstractContextManager[object]], modes: Sequence[str]
) -> dict[str, float]:
    """Return mode -> the shortest time of a forward and a backward pass of the layer, seconds.

    Nothing that is compiled stays in the process: a resumed run, which does not measure, would otherwise have other
    programs. Raises KernelsUnavailableError if the compiler fails: it will fail in the first step, too, which reports
    it.
    """
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError

    def compute(mode: str) -> None:
        with torch.compiler.set_stance("force_eager" if mode == UNCOMPILED else "default"):
            call.compute()

    with torch.random.fork_rng(devices=[]), compiled():
        runs = {mode: partial(compute, mode) for mode in modes}
        try:
            if COMPILED in runs:
                runs[COMPILED]()  # compiles, which is not timed
            return shortest_times(runs, LAYER_TURNS, LAYER_PASSES)
        except Exception as error:
            if not is_compile_error(error):
                raise
            raise KernelsUnavailableError(describe_compile_error(error)) from error
        finally:
            torch.compiler.reset()


@contextmanager
def compiled_layers(compile_layers: Callable[[], object], uncompile_layers: Callable[[], object]) -> Iterator[None]:
    compile_layers()
    try:
        yield
    finally:
        uncompile_layers()


def are_16_bits_fast(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of 16 bits at least as fast as those in fp32: with AMX, or for bf16
    with AVX-512 of AMD (that of Intel has half the rate, benchmarks/results/instruction_peak.md), or on an ARM that has
    it. Not where the environment hides instructions.
    """
    import torch

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

    It is not timed: `are_16_bits_fast` decides. `has_kernel`: also by the C++ kernel, the faster of the others.
    Compiling it takes seconds, which only a long run gets back.
    """
    import torch

    is_16_bit = dtype != torch.float32

    def apply(kernel: str) -> None:
        if is_16_bit:
            use_products(kernel)
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


def current_products() -> str:
    """Return the kernel that this process computes with."""
    from models.layers.cpu_kernels.upcast_products import are_products_by_kernel, are_products_upcast

    return KERNEL if are_products_by_kernel() else UPCAST if are_products_upcast() else NATIVE


def use_products(kernel: str) -> None:
    """Compute products of 16-bit matrices by `kernel` in this process. KERNEL has to be loaded."""
    from models.layers.cpu_kernels.upcast_products import upcast_products

    upcast_products(kernel != NATIVE, by_kernel=kernel == KERNEL)


def load_products(kernel: str) -> None:
    """Raise KernelsUnavailableError if this torch does not let its products be replaced; for the C++ kernel, if it is
    not compiled or torch has no AVX-512.
    """
    import torch

    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
    from models.layers.cpu_kernels.upcast_products import can_upcast

    if not can_upcast():
        raise KernelsUnavailableError("torch.library.get_kernel is missing")
    if kernel != KERNEL:
        return
    if not (capability := torch.backends.cpu.get_cpu_capability()).startswith("AVX512"):
        raise KernelsUnavailableError(f"it needs AVX-512, and torch uses {capability}")
    load_kernels(set_inductor_cache())


def attention_choice(dtype: torch.dtype, head_width: int, models: Sequence[LanguageModel]) -> KernelChoice:
    """Return the choice of the C++ kernel of attention, with those of SwiGLU and of gradients of weights. It is not
    timed: it was the fastest on every processor (benchmarks/results/attention.md), and needs less memory.
    """
    from models.layers.attention import FUSED_KERNEL

    def apply(kernel: str) -> None:
        for model in models:
            model.use_attention_kernel(kernel)

    return KernelChoice(
        fact="attention",
        default="auto",
        others=(FUSED_KERNEL,),
        apply=apply,
        labels={"auto": "blocks of queries"},
        load=lambda kernel: load_attention(dtype, head_width),
    )


def load_attention(dtype: torch.dtype, head_width: int) -> None:
    """Raise KernelsUnavailableError if this machine cannot compute attention by the C++ kernel."""
    from models.layers.cpu_kernels.fused_attention import check_product, supports
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels

    if not supports(dtype, head_width):
        raise KernelsUnavailableError(f"not for heads of {head_width} numbers in {dtype}")
    load_kernels(set_inductor_cache())
    check_product(dtype, head_width)
