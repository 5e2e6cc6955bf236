"""FIXME runner.engine.device.mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def prebuild_ddp_buckets(wrapped: nn.Module, device: torch.device) -> None:
    """DDP groups gradients anew after the first backward pass it sees, and a sum over three ranks or more depends on the groups. After
    this one, of nothing, a run that is resumed adds like one that never stopped. Nothing is drawn: in evaluation there is no dropout."""
    import torch

    training = wrapped.training
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    with torch.enable_grad():
        wrapped.eval()(ids, ids).nll.sum().backward()
    wrapped.zero_grad(set_to_none=True)
    wrapped.train(training)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks share; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks share."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, whole on every rank, shared out as `like` is. A number stays with everybody."""
    if not hasattr(like, "placements") or tensor.ndim == 0:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
