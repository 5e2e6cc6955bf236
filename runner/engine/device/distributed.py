"""Rank, world size, collectives, DDP and FSDP2. The only module that joins a process group.

One rank is one process, and every method gives the same result on one rank as on many. Numbers that decide something
(counts, losses, flags) are summed on the CPU, so that the host does not wait for a GPU; gradients and weights are
exchanged by DDP and FSDP2.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from common.errors import UserError, print_note
from common.settings import IGNORED, CheckedSettings, at_least, one_of, settings_class, within
from runner.engine.device.heartbeat import beat, during
from runner.engine.device.mesh import has_unused_parameters, prebuild_ddp_buckets

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import Store

# where the ranks meet: file://<path>, or torchrun:<prefix> for a prefix in torchrun's own store
RENDEZVOUS_ENV = "RUNNER_RENDEZVOUS"
RENDEZVOUS_DONE = threading.Event()  # set when this rank has met the others, or has none to meet
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
LOOPBACK = "lo"  # interface of Linux
WATCHDOG_EXIT_SECONDS = 5  # collectives time out this much later than the watchdog prints the stacks


@settings_class
class DistributedConfig(CheckedSettings):
    SECTION = "distributed"
    ON_RESUME = "changes_rounding"

    # single (one process), ddp (each rank has the whole model) or fsdp (the ranks share the model)
    name: str = one_of("single", "ddp", "fsdp")
    nproc: str = field(metadata=IGNORED)  # processes on this machine; auto: one per GPU
    nnodes: int = at_least(1, resume=IGNORED)  # machines; more than one are started by torchrun
    # auto (nccl between GPUs, gloo between CPUs), nccl or gloo
    backend: str = one_of("auto", "nccl", "gloo")
    # minutes without a step after which a rank counts as hanging
    timeout: float = within("(0, inf]", 10, "above 0 minutes", resume=IGNORED)
    # restarts of all ranks from the last checkpoint after a rank has failed
    max_restarts: int = at_least(0, resume=IGNORED)
    # fsdp: ranks that share one copy of the weights; 0: all
    shard: int = at_least(0)
    replicate: int = at_least(1)  # fsdp: copies of the weights; more than one is HSDP
    # fsdp: gather each layer again for the backward pass (less memory); false: keep it gathered
    reshard_after_forward: bool
    cpu_offload: bool  # fsdp: keep weights, gradients and optimizer state in host memory

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nproc != "auto":
            if not (self.nproc.isdigit() and int(self.nproc)):
                raise UserError(
                    f"distributed.nproc must be auto or at least 1, got {self.nproc}",
                    f"distributed.nproc={self.nproc}",
                    "e.g. distributed.nproc=2",
                )
            self.check_shares(int(self.nproc) * self.nnodes)
        if self.name == "single" and (self.nproc != "1" or self.nnodes != 1):
            raise UserError(
                "distributed=single is one process",
                f"distributed.nproc={self.nproc} distributed.nnodes={self.nnodes}",
                "add distributed=ddp or distributed=fsdp",
            )

    def check_device(self, device_type: str) -> None:
        """`device_type`: cpu, cuda or mps. Raises UserError if a setting does not fit it."""
        if device_type == "mps" and (self.name != "single" or self.nproc not in ("1", "auto") or self.nnodes != 1):
            raise UserError(
                f"device=mps is one GPU and trains in one process, got distributed={self.name}",
                "device=mps",
                "distributed=single, or device=cpu",
            )
        if self.backend == "nccl" and device_type == "cpu":
            raise UserError(
                "distributed.backend=nccl needs CUDA devices, but this run is on the CPU",
                "distributed.backend=nccl",
                "distributed.backend=auto",
            )
        if self.cpu_offload and device_type == "cpu":
            raise UserError(
                "distributed.cpu_offload=true needs CUDA devices, but this run is on the CPU",
                "distributed.cpu_offload=true",
                "remove it",
            )

    def check_shares(self, ranks: int) -> None:
        """Raises UserError if `shard` and `replicate` do not multiply to the number of ranks."""
        if self.name == "fsdp" and (self.shard or ranks // self.replicate) * self.replicate != ranks:
            raise UserError(
                f"distributed.shard ({self.shard or 'all'}) times distributed.replicate ({self.replicate}) must be the number of ranks, {ranks}",
                f"distributed.shard={self.shard} distributed.replicate={self.replicate}",
                f"e.g. distributed.shard={ranks} distributed.replicate=1",
            )


@dataclass(frozen=True)
class DistributedContext:
    """The ranks of one training, and which of them this process is."""

    rank: int
    size: int  # number of ranks
    device: torch.device
    cfg: DistributedConfig

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.size > 1 and self.cfg.name == "fsdp"

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over all ranks of each number, in fp64."""
        if self.size == 1:
            return list(numbers)
        import torch
        from torch.distributed import all_reduce

        summed = torch.tensor(numbers, dtype=torch.float64)
        with during("while it waits for the other ranks"):
            all_reduce(summed)
        return summed.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on some rank."""
        return flag if self.size == 1 else self.all_reduce_sum([flag])[0] > 0

    def broadcast_flag(self, flag: bool) -> bool:
        """Return the flag of rank 0."""
        return self.any(flag and self.is_rank_zero)

    def check_agreement(self, facts: list[str]) -> None:
        """Refuse ranks with other `facts` about checkpoint and data: another machine may see another run directory."""
        for rank, own in enumerate(per_rank := self.gather(facts)):
            if own != per_rank[0]:
                differences = ", ".join(
                    f"{its} (rank 0: {first})" for its, first in zip(own, per_rank[0], strict=True) if its != first
                )
                raise UserError(
                    "the ranks see different runs or data",
                    f"rank {rank}: {differences}",
                    "make the run directory and the data visible under the same paths on every machine",
                )

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        import torch
        from torch.distributed import all_gather

        text = json.dumps(value).encode()
        lengths = [
            int(length)
            for length in self.all_reduce_sum([len(text) if rank == self.rank else 0 for rank in range(self.size)])
        ]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in lengths]
        all_gather(parts, mine)
        return [json.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths, strict=True)]

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """fsdp: leave each rank its shard of every parameter, in place.

        Layers are gathered one at a time, in `dtype`, to compute.
        """
        if not self.sharded:
            return
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # The model returns a view, and nothing writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        copies = self.cfg.replicate
        shape = {"replicate": copies, "shard": self.size // copies} if copies > 1 else {"shard": self.size}
        mesh = init_device_mesh(self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        policy = MixedPrecisionPolicy(
            None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for part in (*layers, model):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=self.cfg.reshard_after_forward,
                offload_policy=CPUOffloadPolicy() if self.cfg.cpu_offload else OffloadPolicy(),
            )

    def reshard(self, model: nn.Module) -> None:
        """fsdp: free the parameters that a forward pass without a backward pass has left gathered, in the dtype of the
        computation.
        """
        for part in model.modules() if self.sharded else ():
            if hasattr(part, "reshard"):
                part.reshard()  # type: ignore[operator]  # a method that fully_shard adds

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model as the training step calls it: after the last backward pass of a step, gradients are the
        mean over ranks.
        """
        if self.size == 1 or self.sharded:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [self.device.index] if self.device.type == "cuda" else None
        # The only buffer is a constant, and torch 2.11 has no replacement for the deprecated argument.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            device_ids=ids,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=has_unused_parameters(model, self.device),
        )
        prebuild_ddp_buckets(wrapped, self.device)
        return wrapped

    def no_sync_until_last(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager:
        """Context of a micro-batch: gradients are exchanged in the backward pass of the step's last one only."""
        if self.sharded:
            wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]  # a method that fully_shard adds
        elif self.size > 1 and not is_last:
            return wrapped.no_sync()  # type: ignore[operator]  # a method that DistributedDataParallel adds
        return nullcontext()

    def is_device_idle(self) -> bool:
        """Return whether the device has finished all work that was queued on it; a CPU always has.

        Metal does not say: False.
        """
        import torch

        return self.device.type == "cpu" or (
            self.device.type == "cuda" and torch.cuda.current_stream(self.device).query()
        )

    def arm_watchdog(self) -> None:
        """Give a sign of life.

        With several ranks print the stacks of all threads unless this is called again within `timeout` minutes.
        """
        beat()
        if self.size > 1:
            faulthandler.dump_traceback_later(self.cfg.timeout * 60)

    def disarm_watchdog(self) -> None:
        if self.size > 1:
            faulthandler.cancel_dump_traceback_later()


