"""Linear layers with low-rank adapters: LoRA (https://arxiv.org/abs/2106.09685), rsLoRA
(https://arxiv.org/abs/2312.03732) and DoRA (https://arxiv.org/abs/2402.09353); and with a frozen weight of 4 bits (NF4,
QLoRA, https://arxiv.org/abs/2305.14314), computed by bitsandbytes on CUDA and the CPU.

An adapted layer keeps the name of its weight; the adapter's parameters are `<layer>.lora.default.A`, `.B` and, for
DoRA, `.magnitude`. Shapes: I inputs, O outputs of the layer, r rank.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from common.settings import check_installed
from models.config import LoraConfig
from models.layers.chunked_loss import LMHead
from models.layers.ops import compute_dtype

LORA_INIT_STD = 0.02
ADAPTER = "default"  # the name that PEFT gives to an adapter, a part of the names of its parameters


class Linear4bit(nn.Linear):
    """W x + b in the dtype of autocast, else that of x.

    `weight`: a Params4bit of bitsandbytes, two numbers in a byte, blocks of 64 with scales that are quantized
    themselves.
    """

    weight: Any

    def forward(self, x: Tensor) -> Tensor:
        import bitsandbytes

        # Not the forward of bitsandbytes.nn.Linear4bit: that casts outputs back to the dtype of x, and repacks weights
        # during evaluation.
        x = x.to(compute_dtype(x))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y: Tensor = bitsandbytes.matmul_4bit(x, self.weight, bias=bias, quant_state=self.weight.quant_state)
        return y

    def dequantized(self) -> Tensor:
        """Return the weight (O, I) in fp32."""
        import bitsandbytes

        weight: Tensor = bitsandbytes.functional.dequantize_4bit(self.weight.data, self.weight.quant_state)
        return weight.float()


def check_quantization(device: torch.device) -> None:
    """Raise UserError if weights cannot be quantized on this machine."""
    setting, off = (
        "stage.lora.quantize=nf4",
        "stage.lora.quantize=null trains the same adapters on weights that are not quantized",
    )
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"quantized weights are computed on cuda and cpu only, not on {device.type}", setting, off)
    check_installed("bitsandbytes", setting, f"pip install bitsandbytes; or {off}")


def quantize_linear_layers(model: nn.Module, device: torch.device) -> None:
    """Replace the weight of every nn.Linear but the output layer by one of 4 bits on `device`, layer by layer."""
    params_class = _import_bitsandbytes().nn.Params4bit
    output_layer = getattr(model, "output_layer", None)
    for linear in model.modules():
        if type(linear) is nn.Linear and linear is not output_layer:
            weight = params_class(linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
            linear.__class__ = Linear4bit
            linear.weight = weight.to(device)  # quantizes
    if not is_quantized(model):
        raise UserError(
            "no layer of this model is an nn.Linear, the only kind that is quantized",
            "stage.lora.quantize=nf4",
            "stage.lora.quantize=null",
        )


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, Linear4bit) for module in model.modules())


def _import_bitsandbytes() -> Any:
    """Return the package.

    With the package `kernels` it would download a library from the hub and run it: such code is never executed.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # a warning that `kernels` is missing
    modules: dict[str, Any] = sys.modules
    before = modules.get("kernels")
    modules["kernels"] = None  # importing it raises ImportError
    try:
        import bitsandbytes
    finally:
        del modules["kernels"]
        if before is not None:
            modules["kernels"] = before
    return bitsandbytes


class LoraAdapter(nn.Module):
    """The update of a weight W: W + s B A, or with DoRA its rows scaled to the length `magnitude`.

    B is initialized to zero: a new adapter does not change the model.
    """

    magnitude: nn.Parameter | None

    def __init__(self, weight: Tensor, cfg: LoraConfig) -> None:
        """weight: (O, I) of the layer."""
        super().__init__()
        self.A = nn.Parameter(torch.empty(cfg.rank, weight.shape[1], device=weight.device).normal_(std=LORA_INIT_STD))
        self.B = nn.Parameter(torch.zeros(weight.shape[0], cfg.rank, device=weight.device))
        self.scale, self.dropout, self.cfg = cfg.scale, nn.Dropout(cfg.dropout), cfg
        self.magnitude = nn.Parameter(_row_lengths(weight, self.A, self.B, self.scale)) if cfg.dora else None

    def forward(self, x: Tensor) -> Tensor:
        """Return s B A x. (..., I) -> (..., O)."""
        return self.scale * F.linear(F.linear(x, self.A), self.B)

    def row_factors(self, weight: Tensor) -> Tensor:
        """Return the factor of each row of W + s B A: magnitude / length (O,).

        The length counts as constant, as in section 4.3 of the paper.
        """
        assert self.magnitude is not None
        return self.magnitude.float() / _row_lengths(weight, self.A, self.B, self.scale)


