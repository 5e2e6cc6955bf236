"""What a run computes with: compiled layers or not, and the kernels of the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from data.batching.loader import StepLoader
from data.types import sequences_per_row
from models.language_model import LanguageModel, count_parameters
from models.layers import attention, chunked_loss
from runner.checkpoint.compatibility import (
    code_fingerprint,
    compiler_version,
    cpu_model,
    environment_facts,
    recorded_environment,
)
from runner.engine.config import Config
from runner.engine.device.compile import (
    CompileDecision,
    resolve_compile_mode,
    set_inductor_cache,
    tag_compiled_programs,
)
from runner.engine.device.cpu import use_memory_pool
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.precision import Precision
from runner.engine.device.signals import StopRequests, do_unless_stopped
from runner.engine.kernel_choice import (
    KernelChoice,
    agree_on_kernel,
    are_16_bits_fast,
    attention_choice,
    best_kernel,
    kernel_of_checkpoint,
    product_choice,
)
from runner.engine.optim.groups import OptimizerGroup
from runner.engine.optim.torch_optimizers import Muon


class RunKernels(NamedTuple):
    """What was chosen for a run."""

    facts: dict[str, str]  # choice -> kernel, of those that are not the default: facts of the environment
    reasons: dict[str, str]  # title -> text for the header of the log
    compilation: CompileDecision


def choose_run_kernels(
    cfg: Config,
    models: Sequence[LanguageModel],
    optimizers: OptimizerGroup,
    loader: StepLoader,
    precision: Precision,
    dist: DistributedContext,
    saved: dict[str, Any],
    stop: StopRequests,
) -> RunKernels:
    """Decide whether layers are compiled, then choose the kernels of a CPU. `saved`: the facts of the checkpoint to
    resume, {} if there is none.
    """
    flops, device = estimate_flops(cfg, models[0], loader), dist.device
    threads, is_packed = torch.get_num_threads(), cfg.data.packing != "none"
    decision = resolve_compile_mode(cfg.train.compile, flops, device, threads, cfg.model, is_packed)
    if decision.is_long_run and device.type == "cpu":
        use_memory_pool(set_inductor_cache())
    recorded = recorded_environment(saved) if saved else None
    # after an update, or where a rank has another processor, a resume is not exact: it computes as a new run does
    here = {"code": code_fingerprint(), "cpu_model": cpu_model()}
    if recorded and dist.any(any(recorded.get(name) != value for name, value in here.items())):
        recorded = None
    is_resumed = recorded is not None
    is_long = decision.is_long_run or is_resumed
    choices = cpu_choices(models, optimizers, precision, dist, is_long=is_long, is_resumed=is_resumed)
    return RunKernels(*choose_cpu_kernels(choices, dist, recorded, stop), decision)


def estimate_flops(cfg: Config, model: LanguageModel, loader: StepLoader) -> float:
    """Return an upper bound of the floating-point operations of the run on each rank, 6 * parameters * tokens
    (https://arxiv.org/abs/2001.08361), from settings only: every sequence counts as data.max_length tokens."""
    steps = cfg.train.total_steps(loader.steps_per_epoch)
    # an epoch may have fewer rows than a step asks for
    rows_per_step = min(loader.sampler.global_batch_size, loader.sampler.size)
    tokens = steps * rows_per_step / loader.world_size * cfg.data.max_length * sequences_per_row(cfg.stage.data_format)
    return 6.0 * tokens * count_parameters(model)


def has_one_shape(cfg: Config, device: torch.device, compile_mode: str) -> bool:
    """Return whether all micro-batches are padded to one shape, for which alone layers are compiled: packed rows on a
    GPU, except for experts, which get other numbers of documents and tokens in each batch.
    """
    is_packed = cfg.data.packing != "none" and not cfg.model.has_dynamic_shapes
    return device.type == "cuda" and compile_mode != "off" and is_packed


def compile_model(model: LanguageModel, cfg: Config, mode: str) -> None:
    set_inductor_cache()
    tag_compiled_programs(code_fingerprint())
    device = next(model.parameters()).device
    is_static = has_one_shape(cfg, device, mode)
    if is_static:  # programs of earlier runs of this process count for the limit of recompilations
        torch._dynamo.reset()
    model.compile_layers(single_row=micro_batch_rows(cfg) == 1, mode=mode, **({"dynamic": False} if is_static else {}))
    chunked_loss.compile_blocks(device.type, dynamic=not is_static)


def wrap_model(
    model: LanguageModel, cfg: Config, dist: DistributedContext, precision: Precision, compile_mode: str
) -> nn.Module:
    """Compile the layers and wrap the model for DDP, as far as the settings ask for it."""
    if compile_mode != "off":
        compile_model(model, cfg, compile_mode)
    with precision.autocast():
        return dist.wrap(model)


def kernel_facts(model: LanguageModel, device: torch.device, chosen: RunKernels) -> dict[str, Any]:
    """Return the facts about the kernels that compute the model, for the environment that a resume compares."""
    is_cpu = device.type == "cpu"
    # of this run: with train.compile=auto a resumed one may be longer, or have no compiler
    mode = chosen.compilation.mode
    facts = {
        "compiled": mode,
        "logits_per_chunk": chunked_loss.LOGITS_PER_CHUNK["cuda" if device.type == "cuda" else "cpu"],
        **({"saved_attention_probs": attention.MAX_SAVED_PROBS} if is_cpu else {}),
        **({"compiler": compiler_version()} if is_cpu and mode != "off" else {}),
        **({"model_kernels": model.kernels_description} if model.kernels_description else {}),
    }
    return environment_facts(facts | chosen.facts)


def choose_cpu_kernels(
    choices: Iterable[KernelChoice],
    dist: DistributedContext,
    recorded: Mapping[str, Any] | None,
    stop: StopRequests,
) -> tuple[dict[str, str], dict[str, str]]:
    """Make the `choices` of a run, the same on all ranks: those `recorded` in its checkpoint if it repeats them. Return
    the facts and the reasons of `RunKernels`.

    Raises StopRequested if some rank is asked to stop.
    """
    facts, reasons = {}, {}
    for choice in choices:
        choose = best_kernel if recorded is None else partial(kernel_of_checkpoint, saved=recorded.get(choice.fact))
        mine = do_unless_stopped(dist, stop, partial(choose, choice))
        chosen = agree_on_kernel(choice, dist.gather(list(mine)))
        choice.apply(chosen.kernel)
        if chosen.kernel != choice.default:
            facts[choice.fact] = chosen.kernel
        if chosen.reason:
            reasons[choice.fact] = chosen.reason
    return facts, reasons


def cpu_choices(
    models: Sequence[LanguageModel],
    optimizers: OptimizerGroup,
    precision: Precision,
    dist: DistributedContext,
    *,
    is_long: bool,
    is_resumed: bool,
) -> Iterator[KernelChoice]:
    """Yield the choices of a run on the CPU.

    `models`: the trained one first, then those that the objective reads.
    """
    if precision.device.type != "cpu":
        return
    muons = [part for part in optimizers.parts if isinstance(part, Muon)]
    is_16_bit = precision.dtype != torch.float32
    if is_16_bit or muons:
        dtype = precision.dtype if is_16_bit else torch.bfloat16
        # one slow processor decides for all ranks, whose processors may differ
        if dist.any(not are_16_bits_fast(dtype)) or is_resumed:
            yield product_choice(precision.dtype, muons, has_kernel=is_long)
    if is_long and models[0].attention_sizes:
        yield attention_choice(precision.dtype, models[0].attention_sizes[-1], models)


def micro_batch_rows(cfg: Config) -> int:
    """Return the rows of a micro-batch as the model gets them: a row of preferences has two sequences, unless it is
    packed.
    """
    return cfg.train.batch_size * (1 if cfg.data.packing != "none" else sequences_per_row(cfg.stage.data_format))
