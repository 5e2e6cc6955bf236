"""Facts that a plan is computed from: sizes of the model, what its data amounts to, and what this machine has."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.limits import MEMINFO, machine_memory, peak_resident_bytes, proc_bytes
from common.paths import outputs_dir
from models.config import ModelConfig
from models.families.decoder import DecoderConfig
from runner.engine.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from data.batching.batch import Batch
    from data.batching.loader import StepLoader
    from data.tokenize.tokenizer import Tokenizer
    from runner.engine.data_pipeline import DataPipeline

# numbers of state per number of (hidden matrices, other parameters)
OPTIMIZER_NUMBERS = {"adamw": (2, 2), "muon": (1, 2)}
SAMPLED_STEPS = 32  # whose padding is measured
SAMPLED_SEQUENCES = 256  # packed sequences among which the longest are searched
SEARCHED_STEPS = 5000  # whose micro-batches are compared; a longer run is taken to meet the longest sequences together


@dataclass(frozen=True)
class LayerSizes:
    """Widths of a decoder layer (numbers per token)."""

    layers: int
    hidden: int  # D
    heads: int  # N
    queries: int  # N * H
    keys: int  # K * H, of keys and of values
    mlp: int  # F, of a dense MLP or of one expert
    experts: int  # E; 0: dense
    experts_per_token: int  # k; 1 for a dense model
    qk_norm: bool
    is_exact: bool  # False: of a family with layers of its own, which the formula only approximates


@dataclass(frozen=True)
class ModelSizes:
    parameters: int  # numbers; a tied weight counts once
    trained: int
    active: int  # that a token passes through; differs from `parameters` for a mixture of experts
    matrices: int  # trained numbers in hidden matrices
    largest_matrix: int  # numbers
    quantized: int  # numbers of frozen matrices that have 4 bits each
    reference: int  # numbers of the frozen copy that a preference stage compares with; 0: none
    adapter_numbers: int  # per token, in the adapters of a layer; 0: all weights are trained
    vocab: int  # V
    layer: LayerSizes
    optimizer_known: bool  # False: the state of this optimizer is taken to be that of AdamW

    def optimizer_numbers(self, cfg: Config) -> int:
        """Return the numbers of the optimizer's state and of the average of the weights."""
        of_matrices, of_others = (
            numbers + bool(cfg.train.ema_decay) for numbers in OPTIMIZER_NUMBERS.get(cfg.optimizer.name, (2, 2))
        )
        return of_matrices * self.matrices + of_others * (self.trained - self.matrices)


def model_facts(cfg: Config) -> ModelSizes:
    """Raises UserError as training would, e.g. for weights that do not fit into the memory of this machine."""
    import torch

    from models.language_model import create_model, freeze, trained_parameters
    from runner.engine.objectives.config import prepare_stage

    with torch.device("meta"):
        model = create_model(cfg.model)
        objective = prepare_stage(cfg.stage, model, cfg.init_from)
        freeze(model, cfg.train.freeze)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    hidden_matrices = {
        name
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
    }
    trained = trained_parameters(model)
    matrices = [sizes[name] for name in hidden_matrices & trained.keys()]
    layer, lora = layer_sizes(cfg.model), cfg.stage.lora
    inactive = 1 - layer.experts_per_token / layer.experts if layer.experts else 0
    adapted = {name.split(".lora.")[0].rsplit(".", 1)[-1] for name in sizes if ".lora." in name}
    return ModelSizes(
        parameters=sum(sizes.values()),
        trained=sum(p.numel() for p in trained.values()),
        active=sum(sizes.values()) - round(inactive * sum(sizes[name] for name in sizes if ".experts." in name)),
        matrices=sum(matrices),
        largest_matrix=max(matrices, default=0),
        quantized=sum(sizes[name] for name in hidden_matrices - trained.keys()) if lora and lora.quantize else 0,
        reference=sum(p.numel() for extra in objective.extra_models for p in extra.parameters()),
        adapter_numbers=len(adapted) * lora.rank if lora else 0,
        vocab=cfg.model.vocab_size,
        layer=layer,
        optimizer_known=cfg.optimizer.name in OPTIMIZER_NUMBERS,
    )


