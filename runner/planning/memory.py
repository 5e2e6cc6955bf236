"""Memory of a training process by part, at the moment of a step when it needs most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from runner.engine.choices.layer_choices import FUSED
from runner.engine.config import Config
from runner.engine.device.precision import PRECISIONS
from runner.engine.optim.orthogonalize import BATCH_NUMBERS
from runner.planning.activations import FP32, Computation, layer_workspace, saved_per_layer
from runner.planning.facts.cpu import CpuExecution, attention_buffers
from runner.planning.facts.data import BatchShape
from runner.planning.facts.model import LayerSizes, ModelSizes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NF4 = 0.5625  # bytes of a weight of 4 bits with its share of the scale of its block
# per number of the matrices that are updated together: momentum, direction and update in fp32, products in bf16
MUON_BYTES = 26
CUDA_CONTEXT = 500 << 20  # of the driver and of the libraries of PyTorch, in bytes of GPU memory
# what PyTorch loads and allocates in the first step: kernels, threads, the writer of checkpoints (bytes)
CPU_LIBRARIES = 60 << 20
# of the library that computes 16-bit products on a CPU: compiled kernels and reordered matrices (bytes)
LIBRARIES_16_BIT = 40 << 20
# of torch.compile in the process: its modules, and what it keeps of the layers; fitted as the share below (bytes)
COMPILER = 180 << 20
POOL_HOLES = 0.03  # of the saved activations: free blocks of the memory pool of long runs
# The heap of a CPU process keeps freed memory (runner/engine/device/cpu/allocator.py), and holes between saved tensors
# are not all used again. The share
# grows with the size of the tensors; it is fitted to benchmarks/results/plan.md, not derived.
HOLES_PER_MIB = 0.022  # of the saved activations, or of those to recompute, per MiB of the largest temporary tensor
MAX_HOLES = 1.0
CHECKPOINTING_HOLES, ADAPTER_HOLES = 0.5, 0.75  # where tensors of one layer are freed between those that stay
ADAPTER_HOLES_PER_MIB = 0.2  # up to ADAPTER_HOLES
PLAIN = CpuExecution()  # of a short run
PARTS = (
    "weights", "reference model", "optimizer", "gradients", "activations", "logits and loss", "workspace", "attention buffers", "allocator", "checkpoint copy", "compiler",
    "process and data",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the largest moment, per rank."""

    moment: str
    parts: Mapping[str, int]  # those of PARTS that are not 0
    device: str  # cpu or cuda

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def computation(cfg: Config, facts: ModelSizes, device: str, cpu: CpuExecution = PLAIN) -> Computation:
    width, on_cpu = DTYPE_BYTES[PRECISIONS[cfg.precision.name].dtype], device == "cpu"
    kernels = (
        on_cpu and cpu.is_compiled,
        on_cpu and cpu.attention == FUSED,
        on_cpu and width < FP32 and cpu.is_upcast is not False,
    )
    return Computation(
        width,
        on_cpu,
        cfg.train.activation_checkpointing,
        cfg.stage.lora is None,
        facts.adapted,
        facts.adapter_rank,
        *kernels,
    )


def estimate_memory(
    cfg: Config,
    facts: ModelSizes,
    shape: BatchShape,
    steps: int,
    micro_batches: int,
    device: str,
    process: int,
    ranks: int = 1,
    cpu: CpuExecution = PLAIN,
) -> MemoryEstimate:
    """`steps`: of the run; `process`: bytes of this program with its data before the model is created, on a CPU;
    `device`: cpu or cuda; `cpu`: how it computes.

    Where the kernels of attention or of 16-bit products are not known, those are counted which need more.
    """
    how = computation(cfg, facts, device, cpu)
    shards = ranks if cfg.distributed.name == "fsdp" else 1
    held = {
        "weights": (FP32 * (facts.parameters - facts.quantized) + round(NF4 * facts.quantized)) // shards,
        "reference model": FP32 * facts.reference // shards,
        "optimizer": FP32 * facts.optimizer_numbers(cfg.optimizer) // shards,
        "process and data": process + CPU_LIBRARIES + LIBRARIES_16_BIT * (how.width < FP32)
        if device == "cpu"
        else CUDA_CONTEXT,
        "compiler": COMPILER * how.is_compiled,
        "attention buffers": attention_buffers(facts, shape.tokens, how.width, cpu) if how.on_cpu else 0,
    }
    # ddp: they are views of its buckets
    keeps_gradients = micro_batches > 1 or (cfg.distributed.name == "ddp" and ranks > 1)
    moments = {
        name: held | parts
        for name, parts in _moments(cfg, facts, shape, keeps_gradients, how, shards, cpu.has_pool, cpu.is_long).items()
    }
    if how.on_cpu:
        copies = {"checkpoint copy": _save_copies(cfg, facts, steps)}
        if 0 < cfg.train.save_every < steps:  # the next step begins while the copies are written
            moments = {f"{name}, while a checkpoint is written": parts | copies for name, parts in moments.items()}
        moments["save"] = held | copies
        if cfg.train.save_every and cfg.evaluates:  # of the saved step, at once
            moments["evaluation, while a checkpoint is written"] = held | copies | _evaluation(facts, shape, how)
    if cfg.init_from != "scratch":
        loaded = FP32 * facts.parameters
        moments["while the weights are loaded"] = held | {"optimizer": 0, "workspace": loaded if device == "cpu" else 0}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryEstimate(moment, {part: moments[moment][part] for part in PARTS if moments[moment].get(part)}, device)


