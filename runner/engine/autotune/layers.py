"""Whether a long run compiles its layers, where `train.compile=auto` would: the first one is timed in both ways, on the
first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.engine.autotune.kernel_choice import KernelChoice, shortest_times
from runner.engine.device.compile import describe_compile_error, is_compile_error

if TYPE_CHECKING:
    from torch import Tensor, nn

# whether they are compiled because of a measurement: the fact `compiled` is the mode, whatever has decided it
LAYERS_FACT = "layers"
COMPILED, UNCOMPILED = "compiled", "uncompiled"
LAYER_TURNS, LAYER_PASSES = 3, 2


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