@torch.no_grad()
def _row_lengths(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        return torch.linalg.norm(weight.float() + scale * (B.float() @ A.float()), dim=1)


class LoraLayer(nn.Module):
    """Mixin of a linear layer with an adapter, which can be disabled."""

    lora: nn.ModuleDict  # the adapter; empty after it was merged
    is_enabled: bool

    def add(self, cfg: LoraConfig) -> None:
        self.lora[ADAPTER] = LoraAdapter(linear_weight(self), cfg).train(self.training)
        self.is_enabled = True

    @property
    def adapter(self) -> LoraAdapter | None:
        adapter = self.lora[ADAPTER] if ADAPTER in self.lora else None
        assert adapter is None or isinstance(adapter, LoraAdapter)
        return adapter

    def active(self) -> LoraAdapter | None:
        return self.adapter if self.is_enabled else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        adapter = self.active()
        if adapter is None:
            return y
        dropped = adapter.dropout(x)
        if adapter.magnitude is None:
            return y + adapter(dropped)
        weight, bias = linear_weight(self), getattr(self, "bias", None)
        factors = adapter.row_factors(weight)
        if self.training and adapter.dropout.p:
            product = F.linear(dropped, weight)  # dropout changes the input of the product W x, too
        else:
            product = y if bias is None else y - bias
        return y + (
            (factors - 1).to(y.dtype) * product
            + factors.to(y.dtype) * F.linear(F.linear(dropped, adapter.A), adapter.B) * adapter.scale
        )

    @torch.no_grad()
    def merge(self) -> None:
        """Add the active adapter to the weight and remove it."""
        if (adapter := self.active()) is not None:
            assert not isinstance(self, Linear4bit)  # commands that merge load the base model without quantization
            weight = linear_weight(self)  # (O, I)
            updated = weight + adapter.scale * (adapter.B @ adapter.A)
            weight.copy_(updated if adapter.magnitude is None else adapter.row_factors(weight)[:, None] * updated)
            del self.lora[ADAPTER]


class LoraHead(LoraLayer, LMHead):
    """Output layer with adapters: its loss is that of one wider product, W x + s B h = [W B] [x, s h] with h = A
    dropout(x).
    """

    def forward(self, x: Tensor, labels: Tensor | None = None, reduction: str = "none") -> Tensor:
        if labels is None:
            return super().forward(x)
        adapter = self.active()
        if adapter is None:
            return self.loss(x, self.weight, labels, reduction)
        dropped = adapter.dropout(x)
        h = (adapter.scale * F.linear(dropped, adapter.A)).to(x.dtype)
        inputs, weights = [x, h], [self.weight, adapter.B]
        if adapter.magnitude is not None:  # DoRA: W x + (f - 1) W dropout(x) + f s B h
            factors = adapter.row_factors(self.weight)[:, None]
            inputs, weights = [x, dropped, h], [self.weight, (factors - 1) * self.weight, factors * adapter.B]
        return self.loss(torch.cat(inputs, dim=-1), torch.cat(weights, dim=1), labels, reduction)


ADAPTABLE: tuple[type[nn.Module], ...] = (nn.Linear, LMHead, Linear4bit)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether `layer` is the linear layer of GPT-2, which stores its weight as (I, O): PEFT's fan_in_fan_out."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" for cls in type(layer).__mro__
    )


def is_adaptable(layer: nn.Module) -> bool:
    """Return whether `layer` can have adapters: subclasses of nn.Linear may compute something else than a product."""
    return (
        isinstance(layer, LoraLayer)
        or type(layer) in ADAPTABLE
        or type(layer).__name__ in ("Conv1D", "FalconLinear")  # of transformers: W x + b
    )


ADAPTED: dict[type[nn.Module], type[LoraLayer]] = {LMHead: LoraHead}


def adapt(layer: nn.Module) -> LoraLayer:
    """Change the class of `layer` in place to one with adapters: the module and the name of its weight stay."""
    if not isinstance(layer, LoraLayer):
        cls = type(layer)
        layer.__class__ = ADAPTED.setdefault(cls, type(f"Lora{cls.__name__}", (LoraLayer, cls), {}))
        assert isinstance(layer, LoraLayer)
        layer.lora, layer.is_enabled = nn.ModuleDict(), False
    return layer


def linear_weight(layer: nn.Module) -> Tensor:
    """Return the weight (O, I); of a quantized layer a copy."""
    if isinstance(layer, Linear4bit):
        return layer.dequantized()
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.T if is_transposed(layer) else weight


def weight_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (O, I)."""
    weight: Any = layer.weight
    rows, columns = weight.quant_state.shape if isinstance(layer, Linear4bit) else weight.shape
    return (columns, rows) if is_transposed(layer) else (rows, columns)
