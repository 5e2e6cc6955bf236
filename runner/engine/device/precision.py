"""Autocast, TF32, loss scaling, clipping and the update: the only room that knows a dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from common.errors import UserError
from runner.engine.device.mesh import full_tensor, local_shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.engine.optim.groups import OptimizerGroup

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# What only an NVIDIA GPU computes in: the least compute capability, and what comes nearest where there is less
MIN_CAPABILITY = {"tf32": ((8, 0), "fp32")}


@dataclass
class PrecisionConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name not in PRECISIONS:
            raise UserError("unknown precision", f"precision.name={self.name}", f"choose one of {', '.join(PRECISIONS)}")

    def check_device(self, called: str, capability: tuple[int, int] | None) -> None:
        """`capability` is that of an NVIDIA GPU; None for all else. Raises ValueError(what, where, fix)."""
        if self.name in MIN_CAPABILITY:
            least, instead = MIN_CAPABILITY[self.name]
            if capability is None or capability < least:
                what = f"{self.name} is computed by NVIDIA GPUs of compute capability {least[0]}.{least[1]} and above"
                raise UserError(what, f"precision={self.name} on {called}", f"use precision={instead}; what was begun in {self.name} goes on on such a GPU")


MIN_LOSS_SCALE = 1.0  # below it scaling no longer helps; at 0 the next healthy step would write NaN into every weight


class GradStats(NamedTuple):
    """Of one step, as tensors: who looks at one waits for the device."""

    norm: Tensor  # () of the whole gradient, before clipping; where it is not finite, no weight has moved
    norms: Tensor  # of each parameter's gradient, as far as this rank sees it ...
    names: list[str]  # ... and of which

    @property
    def taken(self) -> bool:
        return bool(self.norm.isfinite())


class Precision:
    """Autocast and loss scaling behind three verbs; only fp16 scales, for the others the scaler passes through."""

    def __init__(self, cfg: PrecisionConfig, device: torch.device) -> None:
        import torch

        if cfg.name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(f"{torch.cuda.get_device_name(device)} does not compute in bf16", "precision=bf16", "use precision=fp16 or precision=fp32")
        if device.type == "cuda":
            cfg.check_device(torch.cuda.get_device_name(device), None if torch.version.hip else torch.cuda.get_device_capability(device))
        else:
            cfg.check_device("the CPU", None)
        # Said for every run and not only for those that want TF32: the environment may have switched it on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
        torch.set_float32_matmul_precision("high" if cfg.name == "tf32" else "highest")
        self.name, self.device = cfg.name, device
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cfg.name, torch.float32)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.name == "fp16")

    def autocast(self) -> AbstractContextManager:
        import torch

        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        """A loss that is not finite gets a gradient that is not. So the norm of the whole gradient, which all ranks share, is all that
        decides whether a step is taken."""
        one = loss.detach() * 0 + 1  # or NaN. As a factor: given to backward() it would import torch's symbolic shapes, for a second
        self.scaler.scale(loss * one).backward()

    def step(self, optimizers: OptimizerGroup, clip: float) -> GradStats:
        """Unscale, measure, clip, update, clear. A step with anything not finite in it is not taken: clipping by such a norm would
        spread it to every weight. That is decided on the device; only fp16 waits to hear it."""
        import torch

        for part in optimizers.parts:
            self.scaler.unscale_(part)
        gradients = {name: p.grad for p, name in optimizers.names.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm([*gradients.values()]))  # as get_total_norm does, which keeps them to itself
        norm = full_tensor(torch.linalg.vector_norm(norms))
        if clip:
            torch.nn.utils.clip_grads_with_norm_(optimizers.parameters, clip, norm)
        optimizers.step(missed=(~norm.isfinite()).float())
        optimizers.zero_grad()
        update = GradStats(norm, local_shard(norms), [*gradients])
        if self.uses_loss_scaling:
            # A norm can overflow while no gradient does; the scaler, which sees only these, would never lower its scale.
            self.scaler.update(None if update.taken else self.loss_scale * self.scaler.get_backoff_factor())
        return update

    @property
    def uses_loss_scaling(self) -> bool:
        """Whether what comes next depends on how the last step went."""
        return self.scaler.is_enabled()

    def should_retry(self, update: GradStats) -> bool:
        """Whether a step is worth trying again: fp16 overflowed, and the scale can still go down."""
        return self.uses_loss_scaling and not update.taken and self.loss_scale >= MIN_LOSS_SCALE

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def state_dict(self) -> dict[str, float]:
        """Scale and growth tracker; empty where nothing is scaled."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state:
            self.scaler.load_state_dict(state)
