"""What a run computes with: compiled layers or not, and the kernels of the CPU, where a long run takes the fastest of
those that it measures.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from common.errors import print_note
from data.batching.loader import StepLoader
from data.batching.packing import PackedSequences
from data.types import sequences_per_row
from models.language_model import LanguageModel
from models.layers import attention, chunked_loss
from runner.checkpoint.compatibility import (
    code_fingerprint,
    compiler_version,
    cpu_model,
    environment_facts,
    numeric_variables,
    recorded_environment,
)
from runner.engine.choices.compile_choice import (
    LAYERS_FACT,
    UNCOMPILED,
    compile_choice,
    compiled_layers,
    find_layer_call,
    measure_layers,
)
from runner.engine.choices.layer_choices import AttentionShape, attention_choice
from runner.engine.choices.measured_choice import (
    ChosenKernel,
    KernelChoice,
    agree_on_kernel,
    kernel_of_checkpoint,
    measured_kernel,
)
from runner.engine.choices.product_choice import (
    MIN_RUN_FLOPS,
    PRODUCT_DTYPES,
    ProductShape,
    current_products,
    product_choice,
)
from runner.engine.config import Config
from runner.engine.device.compile import (
    CompileDecision,
    resolve_compile_mode,
    set_inductor_cache,
    tag_compiled_programs,
)
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.precision import Precision
from runner.engine.device.stop import StopRequests, do_unless_stopped
from runner.engine.optim.groups import OptimizerGroup
from runner.engine.optim.orthogonalize import orthogonalization_choice
from runner.engine.optim.torch_optimizers import Muon


class ChosenKernels(NamedTuple):
    """What was chosen for a run."""

    facts: dict[str, str]  # choice -> kernel, of those that are not the default: facts of the environment
    reasons: dict[str, str]  # title -> text for the header of the log
    compilation: CompileDecision


def decide_compilation(cfg: Config, model: LanguageModel, loader: StepLoader, device: torch.device) -> CompileDecision:
    planned_flops = estimate_flops(cfg, model, loader)
    return resolve_compile_mode(
        cfg.train.compile, planned_flops, device, torch.get_num_threads(), cfg.model.has_dynamic_shapes
    )


def estimate_flops(cfg: Config, model: LanguageModel, loader: StepLoader) -> float:
    """Return an upper bound of the floating-point operations of the run on each rank, 6 * parameters * tokens
    (https://arxiv.org/abs/2001.08361), from settings only: every sequence counts as data.max_length tokens."""
    steps = cfg.train.max_steps or cfg.train.epochs * loader.steps_per_epoch
    # an epoch may have fewer rows than a step asks for
    rows_per_step = min(loader.sampler.global_batch_size, loader.sampler.size)
    tokens = steps * rows_per_step / loader.world_size * cfg.data.max_length * sequences_per_row(cfg.stage.data_format)
    return 6.0 * tokens * sum(p.numel() for p in model.parameters())


def compile_model(model: LanguageModel, cfg: Config, mode: str) -> None:
    set_inductor_cache()
    tag_compiled_programs(code_fingerprint())
    model.compile_layers(single_row=micro_batch_rows(cfg) == 1, mode=mode)


def wrap_model(
    model: LanguageModel, cfg: Config, dist: DistributedContext, precision: Precision, compile_mode: str
) -> nn.Module:
    """Compile the layers and wrap the model for DDP, as far as the settings ask for it."""
    if compile_mode != "off":
        compile_model(model, cfg, compile_mode)
    with precision.autocast():
        return dist.wrap(model)


def kernel_facts(cfg: Config, model: LanguageModel, device: torch.device, chosen: ChosenKernels) -> dict[str, Any]:
    """Return the facts about the kernels that compute the model, for the environment that a resume compares."""
    facts = describe_kernels(device, chosen.compilation.mode) | chosen.facts
    return environment_facts(
        facts | ({"model_kernels": model.kernels_description} if model.kernels_description else {})
    )


def describe_kernels(device: torch.device, compile_mode: str) -> dict[str, Any]:
    """Return fact -> value.

    `compile_mode` is that of the run: with train.compile=auto a resumed run may be longer, or have no compiler.
    """
    is_cpu = device.type == "cpu"
    return {
        "compiled": compile_mode,
        "logits_per_chunk": chunked_loss.LOGITS_PER_CHUNK["cuda" if device.type == "cuda" else "cpu"],
        **({"saved_attention_probs": attention.MAX_SAVED_PROBS} if is_cpu else {}),
        **({"compiler": compiler_version()} if is_cpu and compile_mode != "off" else {}),
    }


def choose_cpu_kernels(
    choices: Iterable[KernelChoice],
    decision: CompileDecision,
    dist: DistributedContext,
    saved: dict[str, Any] | None,
    stop: StopRequests,
) -> ChosenKernels:
    """Make the `choices` of a run, the same on all ranks: the fastest kernels if it is long enough, those of its
    checkpoint (`saved`: its state) if it has one.

    Raises StopRequested if some rank is asked to stop.
    """
    if saved is None and not decision.is_long_run and decision.planned_flops < MIN_RUN_FLOPS:
        return ChosenKernels({}, {}, decision)
    facts, reasons, compilation = {}, {}, decision
    announce = cache(_announce_measuring) if dist.is_rank_zero else lambda: None
    for choice in choices:
        mine = do_unless_stopped(
            dist, stop, "before the first step", partial(_choose, choice, decision, saved, dist.size, announce)
        )
        chosen = agree_on_kernel(choice, dist.gather(list(mine)))
        choice.apply(chosen.kernel)
        if chosen.kernel != choice.default:
            facts[choice.fact] = chosen.kernel
        if choice.fact == LAYERS_FACT:
            mode = "off" if chosen.kernel == UNCOMPILED else decision.mode
            compilation = replace(decision, mode=mode, reason=chosen.reason or decision.reason)
        elif chosen.reason:
            reasons[choice.fact.replace("_", " ")] = chosen.reason
    return ChosenKernels(facts, reasons, compilation)


def _announce_measuring() -> None:
    print_note("measuring which kernels are fastest on this machine; the times are kept for later runs")


def _choose(
    choice: KernelChoice,
    decision: CompileDecision,
    saved: dict[str, Any] | None,
    ranks: int,
    before_measuring: Callable[[], object],
) -> ChosenKernel:
    if saved is not None:
        kernel = recorded_environment(saved["compatibility"]).get(choice.fact, choice.default)
        return kernel_of_checkpoint(choice, kernel, set_inductor_cache())
    if not decision.is_long_run and not choice.in_short_runs:
        return ChosenKernel(choice.default, "", (choice.default,))
    measured = choice if decision.is_long_run else choice.for_short_runs()
    return measured_kernel(measured, set_inductor_cache(), measured_facts(ranks), before_measuring)


def measured_facts(ranks: int = 1, threads: int | None = None, products: str | None = None) -> dict[str, Any]:
    """Return what the speed of a kernel depends on besides its shapes.

    `threads`: of each rank; `products`: how 16-bit matrices are multiplied, a kernel of `product_choice`; None: as in
    this process.
    """
    return {
        "ranks": ranks,
        "code": code_fingerprint(),
        "cpu_model": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": threads or torch.get_num_threads(),
        "products": products or current_products(),
        **numeric_variables(os.environ),
    }


def cpu_choices(
    cfg: Config,
    models: Sequence[LanguageModel],
    optimizers: OptimizerGroup,
    loader: StepLoader,
    precision: Precision,
    decision: CompileDecision,
) -> Iterator[KernelChoice]:
    """Yield the choices of a run on the CPU, each when those before it are made.

    `models`: the trained one first, then those that the objective reads.
    """
    if precision.device.type != "cpu":
        return
    for find in (
        partial(_products, cfg, models[0], precision),
        partial(_attention, cfg, models, loader, precision),
        partial(_orthogonalization, optimizers),
        partial(_compilation, cfg, models[0], loader, precision, decision),
    ):
        if choice := find():
            yield choice


def _products(cfg: Config, model: LanguageModel, precision: Precision) -> KernelChoice | None:
    """Return the choice of how 16-bit matrices are multiplied; None in other precisions."""
    shape = product_shape(cfg, main_linear(model), _dtype_name(precision))
    return product_choice(shape) if shape else None


def main_linear(model: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of those linear layers that have most weights together; None without any."""
    weights: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights[module.out_features, module.in_features] += module.out_features * module.in_features
    return max(weights, key=lambda shape: weights[shape], default=None)


def product_shape(cfg: Config, linear: tuple[int, int] | None, dtype: str) -> ProductShape | None:
    """Return the products for which a run chooses; None if it has none in 16 bits. linear: of `main_linear`."""
    return (
        ProductShape(micro_batch_rows(cfg) * cfg.data.max_length, *linear, dtype)
        if linear and dtype in PRODUCT_DTYPES
        else None
    )


def _attention(
    cfg: Config, models: Sequence[LanguageModel], loader: StepLoader, precision: Precision
) -> KernelChoice | None:
    """Return the choice of the kernel of attention; None if other kernels than those of `attention_choice` compute it."""

    def apply(kernel: str) -> None:
        for model in models:
            model.use_attention_kernel(kernel)

    shape = attention_shape(cfg, models[0], loader, precision)
    return attention_choice(shape, apply) if shape else None


def attention_shape(
    cfg: Config, model: LanguageModel, loader: StepLoader, precision: Precision
) -> AttentionShape | None:
    """Return what a layer of the model computes in a micro-batch; None if other kernels than those of
    `attention_choice` compute it.
    """
    if (sizes := model.attention_sizes) is None:
        return None
    sequences = loader.sequences
    documents = round(len(sequences.rows) / len(sequences)) if isinstance(sequences, PackedSequences) else 1
    return AttentionShape(micro_batch_rows(cfg), cfg.data.max_length, documents, *sizes, _dtype_name(precision))


def _orthogonalization(optimizers: OptimizerGroup) -> KernelChoice | None:
    """Return the choice of how Muon orthogonalizes its updates; None for other optimizers."""
    parts = [part for part in optimizers.parts if isinstance(part, Muon)]
    shapes = [tuple(p.shape) for part in parts for group in part.param_groups for p in group["params"]]

    def apply(kernel: str) -> None:
        for part in parts:
            part.orthogonalization = kernel

    return orthogonalization_choice(shapes, apply) if shapes else None


def _compilation(
    cfg: Config, model: LanguageModel, loader: StepLoader, precision: Precision, decision: CompileDecision
) -> KernelChoice | None:
    """Return the choice whether layers are compiled; None where settings decide, and where a layer cannot be computed
    alone: recomputed, or shared by ranks.
    """
    if (
        cfg.train.compile != "auto"
        or decision.mode == "off"
        or cfg.train.activation_checkpointing != "none"
        or cfg.distributed.name == "fsdp"
    ):
        return None
    layers = model.compiled_layers
    if not layers:
        return None

    def forward() -> None:
        with precision.autocast():
            model(**loader.first_batch().inputs)

    if (call := find_layer_call(layers[0], forward)) is None:
        return None
    module = vars(layers[0])
    workload = {
        "settings": [
            repr(cfg.model),
            repr(cfg.stage.lora),
            cfg.data.packing,
            _dtype_name(precision),
            compiler_version(),
        ],
        "input": list(call.args[0].shape),
        "kernels": [module.get("attention_kernel"), micro_batch_rows(cfg) == 1],
        "weights": [[name, list(p.shape), p.requires_grad] for name, p in layers[0].named_parameters()],
    }
    compiled = partial(compiled_layers, partial(compile_model, model, cfg, decision.mode), model.uncompile_layers)
    return compile_choice(workload, partial(measure_layers, call, compiled, precision.autocast))


def micro_batch_rows(cfg: Config) -> int:
    """Return the rows of a micro-batch as the model gets them: a row of preferences has two sequences, unless it is
    packed.
    """
    return cfg.train.batch_size * (1 if cfg.data.packing != "none" else sequences_per_row(cfg.stage.data_format))


def _dtype_name(precision: Precision) -> str:
    return str(precision.dtype).removeprefix("torch.")
