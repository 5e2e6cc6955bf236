"""How a CPU will compute a run: long runs are compiled, take large tensors from a memory pool, and compute products and
attention as was fastest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data.types import sequences_per_row
from runner.engine.choices.compile_choice import COMPILED, LAYERS_FACT, UNCOMPILED
from runner.engine.choices.layer_choices import DEFAULT_KERNEL, FUSED, AttentionShape, attention_choice
from runner.engine.choices.measured_choice import KernelChoice, cached_kernel
from runner.engine.choices.product_choice import MIN_RUN_FLOPS, NATIVE, product_choice
from runner.engine.config import Config
from runner.engine.device.compile import CompileDecision, has_cpp_compiler, resolve_compile_mode, set_inductor_cache
from runner.engine.device.cpu.allocator import why_no_memory_pool
from runner.engine.device.cpu.threads import THREAD_VARIABLES, cpu_limit, threads_per_rank
from runner.engine.device.precision import PRECISIONS
from runner.planning.facts.data import DataFacts
from runner.planning.facts.model import ModelSizes


@dataclass(frozen=True)
class CpuExecution:
    is_compiled: bool = False
    has_pool: bool = False  # memory_pool.cpp
    attention: str | None = DEFAULT_KERNEL  # kernel; None: this machine has not measured yet which one is the fastest
    threads: int = 1
    is_long: bool = False  # long enough to choose kernels by measuring
    # products in 16 bits are computed in fp32; None: this machine has not measured yet whether that is faster
    is_upcast: bool | None = False


def cpu_execution(
    cfg: Config, facts: ModelSizes, data: DataFacts, ranks: int, saved: Mapping[str, str] | None = None
) -> CpuExecution:
    """Return how each of `ranks` computes the run, by the rules of runner/engine/kernels.py.

    `saved`: `saved_kernels` of a resumed run.
    """
    import torch

    threads = planned_threads(ranks)
    tokens = (
        data.steps * data.sequences_per_step / ranks * cfg.data.max_length * sequences_per_row(cfg.stage.data_format)
    )
    decision = resolve_compile_mode(
        cfg.train.compile, 6.0 * facts.parameters * tokens, torch.device("cpu"), threads, cfg.model.has_dynamic_shapes
    )
    kernel: str | None = DEFAULT_KERNEL
    products = saved["products"] if saved else known_products(cfg, facts, ranks, threads, decision)
    is_upcast = products != NATIVE if products else None
    if (shape := planned_attention_shape(cfg, facts, data)) is not None and is_supported(shape):
        if saved is not None:
            kernel = saved["attention"]
        elif decision.is_long_run:
            kernel = known_choice(attention_choice(shape, lambda kernel: None), ranks, threads, products or NATIVE)
    has_pool = decision.is_long_run and has_cpp_compiler() and not why_no_memory_pool()
    can_measure = (
        cfg.train.compile == "auto" and cfg.train.activation_checkpointing == "none" and cfg.distributed.name != "fsdp"
    )
    is_compiled = decision.mode != "off" and not (saved and can_measure and saved[LAYERS_FACT] == UNCOMPILED)
    return CpuExecution(is_compiled, has_pool, kernel, threads, decision.is_long_run, is_upcast)


def known_products(cfg: Config, facts: ModelSizes, ranks: int, threads: int, decision: CompileDecision) -> str | None:
    """Return how a run or a trial on this machine has found products of 16-bit matrices to be fastest; None if this run
    will measure it.
    """
    from runner.engine.kernels import product_shape

    shape = product_shape(cfg, facts.main_linear, PRECISIONS[cfg.precision.name].dtype)
    if shape is None or not (decision.is_long_run or decision.planned_flops >= MIN_RUN_FLOPS):
        return NATIVE
    choice = product_choice(shape)
    return known_choice(choice if decision.is_long_run else choice.for_short_runs(), ranks, threads, NATIVE)


def planned_attention_shape(cfg: Config, facts: ModelSizes, data: DataFacts) -> AttentionShape | None:
    """Return what a layer computes in a micro-batch; None if other kernels than those that are measured compute it."""
    if facts.attention_sizes is None:
        return None
    packed = data.shape.is_packed
    rows = cfg.train.batch_size * (1 if packed else sequences_per_row(cfg.stage.data_format))
    documents = round(data.rows / data.sequences) if packed else 1
    return AttentionShape(
        rows, cfg.data.max_length, documents, *facts.attention_sizes, PRECISIONS[cfg.precision.name].dtype
    )


def is_supported(shape: AttentionShape) -> bool:
    """Return whether the fused kernel can be the fastest: this machine can compile it, and it computes such heads."""
    import torch

    from models.layers.cpu_kernels.fused_attention import supports
    from models.layers.cpu_kernels.library import is_supported_machine

    return has_cpp_compiler() and is_supported_machine() and supports(getattr(torch, shape.dtype), shape.head_width)


def planned_threads(ranks: int) -> int:
    """Return the threads of each rank, by the rules of the launcher and of runner/engine/device/cpu/threads.py, without
    other trainings on this machine.
    """
    import torch

    if ranks > 1:
        return int(threads_per_rank(ranks))
    threads, limit = torch.get_num_threads(), cpu_limit()
    is_given = any(name in os.environ for name in THREAD_VARIABLES)
    return threads if limit is None or is_given else max(1, min(threads, int(limit)))


def known_choice(choice: KernelChoice, ranks: int, threads: int, products: str) -> str | None:
    """Return the kernel that a run or a trial on this machine has measured as the fastest; None if none has."""
    from runner.engine.kernels import measured_facts

    return cached_kernel(choice, set_inductor_cache(), measured_facts(ranks, threads, products))


def saved_kernels(run_dir: Path | None) -> dict[str, str] | None:
    """Return the kernels of attention and products of the newest checkpoint, and whether layers are compiled, which a
    resumed run repeats; None without one.
    """
    from runner.checkpoint.compatibility import recorded_environment
    from runner.checkpoint.format import read_newest_state

    state = read_newest_state(run_dir) if run_dir is not None else None
    if state is None:
        return None
    environment = recorded_environment(state["compatibility"])
    return {
        name: str(environment.get(name, default))
        for name, default in (("attention", DEFAULT_KERNEL), ("products", NATIVE), (LAYERS_FACT, COMPILED))
    }


def attention_buffers(facts: ModelSizes, tokens: int, width: int, cpu: CpuExecution) -> int:
    """Return the bytes that the fused kernel keeps in its threads for a document of `tokens` (attention.cpp): keys,
    values, and in the backward pass all scores.

    `width`: bytes of a number; operands of upcast products are fp32, and where it is not known whether they are upcast.
    A thread computes one document of one key head at a time, and its buffers stay until it ends.
    """
    if cpu.attention != FUSED or facts.attention_sizes is None:
        return 0
    heads, key_heads, head_width = facts.attention_sizes
    width = width if cpu.is_upcast is False else 4
    shared = heads // key_heads
    rows = shared * max(16, min(64, 128 // shared // 16 * 16))  # of a block of queries
    keys = -(-tokens // 64) * 64
    return cpu.threads * keys * (2 * rows * 4 + head_width * (5 * width + 2 * 4))