def _moments(
    cfg: Config,
    facts: ModelSizes,
    shape: BatchShape,
    keeps_gradients: bool,
    how: Computation,
    shards: int,
    has_pool: bool,
    is_long: bool,
) -> dict[str, dict[str, int]]:
    """Return moment of a step -> part -> bytes, of what is not there all the time.

    `keeps_gradients`: they are there before the backward pass.
    """
    layer, all_gradients = facts.layer, FP32 * facts.trained // shards
    before = all_gradients if keeps_gradients else 0
    head = facts.vocab * layer.hidden * FP32 if _trains_head(how) else 0
    activations = layer.layers * saved_per_layer(layer, shape, how) + _outside_layers(facts, shape, how)
    of_loss, saved_by_loss = _loss_bytes(cfg, facts, shape, how)
    one_layer = layer_workspace(layer, shape, how)
    # a long run may choose to update several together
    updated = max(facts.largest_matrix, min(facts.trained, BATCH_NUMBERS * is_long))
    forward = {
        "gradients": before,
        "activations": activations,
        "allocator": _unused_memory(layer, shape, how, has_pool),
    }
    moments = {
        "loss": forward | {"logits and loss": of_loss},
        "backward pass of the last layer": forward | {"logits and loss": head + saved_by_loss, "workspace": one_layer},
        "backward pass of the first layer": {
            "gradients": all_gradients,
            "activations": saved_per_layer(layer, shape, how),
            "workspace": one_layer + (head if keeps_gradients else 0),
        },
        "backward pass of the embedding": {"gradients": all_gradients, "workspace": 2 * head},
        "update of the weights": {
            "gradients": all_gradients,
            "workspace": MUON_BYTES * updated if cfg.optimizer.name == "muon" else 0,
        },
    }
    return moments


def _save_copies(cfg: Config, facts: ModelSizes, steps: int) -> int:
    """Return the bytes of a checkpoint in host memory, and of the best weights that may still be written when it is
    copied.

    The best weights have a copy of their own if the step of their evaluation is not saved; otherwise they are those of
    its checkpoint.
    """
    train, checkpoint = cfg.train, FP32 * (facts.trained + facts.optimizer_numbers(cfg.optimizer))
    if train.save_every:
        is_apart = cfg.evaluates and train.eval_every < steps and train.eval_every % train.save_every != 0
    else:
        is_apart = cfg.evaluates or train.final_eval_rows > 0
    return checkpoint + FP32 * facts.trained * is_apart


def _evaluation(facts: ModelSizes, shape: BatchShape, how: Computation) -> dict[str, int]:
    """Return part -> bytes of a forward pass that saves nothing: one layer at a time, then a chunk of logits."""
    layer, plain = facts.layer, dataclasses.replace(how, checkpointing="none")
    return {
        "activations": saved_per_layer(layer, shape, plain) + _outside_layers(facts, shape, how),
        "logits and loss": _logits_bytes(facts, shape, how),
    }


def _unused_memory(layer: LayerSizes, shape: BatchShape, how: Computation, has_pool: bool) -> int:
    """Return the bytes of the holes among the tensors, in the heap of glibc or in the memory pool."""
    if not how.on_cpu:
        return 0
    largest = shape.numbers * layer.mlp * how.width * layer.experts_per_token // max(1, layer.experts)
    saved = saved_per_layer(layer, shape, how)
    # by activation checkpointing
    freed = saved_per_layer(layer, shape, dataclasses.replace(how, checkpointing="none")) - saved
    share = min(MAX_HOLES, HOLES_PER_MIB * largest / 2**20)
    if has_pool:
        share = POOL_HOLES
    elif not how.trains_all:
        share = min(ADAPTER_HOLES, ADAPTER_HOLES_PER_MIB * largest / 2**20)
    elif how.checkpointing != "none":
        share = CHECKPOINTING_HOLES
    return round(layer.layers * max(saved, freed) * share)


def _trains_head(how: Computation) -> bool:
    return how.trains_all or "lm_head" in how.adapted


def _outside_layers(facts: ModelSizes, shape: BatchShape, how: Computation) -> int:
    """Return the bytes of activations of the last norm, and of the mask of packed rows."""
    D, n = facts.layer.hidden, shape.numbers
    mask = n * shape.tokens if shape.is_packed and how.on_cpu else 0
    return n * D * FP32 * (1 + how.trains_all) + mask


def _loss_bytes(cfg: Config, facts: ModelSizes, shape: BatchShape, how: Computation) -> tuple[int, int]:
    """Return (bytes while the loss and its gradients are computed in chunks of tokens, bytes that stay until the
    backward pass).
    """
    D, V, n, c = facts.layer.hidden, facts.vocab, shape.numbers, how.width
    logits = _logits_bytes(facts, shape, how)
    # the gradient of the output layer, and the part of a chunk
    trained = V * D * (FP32 + c) if _trains_head(how) else 0
    inputs = 2 * n * D * c
    if cfg.stage.needs_reference:  # each token has a weight of its own: logits are computed again in the backward pass
        return logits + trained + inputs, n * D * c
    return logits + trained + inputs, n * D * c + (V * D * FP32 if _trains_head(how) else 0)


def _logits_bytes(facts: ModelSizes, shape: BatchShape, how: Computation) -> int:
    """Return the bytes of a chunk of logits, and of the output layer rounded to 16 bits."""
    from models.layers.chunked_loss import LOGITS_PER_CHUNK, tokens_per_chunk

    V, c, device = facts.vocab, how.width, "cpu" if how.on_cpu else "cuda"
    chunk = min(shape.numbers, tokens_per_chunk(V, device)) * V
    block = min(chunk, LOGITS_PER_CHUNK[device])  # of its rows, in fp32
    return chunk * FP32 if c == FP32 else block * (FP32 + c) + chunk * c + V * facts.layer.hidden * c
