"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): freeze a model, learn a small correction beside chosen Linears.

An adapted Linear keeps its own name and its weight's name; the adapter stands below it as `lora.<adapter>.A` and `.B`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from models.config import LoraConfig
from models.layers.chunked_loss import LMHead, linear_cross_entropy

LORA_INIT_STD = 0.02


class LoraAdapter(nn.Module):
    """x -> alpha / rank * B A dropout(x); B starts at zero, so an adapter starts as nothing."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(cfg.rank, base.in_features, device=base.weight.device).normal_(std=LORA_INIT_STD))
        self.B = nn.Parameter(torch.zeros(base.out_features, cfg.rank, device=base.weight.device))
        self.scale, self.dropout = cfg.alpha / cfg.rank, nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.dropout(x), self.A), self.B)

    def delta(self) -> Tensor:
        """What merging adds to the weight (out, in)."""
        return self.scale * self.B @ self.A


class LoraLinear(nn.Linear):
    """A Linear with named adapters beside it, of which at most one is active."""

    lora: nn.ModuleDict
    active: str | None

    @classmethod
    def adapt(cls, linear: nn.Linear) -> LoraLinear:
        """The same module, weights and name included, under this class."""
        linear.__class__ = LoraHead if isinstance(linear, LMHead) else cls
        assert isinstance(linear, LoraLinear)
        linear.lora, linear.active = nn.ModuleDict(), None
        return linear

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.active is None else y + self.lora[self.active](x)


class LoraHead(LoraLinear):
    """The last layer with adapters: one wider product, W x + s B h = [W B] [x, s h]."""

    def forward(self, x: Tensor, labels: Tensor | None = None, summed: bool = False) -> Tensor:
        if labels is None:
            return super().forward(x)
        if self.active is None:
            return linear_cross_entropy(x, self.weight, labels, summed)
        adapter = self.lora[self.active]
        assert isinstance(adapter, LoraAdapter)
        inner = adapter.scale * F.linear(adapter.dropout(x), adapter.A)
        return linear_cross_entropy(torch.cat([x, inner.to(x.dtype)], dim=-1), torch.cat([self.weight, adapter.B], dim=1), labels, summed)


def add_lora(model: nn.Module, cfg: LoraConfig, name: str = "default") -> None:
    """Freeze `model` in place and put an adapter, active from now on, beside every Linear whose last name is in `cfg.targets`."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    # A head that shares its weight with the embedding is left out: merging into it would change the embedding too.
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and not any(m.weight is e for e in embeddings)}
    could = sorted({path.rsplit(".", 1)[-1] for path in linears})
    if not cfg.targets or (unknown := [target for target in cfg.targets if target not in could]):
        what = f"no linear layer that can be adapted is called {', '.join(unknown)}" if cfg.targets else "no layer is named to be adapted"
        raise UserError(what, f"stage.lora.targets={cfg.targets}", f"choose from {', '.join(could)}")
    targets = [module for path, module in linears.items() if path.rsplit(".", 1)[-1] in cfg.targets]
    model.requires_grad_(False)
    for linear in targets:
        adapted = linear if isinstance(linear, LoraLinear) else LoraLinear.adapt(linear)
        adapted.lora[name] = LoraAdapter(linear, cfg).train(linear.training)
    use_adapter(model, name)


def use_adapter(model: nn.Module, name: str | None) -> None:
    """Make one adapter the active one, or none; layers without an adapter of that name work bare.

    Raises ValueError(what, where, fix) if no layer has one.
    """
    names = sorted({own for linear in _adapted(model) for own in linear.lora})
    if name is not None and name not in names:
        raise UserError("no layer has an adapter of that name", f"adapter={name}", f"choose from {', '.join(names) or 'none: add one first'}")
    for linear in _adapted(model):
        linear.active = name if name is not None and name in linear.lora else None


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
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


def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters into the weights, and switch them off."""
    _shift(model, +1)


def unmerge_adapters(model: nn.Module, name: str = "default") -> None:
    """Take adapter `name` back out of the weights, and make it active again."""
    use_adapter(model, name)
    _shift(model, -1)
    use_adapter(model, name)


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora." in name}


def load_adapter(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fill the adapters strictly: KeyError names what does not fit."""
    own = adapter_state_dict(model)
    if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in state.items()}:
        odd = sorted(name for name in own.keys() | state.keys() if name not in own or name not in state or own[name].shape != state[name].shape)
        raise KeyError(f"adapters differ in {len(odd)} tensors: {', '.join(odd[:4])}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


@torch.no_grad()
def _shift(model: nn.Module, sign: int) -> None:
    for linear in _adapted(model):
        if linear.active is not None:
            adapter = linear.lora[linear.active]
            assert isinstance(adapter, LoraAdapter)
            linear.weight += sign * adapter.delta()
            linear.active = None


def _adapted(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]
