"""Who we are among how many: the only room that knows about other processes.

One rank is one process, and every verb here means the same for one as for many. Numbers that decide something (counts, losses, flags)
are summed on the CPU, so that a GPU is never waited for; gradients and weights go by torch's own DDP and FSDP2.
"""

from __future__ import annotations

import faulthandler
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from runner.engine.device.mesh import prebuild_ddp_buckets

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import Store

STRATEGIES, PROCESS_GROUP_BACKENDS = ("single", "ddp", "fsdp"), ("auto", "nccl", "gloo")
RENDEZVOUS_ENV = "RUNNER_MEETING"  # where the ranks find each other: file://<path>, or torchrun:<prefix> for torchrun's own store
WATCHDOG_EXIT_SECONDS = 5  # seconds: each rank has said where it hangs before the first collective gives up


@dataclass
class DistributedConfig:
    name: str  # single | ddp | fsdp
    nproc: str  # processes on this machine; auto: one for each GPU
    nnodes: int  # machines; more than one are started by torchrun
    backend: str  # auto | nccl | gloo
    timeout: float  # minutes without a step after which a rank counts as hanging
    max_restarts: int  # times the ranks are started again from the last checkpoint after one has failed
    shard: int  # fsdp: ranks that hold one copy of the weights between them; 0: all
    replicate: int  # fsdp: such copies; more than one is known as HSDP
    reshard_after_forward: bool  # fsdp: gather a layer again for the backward pass, instead of keeping it whole
    cpu_offload: bool  # fsdp: weights, gradients and optimizer wait in host memory

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise UserError("unknown way to distribute", f"distributed.name={self.name}", f"choose one of {', '.join(STRATEGIES)}")
        if self.nproc != "auto" and not (self.nproc.isdigit() and int(self.nproc)):
            raise UserError("a number of processes is meant", f"distributed.nproc={self.nproc}", "give auto, or a number from 1 on")
        if self.nproc != "auto":
            self.check_shares(int(self.nproc) * self.nnodes)
        if self.name == "single" and (self.nproc != "1" or self.nnodes != 1):
            raise UserError(
                "a single run is one process", f"distributed.nproc={self.nproc} distributed.nnodes={self.nnodes}", "add distributed=ddp or distributed=fsdp"
            )
        if self.backend not in PROCESS_GROUP_BACKENDS:
            raise UserError("unknown backend", f"distributed.backend={self.backend}", f"choose one of {', '.join(PROCESS_GROUP_BACKENDS)}")
        if not self.timeout > 0:
            raise UserError("a timeout is a positive number of minutes", f"distributed.timeout={self.timeout}", "choose e.g. 10")
        for word, least in (("nnodes", 1), ("max_restarts", 0), ("shard", 0), ("replicate", 1)):
            if getattr(self, word) < least:
                raise UserError(f"this count is at least {least}", f"distributed.{word}={getattr(self, word)}", f"choose {least} or more")

    def check_device(self, kind: str) -> None:
        """`kind` is what a rank computes on: cpu or cuda. Raises ValueError(what, where, fix)."""
        if self.backend == "nccl" and kind == "cpu":
            raise UserError("NCCL connects GPUs", "distributed.backend=nccl", "use distributed.backend=gloo or auto on the CPU")
        if self.cpu_offload and kind == "cpu":
            raise UserError("everything is in host memory already", "distributed.cpu_offload=true", "leave the word out")

    def check_shares(self, ranks: int) -> None:
        """Raises ValueError(what, where, fix) where so many ranks cannot share the weights as these words want it."""
        if self.name == "fsdp" and (self.shard or ranks // self.replicate) * self.replicate != ranks:
            raise UserError(
                f"{self.replicate} copies over {self.shard or 'all'} ranks each are not {ranks} ranks",
                f"distributed.shard={self.shard} distributed.replicate={self.replicate}",
                f"their product is the number of ranks, e.g. distributed.shard={ranks} distributed.replicate=1",
            )


@dataclass(frozen=True)
class DistributedContext:
    """The ranks of one training, and which of them this process is."""

    rank: int
    size: int
    device: torch.device
    cfg: DistributedConfig

    @property
    def is_rank_zero(self) -> bool:
        """The rank that prints and writes."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.size > 1 and self.cfg.name == "fsdp"

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Each over all ranks, in fp64; every rank gets the same."""
        if self.size == 1:
            return list(numbers)
        import torch
        from torch.distributed import all_reduce

        summed = torch.tensor(numbers, dtype=torch.float64)
        all_reduce(summed)
        return summed.tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is set on some rank: all of them then do the same in the same step."""
        return flag if self.size == 1 else self.all_reduce_sum([flag])[0] > 0

    def broadcast_flag(self, flag: bool) -> bool:
        """What the leading rank found, where only it can know."""
        return self.any(flag and self.is_rank_zero)

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, by rank: anything that JSON can say."""
        if self.size == 1:
            return [value]
        import torch
        from torch.distributed import all_gather

        text = json.dumps(value).encode()
        lengths = [int(length) for length in self.all_reduce_sum([len(text) if rank == self.rank else 0 for rank in range(self.size)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in lengths]
        all_gather(parts, mine)
        return [json.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths, strict=True)]

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """fsdp: leave each rank its share of every parameter, in place; one of `layers` at a time is gathered, in `dtype`, while it computes."""
        if not self.sharded:
            return
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # What the decoder returns is a view, and nothing writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        copies = self.cfg.replicate
        form = {"replicate": copies, "shard": self.size // copies} if copies > 1 else {"shard": self.size}
        mesh = init_device_mesh(self.device.type, tuple(form.values()), mesh_dim_names=tuple(form))
        policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*layers, model):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=self.cfg.reshard_after_forward,
                offload_policy=CPUOffloadPolicy() if self.cfg.cpu_offload else OffloadPolicy(),
            )

    def reshard(self, model: nn.Module) -> None:
        """fsdp: let go of what a forward pass without a backward pass has left gathered: it is rounded to what is computed in."""
        for part in model.modules() if self.sharded else ():
            if hasattr(part, "reshard"):
                part.reshard()  # type: ignore[operator]  # a method that fully_shard gives the module

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the training step calls it: after its last backward pass of a step each gradient is the mean over ranks."""
        if self.size == 1 or self.sharded:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [self.device.index] if self.device.type == "cuda" else None
        # There is no buffer to keep equal: the only one is a constant. torch 2.11 knows no other word for it.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        prebuild_ddp_buckets(wrapped, self.device)
        return wrapped

    def no_sync_until_last(self, wrapped: nn.Module, last: bool) -> AbstractContextManager:
        """Around each micro-batch: gradients are exchanged after the last one of a step only."""
        if self.size == 1:
            return nullcontext()
        if self.sharded:
            wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]  # a method that fully_shard gives the module
            return nullcontext()
        return nullcontext() if last else wrapped.no_sync()  # type: ignore[operator]  # of DDP

    def is_device_idle(self) -> bool:
        """Whether the device has done all it was told to do. A processor has, as soon as we can ask."""
        import torch

        return self.device.type == "cpu" or torch.cuda.current_stream(self.device).query()

    def arm_watchdog(self) -> None:
        """A step goes on. A rank that has not said so for `timeout` minutes prints the stack of each of its threads."""
        if self.size > 1:
            faulthandler.dump_traceback_later(self.cfg.timeout * 60)

    def disarm_watchdog(self) -> None:
        """No step is expected any more."""
        if self.size > 1:
            faulthandler.cancel_dump_traceback_later()


def init_distributed(cfg: DistributedConfig, device: str) -> DistributedContext:
    """Meet the other ranks, where the environment says there are any (RANK, LOCAL_RANK, WORLD_SIZE, RUNNER_MEETING).

    `device` is auto, cpu, cuda or cuda:1; auto takes a GPU where there is one. Raises ValueError(what, where, fix).
    """
    import torch
    import torch.distributed as dist

    meeting = os.environ.get(RENDEZVOUS_ENV)
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) if meeting else (0, 0, 1)
    dist = DistributedContext(rank, size, resolve_device(device, local_rank if size > 1 else None), cfg)
    if size == 1 or not meeting:
        return dist
    cfg.check_device(dist.device.type)
    cfg.check_shares(dist.size)
    if dist.device.type == "cuda":
        torch.cuda.set_device(dist.device)
    if not dist.is_initialized():  # it is never destroyed: over gloo that can wait for ever for ranks that have left
        backend = "gloo" if dist.device.type == "cpu" else f"cpu:gloo,cuda:{'nccl' if cfg.backend == 'auto' else cfg.backend}"
        wait = timedelta(minutes=cfg.timeout, seconds=WATCHDOG_EXIT_SECONDS)
        dist.init_process_group(backend, store=open_store(meeting, size, wait), rank=rank, world_size=size, timeout=wait)
    return dist


def open_store(meeting: str, size: int, wait: timedelta) -> Store:
    """Where the ranks of a meeting leave word for each other."""
    from torch.distributed import FileStore, PrefixStore, TCPStore

    if meeting.startswith("file://"):
        return FileStore(meeting.removeprefix("file://"), size)
    # torchrun keeps its store over all that happens under it: each training meets under a name of its own
    theirs = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)
    return PrefixStore(meeting.removeprefix("torchrun:"), theirs)


def resolve_device(device: str, local_rank: int | None = None) -> torch.device:
    """The one meant, or this rank's own. Raises ValueError(what, where, fix)."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UserError("unknown device", f"device={device}", "choose auto, cpu, cuda or cuda:<number>")
    if kind == "cuda" and index and local_rank is not None:
        raise UserError("each rank has a GPU of its own", f"device={device}", "use device=cuda; CUDA_VISIBLE_DEVICES says which ones")
    place = int(index or 0) if local_rank is None else local_rank
    if kind == "cuda" and place >= torch.cuda.device_count():
        none = local_rank is None or not torch.cuda.device_count()
        fix = "use device=cpu, or device=auto to take what there is" if none else "start as many processes as there are GPUs"
        raise UserError(f"this machine shows torch {torch.cuda.device_count()} CUDA devices", f"device={device}, number {place}", fix)
    return torch.device(device) if local_rank is None or kind == "cpu" else torch.device("cuda", local_rank)