def layer_sizes(model: ModelConfig) -> LayerSizes:
    is_decoder = isinstance(model, DecoderConfig)
    fields = vars(model) if is_decoder else model.to_hf_config()
    text = fields.get("text_config")  # of a multimodal model
    fields = fields | text if isinstance(text, dict) else fields

    def first(*names: str, default: int = 1) -> int:
        """Return the first positive number: families of transformers have names of their own."""
        values = (fields.get(name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), default)

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head")
    head_width = first("head_dim", default=hidden // heads)
    experts = first("num_experts", "num_local_experts", "n_routed_experts", default=0)
    per_token = first("num_experts_per_tok", "moe_topk", "num_experts_per_token")
    of_experts = ("moe_intermediate_size",) if experts else ()
    return LayerSizes(
        layers=model.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        queries=heads * head_width,
        keys=first("num_key_value_heads", default=heads) * head_width,
        mlp=first(*of_experts, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        experts=experts,
        experts_per_token=per_token if experts else 1,
        qk_norm=bool(fields.get("qk_norm", True)),
        is_exact=is_decoder,
    )


@dataclass(frozen=True)
class BatchShape:
    """The largest micro-batch."""

    rows: int  # R: a preference pair has two
    tokens: int  # T
    is_packed: bool

    @property
    def numbers(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class DataFacts:
    rows: int  # per epoch
    sequences: int  # per epoch: packed sequences, or rows
    tokens: int  # input tokens per epoch, without padding
    loss_tokens: int  # tokens with loss in the files
    held_out: int
    steps_per_epoch: int
    steps: int  # of the whole run
    micro_batches: int  # per step on each rank
    sequences_per_step: int  # over all ranks
    eval_batches: int
    shape: BatchShape
    padding: float  # tokens of a usual micro-batch / those of the largest
    lost_share: float  # of the tokens with loss
    lost_tokens: int
    keeping_length: int  # data.max_length that keeps 99 % of the tokens with loss
    warnings: tuple[str, ...]

    @property
    def epochs(self) -> float:
        return self.steps / max(1, self.steps_per_epoch)

    @property
    def run_tokens(self) -> int:
        """Input tokens of the run."""
        return (
            round(self.tokens * self.steps * self.sequences_per_step / max(1, self.sequences))
            if self.steps % self.steps_per_epoch
            else self.tokens * (self.steps // self.steps_per_epoch)
        )


def data_facts(cfg: Config, pipeline: DataPipeline, tokenizer: Tokenizer, ranks: int) -> DataFacts:
    from data.batching.packing import PackedSequences
    from data.tokenize.block import measure_truncation
    from runner.engine.data_pipeline import build_loader

    sequences = pipeline.train
    per_step = cfg.train.batch_size * cfg.train.accumulation_steps * ranks
    loader = build_loader(sequences, cfg, tokenizer, per_step, 0, ranks)
    stores = {id(part.store): part.store for part in getattr(sequences.rows, "sources", ())}
    cut = measure_truncation((store.stats for store in stores.values()), cfg.data.max_length)
    steps = cfg.train.total_steps(loader.steps_per_epoch)
    batch = longest_batch(loader, steps)
    rows, length = batch.input_ids.shape
    if isinstance(sequences, PackedSequences):
        tokens, padding = sequences.num_tokens, 1.0
    else:
        lengths = sequences.rows.lengths(0, len(sequences))
        tokens, padding = int(lengths.sum()), _usual_share(loader, steps)
    return DataFacts(
        rows=len(sequences.rows),
        sequences=len(sequences),
        tokens=tokens,
        loss_tokens=cut.total - cut.lost,
        held_out=pipeline.held_out,
        steps_per_epoch=loader.steps_per_epoch,
        steps=steps,
        micro_batches=math.ceil(min(per_step, len(sequences)) / (ranks * cfg.train.batch_size)),
        sequences_per_step=min(per_step, len(sequences)),
        eval_batches=sum(math.ceil(len(rows) / (cfg.train.batch_size * ranks)) for rows in pipeline.val.values()),
        shape=BatchShape(rows, length, is_packed=batch.document_ids is not None),
        padding=padding,
        lost_share=cut.share,
        lost_tokens=cut.lost,
        keeping_length=cut.limit,
        warnings=tuple(pipeline.warnings),
    )


def longest_batch(loader: StepLoader, steps: int) -> Batch:
    """Return the largest micro-batch of the first `steps` steps; where these are many, that of the longest sequences of
    the data.
    """
    import numpy as np

    from data.batching.packing import PackedSequences

    sequences, count = loader.sequences, min(loader.batch_size, len(loader.sequences))
    if isinstance(sequences, PackedSequences):
        candidates = [sequences[i] for i in range(min(len(sequences), max(SAMPLED_SEQUENCES, count)))]
        return loader.collate(
            sorted(candidates, key=lambda rows: -sum(len(part.ids) for row in rows for part in row.sequences))[:count]
        )
    lengths = sequences.rows.lengths(0, len(sequences))
    if steps > SEARCHED_STEPS:
        largest = np.argpartition(lengths, len(lengths) - count)[-count:]
    else:
        largest = max(_micro_batches(loader, range(steps)), key=lambda rows: _padded_tokens(lengths[rows]))
    return loader.collate([sequences[int(i)] for i in largest])


def _micro_batches(loader: StepLoader, steps: range) -> Iterator[np.ndarray]:
    """Yield the numbers of the rows in each micro-batch of these steps."""
    for step in steps:
        rows = loader.sampler.indices(*divmod(step, loader.steps_per_epoch))[loader.rank :: loader.world_size]
        yield from (rows[start : start + loader.batch_size] for start in range(0, len(rows), loader.batch_size))


def _padded_tokens(lengths: np.ndarray) -> int:
    return int(lengths.max()) * len(lengths)


def _usual_share(loader: StepLoader, steps: int) -> float:
    """Return the mean of the padded tokens in the micro-batches of some steps, as a share of the largest of them."""
    lengths, steps = loader.sequences.rows.lengths(0, len(loader.sequences)), min(steps, loader.steps_per_epoch)
    sampled = _micro_batches(loader, range(0, steps, max(1, steps // SAMPLED_STEPS)))
    sizes = [_padded_tokens(lengths[rows]) for rows in sampled]
    return sum(sizes) / len(sizes) / max(sizes)


@dataclass(frozen=True)
class Machine:
    device: str  # cpu or cuda
    device_name: str
    memory: int  # bytes of the device, or of the machine, its container or ulimit
    available: int  # bytes that other programs leave now
    free_disk: int  # bytes where outputs/ is


def this_machine(device: str) -> Machine:
    """`device`: as in the setting."""
    import torch

    outputs = outputs_dir()
    existing = next(folder for folder in (outputs, *outputs.parents) if folder.exists())
    free_disk = shutil.disk_usage(existing).free
    if device == "cpu" or not torch.cuda.is_available():
        memory = machine_memory()
        # what the system can give to programs without ending others; on other systems than Linux all memory
        available = min(memory, proc_bytes(MEMINFO, "MemAvailable") or memory)
        return Machine("cpu", f"CPU, {torch.get_num_threads()} threads", memory, available, free_disk)
    number = int(device.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(number)
    return Machine("cuda", torch.cuda.get_device_name(number), total, free, free_disk)


def resident_bytes() -> int:
    """Return the memory of this process now, its peak where the system does not tell."""
    return proc_bytes(Path("/proc/self/status"), "VmRSS") or peak_resident_bytes()
