"""Autocast, TF32, fp8, loss scaling, clipping and the update: the only room that knows a dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from runner.engine.distributed import local, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from models.decoder import Decoder
    from runner.engine.optim import Optimizers

NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8")
# What only an NVIDIA GPU computes in: the least compute capability, and what comes nearest where there is less
NEEDS = {"tf32": ((8, 0), "fp32"), "fp8": ((8, 9), "bf16")}


@dataclass
class PrecisionConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError("unknown precision", f"precision.name={self.name}", f"choose one of {', '.join(NAMES)}")

    def check_device(self, called: str, capability: tuple[int, int] | None) -> None:
        """`capability` is that of an NVIDIA GPU; None for all else. Raises ValueError(what, where, fix)."""
        if self.name in NEEDS:
            least, instead = NEEDS[self.name]
            if capability is None or capability < least:
                what = f"{self.name} is computed by NVIDIA GPUs of compute capability {least[0]}.{least[1]} and above"
                raise ValueError(what, f"precision={self.name} on {called}", f"use precision={instead}")


SCALE_FLOOR = 1.0  # below it scaling no longer helps; at 0 the next healthy step would write NaN into every weight


class Update(NamedTuple):
    norm: float  # of the whole gradient, before clipping
    taken: bool  # False: something was not finite, and no weight moved
    culprit: str | None  # then, the first parameter whose gradient was not finite, as far as this rank sees


class Precision:
    """Autocast and loss scaling behind three verbs; only fp16 scales, for the others the scaler passes through."""

    def __init__(self, cfg: PrecisionConfig, device: torch.device) -> None:
        import torch

        if cfg.name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(f"{torch.cuda.get_device_name(device)} does not compute in bf16", "precision=bf16", "use precision=fp16 or precision=fp32")
        if device.type == "cuda":
            cfg.check_device(torch.cuda.get_device_name(device), None if torch.version.hip else torch.cuda.get_device_capability(device))
        else:
            cfg.check_device("the CPU", None)
        # Said for every run and not only for those that want TF32: the environment may have switched it on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
        torch.set_float32_matmul_precision("high" if cfg.name == "tf32" else "highest")
        self.name, self.device = cfg.name, device
        self.dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(cfg.name, torch.float32)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.name == "fp16")

    def fit(self, model: Decoder) -> None:
        """Change in place what of the model has to be another for this precision."""
        if self.name == "fp8":
            from models.fp8 import use_fp8

            use_fp8(model.model.layers)

    def autocast(self) -> AbstractContextManager:
        import torch

        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizers: Optimizers, clip: float, loss_is_finite: bool) -> Update:
        """Unscale, look, clip, update, clear. A step with anything not finite in it is not taken: clipping by
        such a norm would spread it to every weight."""
        import torch

        for part in optimizers.parts:
            self.scaler.unscale_(part)
        gradients = [p.grad for p in optimizers.parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        taken = loss_is_finite and bool(norm.isfinite())
        culprit = (
            None if taken else next((name for p, name in optimizers.names.items() if p.grad is not None and not bool(local(p.grad).isfinite().all())), None)
        )
        if taken:
            if clip:
                torch.nn.utils.clip_grads_with_norm_([p for p in optimizers.parameters if p.grad is not None], clip, norm)
            for part in optimizers.parts:
                self.scaler.step(part)
        # A loss can overflow while its gradients do not; the scaler, which sees only these, would never lower its scale.
        self.scaler.update(None if taken or not self.scaler.is_enabled() else self.scale * self.scaler.get_backoff_factor())
        optimizers.zero_grad()
        return Update(norm.item(), taken, culprit)

    @property
    def retries(self) -> bool:
        """Whether a step that was not taken is worth trying again: fp16 overflowed, and the scale can still go down."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= SCALE_FLOOR

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def state(self) -> dict[str, float]:
        """Scale and growth tracker; empty where nothing is scaled."""
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, float]) -> None:
        if state:
            self.scaler.load_state_dict(state)
