"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): freeze a model, learn a small correction beside chosen Linears.

An adapted Linear keeps its own name and its weight's name; the adapter stands below it as `lora.<adapter>.A` and `.B`.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import LoraConfig

INIT_STD = 0.02


class Adapter(nn.Module):
    """x -> alpha / rank * B A dropout(x); B starts at zero, so an adapter starts as nothing."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(cfg.rank, base.in_features, device=base.weight.device).normal_(std=INIT_STD))
        self.B = nn.Parameter(torch.zeros(base.out_features, cfg.rank, device=base.weight.device))
        self.scale, self.dropout = cfg.alpha / cfg.rank, nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.dropout(x), self.A), self.B)

    def delta(self) -> Tensor:
        """What merging adds to the weight (out, in)."""
        return self.scale * self.B @ self.A


class AdaptedLinear(nn.Linear):
    """A Linear with named adapters beside it, of which at most one is active."""

    lora: nn.ModuleDict
    active: str | None

    @classmethod
    def adapt(cls, linear: nn.Linear) -> AdaptedLinear:
        """The same module, weights and name included, under this class."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.lora, linear.active = nn.ModuleDict(), None
        return linear

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.active is None else y + self.lora[self.active](x)


def add_lora(model: nn.Module, cfg: LoraConfig, name: str = "default") -> None:
    """Freeze `model` in place and put an adapter, active from now on, beside every Linear whose last name is in `cfg.targets`."""
    model.requires_grad_(False)
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = [module for path, module in linears.items() if path.rsplit(".", 1)[-1] in cfg.targets]
    if not targets:
        could = sorted({path.rsplit(".", 1)[-1] for path in linears})
        raise ValueError("no linear layer of the model has such a name", f"stage.lora.targets={cfg.targets}", f"choose from {', '.join(could)}")
    for linear in targets:
        adapted = linear if isinstance(linear, AdaptedLinear) else AdaptedLinear.adapt(linear)
        adapted.lora[name] = Adapter(linear, cfg)
    use_adapter(model, name)


def use_adapter(model: nn.Module, name: str | None) -> None:
    """Make one adapter the active one, or none; layers without an adapter of that name work bare."""
    for linear in _adapted(model):
        linear.active = name if name in linear.lora else None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model, without dropout: what a preference stage takes as its reference."""
    active, training = [linear.active for linear in _adapted(model)], model.training
    use_adapter(model, None)
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for linear, name in zip(_adapted(model), active, strict=True):
            linear.active = name


def merge(model: nn.Module) -> None:
    """Add the active adapters into the weights, and switch them off."""
    _shift(model, +1)


def unmerge(model: nn.Module, name: str = "default") -> None:
    """Take adapter `name` back out of the weights, and make it active again."""
    use_adapter(model, name)
    _shift(model, -1)
    use_adapter(model, name)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora." in name}


def load_adapter(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fill the adapters strictly: KeyError or RuntimeError names what does not fit."""
    own = adapter_state(model)
    if own.keys() != state.keys():
        raise KeyError(f"adapters differ: {sorted(own.keys() ^ state.keys())[:4]}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


@torch.no_grad()
def _shift(model: nn.Module, sign: int) -> None:
    for linear in _adapted(model):
        if linear.active is not None:
            adapter = linear.lora[linear.active]
            assert isinstance(adapter, Adapter)
            linear.weight += sign * adapter.delta()
            linear.active = None


def _adapted(model: nn.Module) -> list[AdaptedLinear]:
    return [module for module in model.modules() if isinstance(module, AdaptedLinear)]
