"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): freeze a model and train a low-rank update of chosen linear layers.

An adapted layer keeps the name of its weight; the adapter's parameters are `<layer>.lora.<adapter>.A` and `.B`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from common.limits.memory import machine_memory
from models.config import LoraConfig
from models.layers.chunked_loss import LMHead, linear_cross_entropy

LORA_INIT_STD = 0.02
ALL_LINEAR = "all-linear"  # in stage.lora.targets, as in PEFT


class LoraAdapter(nn.Module):
    """x -> alpha / rank * B A dropout(x). B is initialized to zero: a new adapter does not change the model."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(cfg.rank, base.in_features, device=base.weight.device).normal_(std=LORA_INIT_STD))
        self.B = nn.Parameter(torch.zeros(base.out_features, cfg.rank, device=base.weight.device))
        self.scale, self.dropout = cfg.alpha / cfg.rank, nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.dropout(x), self.A), self.B)

    def delta(self) -> Tensor:
        """Return the update of the weight (out, in) that merging adds."""
        return self.scale * self.B @ self.A


class LoraLinear(nn.Linear):
    """Linear layer with named adapters, of which at most one is active."""

    lora: nn.ModuleDict
    active_adapter: str | None

    @classmethod
    def adapt(cls, linear: nn.Linear) -> LoraLinear:
        """Change the class of `linear` in place: the module and the name of its weight stay."""
        linear.__class__ = LoraHead if isinstance(linear, LMHead) else cls
        assert isinstance(linear, LoraLinear)
        linear.lora, linear.active_adapter = nn.ModuleDict(), None
        return linear

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.active_adapter is None else y + self.lora[self.active_adapter](x)


class LoraHead(LoraLinear):
    """Output layer with adapters: its loss is that of one wider product, W x + s B h = [W B] [x, s h] with h = A dropout(x)."""

    def forward(self, x: Tensor, labels: Tensor | None = None, reduction: str = "none") -> Tensor:
        if labels is None:
            return super().forward(x)
        if self.active_adapter is None:
            return linear_cross_entropy(x, self.weight, labels, reduction)
        adapter = self.lora[self.active_adapter]
        assert isinstance(adapter, LoraAdapter)
        h = adapter.scale * F.linear(adapter.dropout(x), adapter.A)
        return linear_cross_entropy(torch.cat([x, h.to(x.dtype)], dim=-1), torch.cat([self.weight, adapter.B], dim=1), labels, reduction)


ADAPTABLE = (nn.Linear, LMHead, LoraLinear, LoraHead)


def add_lora(model: nn.Module, cfg: LoraConfig, name: str = "default") -> None:
    """Freeze `model` in place and add an active adapter to every linear layer whose name ends in one of `cfg.targets`."""
    targets = _target_layers(model, cfg.targets)
    numbers, memory = cfg.rank * sum(linear.in_features + linear.out_features for linear in targets), machine_memory()
    if 4 * numbers > memory:
        message = f"adapters of rank {cfg.rank:,} have {numbers:,} parameters, more than fit into {memory / 2**30:,.1f} GiB of memory"
        raise UserError(message, f"stage.lora.rank={cfg.rank}", "e.g. stage.lora.rank=8")
    model.requires_grad_(False)
    for linear in targets:
        adapted = linear if isinstance(linear, LoraLinear) else LoraLinear.adapt(linear)
        adapted.lora[name] = LoraAdapter(linear, cfg).train(linear.training)
    use_adapter(model, name)


def _target_layers(model: nn.Module, targets: list[str]) -> list[nn.Linear]:
    """Return the linear layers that `targets` names. Raises UserError if there is none of a name."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    # An output layer that shares the embedding's weight gets no adapter: merging it would change the embedding. Subclasses may compute something else.
    linears = {path: m for path, m in model.named_modules() if type(m) in ADAPTABLE and not any(m.weight is e for e in embeddings)}
    names = {path: path.rsplit(".", 1)[-1] for path in linears}
    if targets == [ALL_LINEAR]:
        inner = [linear for linear in linears.values() if not isinstance(linear, (LMHead, LoraHead))]
        if inner:
            return inner
    allowed = sorted(set(names.values()))
    if not targets or (unknown := [target for target in targets if target not in allowed]):
        message = f"unknown layers in stage.lora.targets: {', '.join(unknown)}" if targets else "stage.lora.targets is empty"
        fix = (
            f"stage.lora.targets=[{ALL_LINEAR}] is every linear layer but the output layer, or e.g. stage.lora.targets=[{allowed[-1]}]"
            if allowed
            else "stage.lora=null"
        )
        raise UserError(f"{message}; adapters can be added to {', '.join(allowed) or 'no layer of this model'}", f"stage.lora.targets={targets}", fix)
    return [linear for path, linear in linears.items() if names[path] in targets]


def use_adapter(model: nn.Module, name: str | None) -> None:
    """Activate adapter `name` in every layer that has one and no adapter in the others; None: in no layer. Raises UserError if no layer has it."""
    names = sorted({own for linear in _lora_layers(model) for own in linear.lora})
    if name is not None and name not in names:
        raise UserError(f"no layer has an adapter named {name}", f"adapter={name}", f"adapters: {', '.join(names) or 'none'}")
    for linear in _lora_layers(model):
        linear.active_adapter = name if name is not None and name in linear.lora else None


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Within the context `model` is its base model in evaluation mode: the reference of a preference stage."""
    active, training = [linear.active_adapter for linear in _lora_layers(model)], model.training
    use_adapter(model, None)
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for linear, name in zip(_lora_layers(model), active, strict=True):
            linear.active_adapter = name


def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters to the weights and deactivate them."""
    _add_deltas(model, +1)


def unmerge_adapters(model: nn.Module, name: str = "default") -> None:
    """Subtract adapter `name` from the weights and activate it again."""
    use_adapter(model, name)
    _add_deltas(model, -1)
    use_adapter(model, name)


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora." in name}


def load_adapter(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load all adapter parameters. Raises KeyError with the names that are missing, unknown or of another shape."""
    own = adapter_state_dict(model)
    wrong = sorted(name for name in own.keys() | state.keys() if name not in own or name not in state or own[name].shape != state[name].shape)
    if wrong:
        raise KeyError(f"adapters differ in {len(wrong)} tensors: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


@torch.no_grad()
def _add_deltas(model: nn.Module, sign: int) -> None:
    for linear in _lora_layers(model):
        if linear.active_adapter is not None:
            adapter = linear.lora[linear.active_adapter]
            assert isinstance(adapter, LoraAdapter)
            linear.weight += sign * adapter.delta()
            linear.active_adapter = None


def _lora_layers(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]
