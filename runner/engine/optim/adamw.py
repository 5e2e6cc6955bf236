"""FIXME runner.engine.optim.adamw."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class NoDynamoOptimizer(Optimizer):
    """Without what torch wraps around each call, to tell its compiler that it should not look inside."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(NoDynamoOptimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
