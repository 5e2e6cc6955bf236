"""Memory of a training process by part, at the moment when it needs most.

The formula counts the tensors that autograd keeps in models/layers/. Letters are those of `LayerSizes`; n = R * T tokens
of the micro-batch, c bytes of a number of the computation (4 in fp32, 2 in bf16 and fp16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from data.types import sequences_per_row
from runner.engine.config import Config
from runner.engine.device.compile import cpp_compiler, resolve_compile_mode
from runner.engine.device.cpu import threads_per_rank, why_no_memory_pool
from runner.engine.device.precision import PRECISIONS
from runner.planning.facts import BatchShape, DataFacts, LayerSizes, Machine, ModelSizes

FP32 = 4
NF4 = 0.5625  # bytes of a weight of 4 bits with its share of the scale of its block
# per number of the matrices that are updated together: momentum, direction and update in fp32, products in bf16, or in
# fp32 on a CPU
MUON_BYTES, MUON_BYTES_CPU = 26, 44
CUDA_CONTEXT = 500 << 20  # of the driver and of the libraries of PyTorch, in bytes of GPU memory
# what PyTorch loads and allocates in the first step: kernels, threads, the writer of checkpoints (bytes)
CPU_LIBRARIES = 60 << 20
# of the library that computes 16-bit products on a CPU: compiled kernels and reordered matrices (bytes)
LIBRARIES_16_BIT = 40 << 20
# of torch.compile in the process: its modules, and what it keeps of the layers; fitted as the share below (bytes)
COMPILER = 180 << 20
POOL_HOLES = 0.03  # of the saved activations: free blocks of the memory pool of long runs
# The heap of a CPU process keeps freed memory (runner/engine/device/cpu.py), and holes between saved tensors
# are not all used again. The share grows with the size of the tensors; it is fitted to benchmarks/results/plan.md, not
# derived.
HOLES_PER_MIB = 0.022  # of the saved activations, or of those to recompute, per MiB of the largest temporary tensor
MAX_HOLES = 1.0
CHECKPOINTING_HOLES, ADAPTER_HOLES = 0.5, 0.75  # where tensors of one layer are freed between those that stay
ADAPTER_HOLES_PER_MIB = 0.2  # up to ADAPTER_HOLES
PARTS = (
    "weights", "reference model", "optimizer", "gradients", "activations", "logits and loss", "workspace", "attention buffers", "allocator", "checkpoint copy", "compiler",
    "process and data",
)  # fmt: skip


@dataclass(frozen=True)
class Execution:
    """How the layers are computed. A long run on a CPU is compiled, and has a memory pool and C++ kernels."""

    on_cpu: bool
    is_compiled: bool = False
    has_pool: bool = False  # memory_pool.cpp
    has_kernels: bool = False  # they save neither probabilities nor rounded weights, nor the product of gate and up
    threads: int = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the largest moment, per rank."""

    moment: str
    parts: Mapping[str, int]  # those of PARTS that are not 0
    execution: Execution
    ranks: int  # that share the memory

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def of_device(self) -> int:
        return self.total * self.ranks


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer needs for a micro-batch."""

    layer: LayerSizes
    shape: BatchShape
    width: int  # c
    checkpointing: str  # train.activation_checkpointing
    adapters: int  # numbers per token in the adapters of a layer; 0: its weights are trained
    execution: Execution

    @property
    def is_counted_compiled(self) -> bool:
        """False: the formula counts the layer as if it was not compiled, which is more."""
        return self.execution.is_compiled and self.layer.is_exact and not self.layer.experts

    def saved(self) -> int:
        """Return the bytes that stay in memory from the forward pass of a layer until its backward pass."""
        layer, n, c = self.layer, self.shape.numbers, self.width
        D, Q, K, F = layer.hidden, layer.queries, layer.keys, layer.experts_per_token * layer.mlp
        if self.checkpointing == "full":
            return n * D * FP32
        if self.checkpointing == "selective":
            return n * (D * FP32 + 2 * (Q + K + D + F) * c) * (2 if self.adapters else 1)
        trained = not self.adapters
        if self.is_counted_compiled:
            # residual stream and inputs of products; what norms return is recomputed
            per_token = D * (FP32 + c) + 2 * (Q + K + F) * c
            return n * (per_token + self.adapters * c) + self._probs()
        has_fused_mlp = self.execution.has_kernels and layer.is_exact and trained
        per_token = 2 * D * FP32 * (1 + trained)  # inputs of both norms; normalized, for the gradients of their weights
        per_token += (2 * D + 3 * Q + 3 * K) * c  # inputs of the projections, projected, and rotated queries and keys
        per_token += (Q + K) * FP32 * (trained + (c != FP32)) if layer.qk_norm else 0
        per_token += (2 if has_fused_mlp else 3) * F * c
        if not self.execution.on_cpu and (c == FP32 or self.shape.is_packed):
            per_token += (2 * Q - K) * c  # keys and values of each query head: attention.needs_repeated_heads
        # inputs and outputs of the experts, probabilities
        per_token += 2 * layer.experts_per_token * D * c + 3 * layer.experts * FP32 if layer.experts else 0
        weights = 0  # rounded to 16 bits; those that are joined for one product are joined again in the backward pass
        if c != FP32 and not has_fused_mlp:
            is_joined, experts = trained and layer.is_exact, max(1, layer.experts)
            weights = D * (Q + experts * layer.mlp if is_joined else 2 * Q + 2 * K + 3 * experts * layer.mlp)
        return n * (per_token + self.adapters * c) + self._probs() + weights * c

    def without_checkpointing(self) -> int:
        return replace(self, checkpointing="none").saved()

    def workspace(self) -> int:
        """Return the bytes of temporary tensors at the largest moment of the backward pass of the layer.

        Where it was checkpointed, its activations are recomputed first.
        """
        layer, n, c = self.layer, self.shape.numbers, self.width
        # of the residual stream; of gate, up, both together, and a product
        gradients = n * (2 * layer.hidden * FP32 + layer.experts_per_token * 5 * layer.mlp * c)
        # the joined weights of a product, and their gradients before they are split
        weights = layer.hidden * layer.mlp * (2 * c + (0 if self.adapters else 3 * FP32))
        return gradients + weights + (self.without_checkpointing() if self.checkpointing != "none" else 0)

    def holes(self) -> int:
        """Return the bytes that are free between the tensors, in the heap of glibc or in the memory pool."""
        if not self.execution.on_cpu:
            return 0
        layer, saved = self.layer, self.saved()
        largest = self.shape.numbers * layer.mlp * self.width * layer.experts_per_token / max(1, layer.experts) / 2**20
        share = min(MAX_HOLES, HOLES_PER_MIB * largest)
        if self.execution.has_pool:
            share = POOL_HOLES
        elif self.adapters:
            share = min(ADAPTER_HOLES, ADAPTER_HOLES_PER_MIB * largest)
        elif self.checkpointing != "none":
            share = CHECKPOINTING_HOLES
        return round(max(saved, self.without_checkpointing() - saved) * share)

    def _probs(self) -> int:
        """Return the bytes of attention probabilities, which the kernel of the CPU saves up to a limit."""
        from models.layers.attention import MAX_SAVED_PROBS, QUERY_BLOCK

        R, T, heads = self.shape.rows, self.shape.tokens, self.layer.heads
        is_saved = self.execution.on_cpu and not self.execution.has_kernels and R * heads * T * T <= MAX_SAVED_PROBS
        return R * heads * T * (T + QUERY_BLOCK) // 2 * self.width if is_saved else 0

    def attention_buffers(self) -> int:
        """Return the bytes that the fused kernel keeps in its threads for a document of T tokens (attention.cpp): keys,
        values, and in the backward pass all scores.

        A thread computes one document of one key head at a time, and its buffers stay until it ends.
        """
        if not self.execution.has_kernels:
            return 0
        shared = self.layer.queries // self.layer.keys  # query heads of a key head
        rows = shared * max(16, min(64, 128 // shared // 16 * 16))  # of a block of queries
        keys = -(-self.shape.tokens // 64) * 64
        head_width = self.layer.queries // self.layer.heads
        return self.execution.threads * keys * (2 * rows * 4 + head_width * (5 * self.width + 2 * 4))


def plan_execution(cfg: Config, model: ModelSizes, data: DataFacts, machine: Machine, ranks: int) -> Execution:
    """Return how each of `ranks` on this machine computes the run, by the rules of runner/engine/kernels.py.

    A long run is counted with the kernels that it takes if this machine can build them.
    """
    if machine.device != "cpu":
        return Execution(on_cpu=False)
    import torch

    from models.layers.cpu_kernels.fused_attention import supports
    from models.layers.cpu_kernels.library import is_supported_machine

    threads = min(torch.get_num_threads(), int(threads_per_rank(ranks)))
    sequences = data.steps * data.sequences_per_step * sequences_per_row(cfg.stage.data_format)
    flops = 6.0 * model.parameters * sequences * cfg.data.max_length / (ranks * cfg.distributed.nnodes)
    is_packed = cfg.data.packing != "none"
    decision = resolve_compile_mode(cfg.train.compile, flops, torch.device("cpu"), threads, cfg.model, is_packed)
    builds_kernels = decision.is_long_run and bool(cpp_compiler())
    dtype, layer = getattr(torch, PRECISIONS[cfg.precision.name].dtype), model.layer
    return Execution(
        on_cpu=True,
        is_compiled=decision.mode != "off",
        has_pool=builds_kernels and not why_no_memory_pool(),
        has_kernels=builds_kernels and is_supported_machine() and supports(dtype, layer.queries // layer.heads),
        threads=threads,
    )


def layer_memory(cfg: Config, model: ModelSizes, shape: BatchShape, execution: Execution) -> LayerMemory:
    width = FP32 if PRECISIONS[cfg.precision.name].dtype == "float32" else FP32 // 2
    return LayerMemory(model.layer, shape, width, cfg.train.activation_checkpointing, model.adapter_numbers, execution)


def estimate_memory(
    cfg: Config, model: ModelSizes, data: DataFacts, machine: Machine, ranks: int, process: int
) -> MemoryEstimate:
    """`ranks`: on this machine; `process`: bytes of this program with its data before the model is created, on a CPU."""
    execution = plan_execution(cfg, model, data, machine, ranks)
    layer, on_cpu = layer_memory(cfg, model, data.shape, execution), execution.on_cpu
    world = ranks * cfg.distributed.nnodes
    shards = world if cfg.distributed.name == "fsdp" else 1
    libraries = CPU_LIBRARIES + (LIBRARIES_16_BIT if layer.width < FP32 else 0)
    held = {
        "weights": (FP32 * (model.parameters - model.quantized) + round(NF4 * model.quantized)) // shards,
        "reference model": FP32 * model.reference // shards,
        "optimizer": FP32 * model.optimizer_numbers(cfg) // shards,
        "process and data": process + libraries if on_cpu else CUDA_CONTEXT,
        "compiler": COMPILER if execution.is_compiled else 0,
        "attention buffers": layer.attention_buffers(),
    }
    # ddp: they are views of its buckets
    keeps_gradients = data.micro_batches > 1 or (cfg.distributed.name == "ddp" and world > 1)
    moments = _moments(cfg, model, layer, FP32 * model.trained // shards, keeps_gradients)
    if on_cpu:
        copies = {"checkpoint copy": checkpoint_copies(cfg, model, data.steps)}
        if 0 < cfg.train.save_every < data.steps:  # the next step begins while the copies are written
            moments = {f"{name}, while a checkpoint is written": parts | copies for name, parts in moments.items()}
        moments["save"] = copies
        if cfg.train.save_every and cfg.evaluates:  # of the saved step, at once: one layer at a time, then the logits
            moments["evaluation, while a checkpoint is written"] = copies | {
                "activations": layer.without_checkpointing(),
                "logits and loss": _logits_bytes(model, layer),
            }
    if cfg.init_from != "scratch":
        loaded = FP32 * model.parameters
        moments["while the weights are loaded"] = {"optimizer": 0, "workspace": loaded if on_cpu else 0}
    of_moments = {name: held | parts for name, parts in moments.items()}
    moment = max(of_moments, key=lambda name: sum(of_moments[name].values()))
    parts = {part: of_moments[moment][part] for part in PARTS if of_moments[moment].get(part)}
    return MemoryEstimate(moment, parts, execution, ranks if on_cpu else 1)


def _moments(
    cfg: Config, model: ModelSizes, layer: LayerMemory, gradients: int, keeps_gradients: bool
) -> dict[str, dict[str, int]]:
    """Return moment of a step -> part -> bytes, of what is not there all the time.

    `keeps_gradients`: they are there before the backward pass.
    """
    from models.layers.attention import fits_flex_attention

    shape, D, n, c = layer.shape, model.layer.hidden, layer.shape.numbers, layer.width
    numbers = 0 if model.adapter_numbers else model.vocab * D  # of the trained output layer
    head = FP32 * numbers
    # of stages with a reference each token has a weight of its own: logits are computed again in the backward pass
    saved_by_loss = n * D * c + (0 if cfg.stage.needs_reference else head)
    # another gradient of the output layer
    penalties = head if getattr(cfg.stage, "has_penalties", False) else 0
    # that all layers share
    mask = n * shape.tokens if shape.is_packed else 0
    if not layer.execution.on_cpu:  # what is added to scores, unless FlexAttention computes them
        head_width, dropout = model.layer.queries // model.layer.heads, getattr(cfg.model, "dropout", 0.0)
        mask *= 0 if fits_flex_attention((shape.rows, shape.tokens), dropout, head_width, False) else c
    forward = {
        "gradients": gradients if keeps_gradients else 0,
        "activations": model.layer.layers * layer.saved() + mask,
        "allocator": model.layer.layers * layer.holes(),
    }
    from runner.engine.optim.torch_optimizers import BATCH_NUMBERS

    # Muon updates matrices one by one, on a GPU several together
    updated = max(model.largest_matrix, 0 if layer.execution.on_cpu else min(model.trained, BATCH_NUMBERS))
    of_update = (
        (MUON_BYTES_CPU if layer.execution.on_cpu else MUON_BYTES) * updated if cfg.optimizer.name == "muon" else 0
    )
    return {
        # the loss and its gradients are computed in chunks of tokens
        "loss": forward
        | {"logits and loss": _logits_bytes(model, layer) + head + (numbers + 2 * n * D) * c + penalties},
        "backward pass of the last layer": forward
        | {"logits and loss": head + saved_by_loss, "workspace": layer.workspace()},
        "end of the backward pass, or update of the weights": {
            "gradients": gradients,
            "activations": layer.saved(),
            "workspace": max(layer.workspace(), 2 * head, of_update),
        },
    }


def checkpoint_copies(cfg: Config, model: ModelSizes, steps: int) -> int:
    """Return the bytes of a checkpoint in host memory, and of the best weights that may still be written when it is
    copied.

    The best weights have a copy of their own if the step of their evaluation is not saved; otherwise they are those of
    its checkpoint.
    """
    train = cfg.train
    if train.save_every:
        is_apart = cfg.evaluates and train.eval_every < steps and train.eval_every % train.save_every != 0
    else:
        is_apart = cfg.evaluates or train.final_eval_rows > 0
    return FP32 * (model.trained * (1 + is_apart) + model.optimizer_numbers(cfg))


def _logits_bytes(model: ModelSizes, layer: LayerMemory) -> int:
    """Return the bytes of a chunk of logits, and of the output layer rounded to 16 bits."""
    from models.layers.chunked_loss import tokens_per_block, tokens_per_chunk

    V, c, device = model.vocab, layer.width, "cpu" if layer.execution.on_cpu else "cuda"
    chunk = min(layer.shape.numbers, tokens_per_chunk(V, device)) * V
    block = min(chunk, tokens_per_block(V, device) * V)  # of its rows, in fp32
    return chunk * FP32 if c == FP32 else block * (FP32 + c) + chunk * c + V * model.layer.hidden * c
