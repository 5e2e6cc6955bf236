"""What long runs measure: whether `train.compile=auto` compiles the layers (the first one is timed in both ways, on the
first micro-batch), and single operators on the CPU (products of 16-bit matrices, and attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.engine.autotune.kernel_choice import KernelChoice, shortest_times, times_of_growing_operands
from runner.engine.device.compile import describe_compile_error, is_compile_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from models.language_model import LanguageModel

# whether they are compiled because of a measurement: the fact `compiled` is the mode, whatever has decided it
LAYERS_FACT = "layers"
COMPILED, UNCOMPILED = "compiled", "uncompiled"
LAYER_TURNS, LAYER_PASSES = 3, 2
NATIVE, UPCAST, KERNEL = "native", "fp32", "cpp"
PRODUCT_DTYPES = ("bfloat16", "float16")
MIN_RUN_FLOPS = 2e12  # of runs that measure it: some seconds at the speed of a laptop


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
        unit="ms a layer",
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


@dataclass(frozen=True)
class ProductShape:
    """A linear layer in one micro-batch."""

    tokens: int
    outputs: int
    inputs: int
    dtype: str  # of torch: bfloat16 or float16


def product_choice(shape: ProductShape, *, has_kernel: bool) -> KernelChoice:
    """Return the choice of how torch multiplies 16-bit matrices in this process.

    `has_kernel`: also by the C++ kernel. Compiling it takes seconds, which only a long run gets back.
    """
    return KernelChoice(
        fact="products",
        default=NATIVE,
        others=(UPCAST, KERNEL) if has_kernel and shape.dtype == "bfloat16" else (UPCAST,),
        workload=asdict(shape),
        measure=partial(measure_products, shape),
        apply=use_products,
        unit="ms a linear layer",
        labels={NATIVE: f"in {shape.dtype}", UPCAST: "in float32 and rounded", KERNEL: "by the C++ kernel"},
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


def load_products(kernel: str, folder: Path) -> None:
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
    load_kernels(folder)


def measure_products(shape: ProductShape, kernels: Sequence[str]) -> dict[str, float]:
    """Return kernel -> the shortest time of the forward and backward products of the layer, seconds.

    The choice made before does not matter.
    """
    before = current_products()
    use_products(NATIVE)
    try:
        return times_of_growing_operands(partial(_product_runs, shape, kernels))
    finally:
        use_products(before)


def _product_runs(
    shape: ProductShape, kernels: Sequence[str], largest: int
) -> tuple[float, dict[str, Callable[[], object]]]:
    import torch

    from models.layers.cpu_kernels.upcast_products import multiply, multiply_by_kernel

    tokens, outputs, inputs = (min(size, largest) for size in (shape.tokens, shape.outputs, shape.inputs))
    x, g, weight = (
        torch.ones(*sizes, dtype=getattr(torch, shape.dtype))
        for sizes in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )
    runs: dict[str, Callable[[], object]] = {
        NATIVE: partial(_native, x, g, weight),
        UPCAST: partial(_upcast, multiply, x, g, weight),
        KERNEL: partial(_upcast, multiply_by_kernel, x, g, weight),
    }
    return float(tokens * outputs * inputs), {kernel: runs[kernel] for kernel in kernels}


def _native(x: Tensor, g: Tensor, weight: Tensor) -> None:
    x @ weight.t()
    g @ weight
    (g.t() @ x).float()


def _upcast(multiply: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, g: Tensor, weight: Tensor) -> None:
    import torch

    (n, inputs), outputs = x.shape, len(weight)
    multiply(x, weight.t(), x.new_empty(n, outputs))
    multiply(g, weight, x.new_empty(n, inputs))
    multiply(g.t(), x, weight.new_empty(outputs, inputs, dtype=torch.float32))


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
        workload={},
        measure=None,
        apply=apply,
        labels={"auto": "blocks of queries"},
        load=lambda kernel, folder: load_attention(dtype, head_width, folder),
    )


def load_attention(dtype: torch.dtype, head_width: int, folder: Path) -> None:
    """Raise KernelsUnavailableError if this machine cannot compute attention by the C++ kernel."""
    from models.layers.cpu_kernels.fused_attention import check_product, supports
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels

    if not supports(dtype, head_width):
        raise KernelsUnavailableError(f"not for heads of {head_width} numbers in {dtype}")
    load_kernels(folder)
    check_product(dtype, head_width)
