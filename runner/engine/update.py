"""torch's optimizers without its compiler: they import it, over a second of every start, to ask it to leave them alone."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class Alone(Optimizer):
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(Alone, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
