"""Autocast, loss scaling, clipping and the update: the only room that knows a dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from runner.engine.distributed import local, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.engine.optim import Optimizers

NAMES = ("fp32", "bf16", "fp16")


@dataclass
class PrecisionConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError("unknown precision", f"precision.name={self.name}", f"choose one of {', '.join(NAMES)}")


SCALE_FLOOR = 1.0  # below it scaling no longer helps; at 0 the next healthy step would write NaN into every weight


class Update(NamedTuple):
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
            raise ValueError(f"{torch.cuda.get_device_name(device)} does not compute in bf16", "precision=bf16", "use precision=fp16 or precision=fp32")
        self.name, self.device = cfg.name, device
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[cfg.name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.name == "fp16")

    def autocast(self) -> AbstractContextManager:
        import torch

        return torch.autocast(self.device.type, self.dtype, enabled=self.name != "fp32")

    def backward(self, loss: Tensor) -> None:
        """A loss that is not finite gets a gradient that is not. So the norm of the whole gradient, which all ranks share, is all that
        decides whether a step is taken."""
        one = loss.detach() * 0 + 1  # or NaN. As a factor: given to backward() it would import torch's symbolic shapes, for a second
        self.scaler.scale(loss * one).backward()

    def step(self, optimizers: Optimizers, clip: float) -> Update:
        """Unscale, measure, clip, update, clear. A step with anything not finite in it is not taken: clipping by such a norm would
        spread it to every weight. That is decided on the device; only fp16 waits to hear it."""
        import torch

        for part in optimizers.parts:
            self.scaler.unscale_(part)
        gradients = {name: p.grad for p, name in optimizers.names.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm([*gradients.values()]))  # as get_total_norm does, which keeps them to itself
        norm = whole(torch.linalg.vector_norm(norms))
        if clip:
            torch.nn.utils.clip_grads_with_norm_(optimizers.parameters, clip, norm)
        optimizers.step(missed=(~norm.isfinite()).float())
        optimizers.zero_grad()
        update = Update(norm, local(norms), [*gradients])
        if self.scales:
            # A norm can overflow while no gradient does; the scaler, which sees only these, would never lower its scale.
            self.scaler.update(None if update.taken else self.scale * self.scaler.get_backoff_factor())
        return update

    @property
    def scales(self) -> bool:
        """Whether what comes next depends on how the last step went."""
        return self.scaler.is_enabled()

    def again(self, update: Update) -> bool:
        """Whether a step is worth trying again: fp16 overflowed, and the scale can still go down."""
        return self.scales and not update.taken and self.scale >= SCALE_FLOOR

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def state(self) -> dict[str, float]:
        """Scale and growth tracker; empty where nothing is scaled."""
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, float]) -> None:
        if state:
            self.scaler.load_state_dict(state)
