"""Linear layers with a frozen weight of 4 bits (NF4, QLoRA, https://arxiv.org/abs/2305.14314), computed by bitsandbytes
on CUDA and the CPU.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from models.layers.ops import compute_dtype

DEVICES = ("cuda", "cpu")


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
    if device.type not in DEVICES:
        raise UserError(
            f"quantized weights are computed on {' and '.join(DEVICES)} only, not on {device.type}", setting, off
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "quantized weights need the package bitsandbytes, which is not installed",
            setting,
            f"pip install bitsandbytes; or {off}",
        )


def quantize_linear_layers(model: nn.Module, device: torch.device) -> None:
    """Replace the weight of every nn.Linear but the output layer by one of 4 bits on `device`, layer by layer."""
    check_quantization(device)
    params_class = _import_bitsandbytes().nn.Params4bit
    output_layer = getattr(model, "output_layer", None)
    for linear in model.modules():
        if type(linear) is nn.Linear and linear is not output_layer:
            weight = params_class(linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
            linear.__class__ = Linear4bit
            linear.weight = weight.to(device)  # quantizes


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