def init_distributed(cfg: DistributedConfig, device: str) -> DistributedContext:
    """Join the process group that the environment describes (RANK, LOCAL_RANK, WORLD_SIZE, and RENDEZVOUS_ENV); without
    it, be the only rank.

    `device`: auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps. Raises UserError if the settings do not fit
    the machine.
    """
    import torch
    from torch.distributed import init_process_group, is_initialized

    rendezvous = os.environ.get(RENDEZVOUS_ENV, "")
    rank, local_rank, size = (
        (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) if rendezvous else (0, 0, 1)
    )
    dist = DistributedContext(rank, size, resolve_device(device, local_rank if size > 1 else None), cfg)
    if dist.device.type == "mps":
        cfg.check_device("mps")
    if dist.device.index is not None:  # what names no device, as pinned memory and random states, must not use another
        torch.cuda.set_device(dist.device)
    if size == 1:
        RENDEZVOUS_DONE.set()
        return dist
    cfg.check_device(dist.device.type)
    cfg.check_shares(size)
    listen_on_loopback(rendezvous, size)
    if not is_initialized():  # never destroyed: over gloo that can wait forever for ranks that have exited
        backend = (
            "gloo" if dist.device.type == "cpu" else f"cpu:gloo,cuda:{'nccl' if cfg.backend == 'auto' else cfg.backend}"
        )
        timeout = timedelta(minutes=cfg.timeout, seconds=WATCHDOG_EXIT_SECONDS)
        init_process_group(
            backend, store=open_store(rendezvous, size, timeout), rank=rank, world_size=size, timeout=timeout
        )
        RENDEZVOUS_DONE.set()
    return dist


