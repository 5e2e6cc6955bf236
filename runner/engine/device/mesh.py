"""Tensors sharded over ranks (DTensor), and the gradient buckets of DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def prebuild_ddp_buckets(wrapped: nn.Module, device: torch.device) -> None:
    """Run one backward pass with zero gradients, so that a resumed run adds gradients in the same order as one that was
    not stopped.

    DDP regroups its buckets after the first backward pass, and with three or more ranks the sum depends on them.
    """
    _run_backward_pass(wrapped, device)
    wrapped.zero_grad(set_to_none=True)


def has_unused_parameters(model: nn.Module, device: torch.device) -> bool:
    """Return whether the loss of a row leaves a trained parameter without gradient, as a layer that a model has and
    does not call: DDP must then look for such parameters in each step. Experts without tokens count, if each has
    parameters of its own.
    """
    _run_backward_pass(model, device)
    unused = any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return unused


def _run_backward_pass(model: nn.Module, device: torch.device) -> None:
    """Compute the gradients of a short row. Draws no random numbers: in eval mode there is no dropout."""
    import torch

    was_training = model.training
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    with torch.enable_grad():
        model.eval()(ids, ids, lengths=ids.new_full((1,), ids.shape[1])).nll.sum().backward()
    model.train(was_training)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor gathered from all ranks; every rank must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, which every rank has in full, sharded and on the device as `like` is. Scalars are not sharded."""
    if not hasattr(like, "placements") or tensor.ndim == 0:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    # distributed over GPUs by torch, also where cpu_offload keeps the shards in host memory
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to(like.device)
