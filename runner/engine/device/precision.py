"""Precision: autocast, TF32, loss scaling, gradient clipping and the update."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from common.errors import UserError
from common.settings import CheckedSettings, one_of, settings_class
from runner.engine.device.mesh import full_tensor, local_shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

UNVERSIONED_DEVICES = {"cpu": "the CPU", "mps": "a GPU of Apple"}  # without a compute capability
CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grads_with_norm_
MIN_LOSS_SCALE = 1.0  # a smaller scale no longer helps; at 0 the next finite step would write NaN into every weight


@dataclass(frozen=True)
class PrecisionSpec:
    """One row of PRECISIONS; weights and optimizer state are fp32 in each."""

    dtype: str  # of autocast; float32: no autocast
    matmul_precision: str = "highest"  # of torch.set_float32_matmul_precision
    loss_scaling: bool = False  # scale the loss so that small gradients do not underflow
    min_capability: tuple[int, int] | None = None  # compute capability of NVIDIA GPUs; None: any device


PRECISIONS = {
    "fp32": PrecisionSpec("float32"),
    # matmuls with inputs rounded to 10 bits of mantissa
    "tf32": PrecisionSpec("float32", matmul_precision="high", min_capability=(8, 0)),
    "bf16": PrecisionSpec("bfloat16"),
    "fp16": PrecisionSpec("float16", loss_scaling=True),
}


@settings_class
class PrecisionConfig(CheckedSettings):
    SECTION = "precision"

    # auto (bf16 on a GPU that computes it, else fp32), fp32, tf32 (NVIDIA GPUs from Ampere on), bf16 or fp16
    name: str = one_of("auto", *PRECISIONS)

    def on(self, device_type: str, recorded: object = None) -> PrecisionConfig:
        """Return what `auto` means on a cpu, cuda or mps device; for a resumed run what it has `recorded`, whatever the device."""
        if self.name != "auto":
            return self
        if recorded in PRECISIONS:
            return PrecisionConfig(str(recorded))
        return PrecisionConfig("bf16" if device_type == "cuda" and _computes_bf16() else "fp32")

    def check_device(self, device_name: str, capability: tuple[int, int] | None = None) -> None:
        """`capability`: of an NVIDIA GPU, None for other devices.

        Raises UserError if the device does not compute in this precision.
        """
        spec = PRECISIONS.get(self.name)
        if spec and spec.min_capability and (capability is None or capability < spec.min_capability):
            major, minor = spec.min_capability
            raise UserError(
                f"precision={self.name} needs an NVIDIA GPU of compute capability {major}.{minor} or higher, got {device_name}",
                f"precision={self.name} on {device_name}",
                f"precision=fp32; resume runs in {self.name} on such a GPU",
            )


def _computes_bf16() -> bool:
    """Return whether the current GPU does, not by emulation."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


class GradStats(NamedTuple):
    """Gradient norms of one step as tensors on the device; reading one waits for the device."""

    norm: Tensor  # () over all parameters and ranks, before clipping; not finite: the update was skipped
    norms: Tensor  # (P,) of each parameter's gradient, of this rank's shard
    names: list[str]  # of these P parameters

    @property
    def is_finite(self) -> bool:
        return bool(self.norm.isfinite())


class Optimizers(Protocol):
    """What `Precision.clip_and_update` needs of optim.groups.OptimizerGroup."""

    parts: list[Any]  # torch optimizers
    names: dict[nn.Parameter, str]

    def step(self, found_inf: Tensor) -> None: ...

    def zero_grad(self) -> None: ...


def exceeds(norm: Tensor, clip: float) -> bool:
    """Return whether clipping would change the gradients.

    On the CPU that saves a pass over all of them. A GPU would wait for the answer, so it is not asked there.
    """
    return not bool(norm + CLIP_EPSILON <= clip)


class Precision:
    """Autocast, loss scaling and the update of one run.

    Only fp16 scales the loss; the scaler is disabled for the others.
    """

    def __init__(self, cfg: PrecisionConfig, device: torch.device) -> None:
        import torch

        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            cfg.check_device(name, None if torch.version.hip else torch.cuda.get_device_capability(device))
            if cfg.name == "bf16" and not _computes_bf16():
                raise UserError(
                    f"{name} does not compute in bf16",
                    "precision=bf16",
                    "precision=fp16 or precision=fp32; resume runs in bf16 on a GPU that computes it, or with device=cpu",
                )
        else:
            cfg.check_device(UNVERSIONED_DEVICES[device.type])
            if device.type == "mps" and cfg.name == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
                raise UserError(
                    "torch has no bf16 on mps before macOS 14", "precision=bf16", "precision=fp16 or precision=fp32"
                )
        spec = PRECISIONS[cfg.name]
        # always: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have changed it
        torch.set_float32_matmul_precision(spec.matmul_precision)
        self.name, self.device = cfg.name, device
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.loss_scaling)

    def autocast(self) -> AbstractContextManager:
        import torch

        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass.

        A loss that is not finite gets gradients that are not finite, so that the gradient norm, which all ranks share,
        alone decides whether the update is skipped.
        """
        # 1, or NaN where the loss is not finite: `loss * one` has a NaN gradient then. Passing it to backward() instead
        # imports torch's symbolic shapes (1 s).
        one = loss.detach() * 0 + 1
        self.scaler.scale(loss * one).backward()

    def clip_and_update(self, optimizers: Optimizers, clip: float) -> GradStats:
        """Unscale and clip the gradients, update the parameters, clear the gradients.

        If a gradient is not finite the update is skipped, because clipping by such a norm would make every weight NaN.
        That is decided on the device; only fp16 waits for the result.
        """
        import torch

        for part in optimizers.parts:
            self.scaler.unscale_(part)
        gradients = {name: p.grad for p, name in optimizers.names.items() if p.grad is not None}
        # what torch.nn.utils.get_total_norm computes, but does not return
        norms = torch.stack(torch._foreach_norm([*gradients.values()]))
        norm = torch.linalg.vector_norm(norms)
        if hasattr(norm, "placements"):  # of sharded parameters
            norm = full_tensor(norm)
        if clip and (self.device.type != "cpu" or exceeds(norm, clip)):
            torch.nn.utils.clip_grads_with_norm_(list(optimizers.names), clip, norm)
        optimizers.step(found_inf=(~norm.isfinite()).float())
        optimizers.zero_grad()
        stats = GradStats(norm, local_shard(norms), [*gradients])
        if self.uses_loss_scaling:
            # The norm can overflow while no gradient does; the scaler looks at the gradients only and would never lower
            # its scale.
            self.scaler.update(None if stats.is_finite else self.loss_scale * self.scaler.get_backoff_factor())
        return stats

    @property
    def uses_loss_scaling(self) -> bool:
        """Whether the loss is scaled (fp16): each step is then fetched before the next."""
        return self.scaler.is_enabled()

    def should_retry(self, stats: GradStats) -> bool:
        """Return whether to repeat a step: fp16 overflowed, and the loss scale can still be lowered."""
        return self.uses_loss_scaling and not stats.is_finite and self.loss_scale >= MIN_LOSS_SCALE

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def state_dict(self) -> dict[str, float]:
        """Return scale and growth tracker; empty without loss scaling."""
        return self.scaler.state_dict()

    def load_state_dict(self, saved: dict[str, float]) -> None:
        if saved:
            self.scaler.load_state_dict(saved)