def listen_on_loopback(rendezvous: str, size: int) -> None:
    """Let gloo listen on the loopback interface only if all ranks are on this machine, unless GLOO_SOCKET_IFNAME names
    another interface.
    """
    is_one_machine = rendezvous.startswith("file://") or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if is_one_machine and LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def open_store(rendezvous: str, size: int, timeout: timedelta) -> Store:
    """Return the key-value store through which the ranks find each other."""
    from torch.distributed import FileStore, PrefixStore, TCPStore

    if rendezvous.startswith("file://"):
        return FileStore(rendezvous.removeprefix("file://"), size)
    # torchrun keeps its store for all trainings under it, so each has a prefix of its own
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    return PrefixStore(rendezvous.removeprefix("torchrun:"), store)


@cache
def warn_of_unused_gpu() -> None:
    """Say that a GPU is there and torch cannot use it: `device=auto` would train on the CPU silently."""
    import torch

    from runner.checkpoint.compatibility import nvidia_driver

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if (driver := nvidia_driver()) and not torch.cuda.is_available() and not hidden:
        reason = f"torch {torch.__version__} is built " + (
            f"for CUDA {torch.version.cuda}, and the driver may be too old" if torch.version.cuda else "without CUDA"
        )
        print_note(f"computing on the CPU: torch cannot use the GPU ({driver}); {reason}")


def check_device_name(device: str) -> None:
    if not DEVICE.fullmatch(device):
        raise UserError(
            f"device must be auto, cpu, cuda, cuda:<number> or mps, got {device}",
            f"device={device}",
            "e.g. device=auto",
        )


def resolve_device(device: str, local_rank: int | None = None) -> torch.device:
    """Return the device of this process.

    `local_rank` is None for a single process. Raises UserError if there is no such device.
    """
    import torch

    if device == "auto":
        several = local_rank is not None  # ranks, which have CUDA or the CPU
        device = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available() and not several
            else "cpu"
        )
        if device == "cpu":
            warn_of_unused_gpu()
    check_device_name(device)
    kind, _, index = device.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        reason = (
            "this build of torch has no MPS"
            if not torch.backends.mps.is_built()
            else "it needs an Apple GPU and macOS 14 or newer"
        )
        raise UserError(f"torch cannot compute on mps: {reason}", f"device={device}", "device=cpu or device=auto")
    if kind != "cuda":
        return torch.device(device)
    if index and local_rank is not None:
        raise UserError(
            f"device={device} names one GPU, but the run has several ranks",
            f"device={device}",
            "device=cuda, and choose GPUs by CUDA_VISIBLE_DEVICES",
        )
    number, available = int(index or 0) if local_rank is None else local_rank, torch.cuda.device_count()
    if number >= available:
        fix = "device=cpu or device=auto" if local_rank is None or not available else f"distributed.nproc={available}"
        raise UserError(
            f"torch finds {available} CUDA devices, this process needs number {number} (from 0)",
            f"device={device}",
            fix,
        )
    return torch.device(device) if local_rank is None else torch.device("cuda", local_rank)
