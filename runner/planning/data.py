"""What the data of a run amounts to: rows, tokens, steps, the longest micro-batch, and what data.max_length costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.engine.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from data.batching.batch import Batch
    from data.batching.loader import StepLoader
    from data.tokenize.tokenizer import Tokenizer
    from runner.engine.data_pipeline import DataPipeline

SAMPLED_STEPS = 32  # whose padding is measured
SAMPLED_SEQUENCES = 256  # packed sequences among which the longest are searched
LENGTHS_PER_BATCH = 1 << 16  # rows
SEARCHED_STEPS = 5000  # whose micro-batches are compared; a longer run is taken to meet the longest sequences together


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
    from data.store.writer import measure_truncation
    from runner.engine.data_pipeline import build_loader

    sequences = pipeline.train
    per_step = cfg.train.batch_size * cfg.train.accumulation_steps * ranks
    loader = build_loader(sequences, cfg, tokenizer, per_step, 0, ranks)
    stores = {id(part.store): part.store for part in getattr(sequences.rows, "sources", ())}
    cut = measure_truncation((store.stats for store in stores.values()), cfg.data.max_length)
    steps = cfg.train.max_steps or cfg.train.epochs * loader.steps_per_epoch
    batch = longest_batch(loader, steps)
    rows, length = batch.input_ids.shape
    if isinstance(sequences, PackedSequences):
        tokens, padding = round(sequences.fill_ratio * len(sequences) * sequences.capacity), 1.0
    else:
        tokens, padding = int(_lengths(loader).sum()), _usual_share(loader, steps)
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
        eval_batches=math.ceil(len(pipeline.val) / (cfg.train.batch_size * ranks)) if pipeline.val else 0,
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
    lengths = _lengths(loader)
    if steps > SEARCHED_STEPS:
        largest = np.argpartition(lengths, len(lengths) - count)[-count:]
    else:
        largest = max(_micro_batches(loader, range(steps)), key=lambda rows: _padded_tokens(lengths[rows]))
    return loader.collate([sequences[int(i)] for i in largest])


def _lengths(loader: StepLoader) -> np.ndarray:
    import numpy as np

    rows = loader.sequences.rows
    starts = range(0, len(rows), LENGTHS_PER_BATCH)
    return np.concatenate([rows.lengths(start, min(start + LENGTHS_PER_BATCH, len(rows))) for start in starts])


def _micro_batches(loader: StepLoader, steps: range) -> Iterator[np.ndarray]:
    """Yield the numbers of the rows in each micro-batch of these steps."""
    for step in steps:
        rows = loader.sampler.indices(*divmod(step, loader.steps_per_epoch))[loader.rank :: loader.world_size]
        yield from (rows[start : start + loader.batch_size] for start in range(0, len(rows), loader.batch_size))


def _padded_tokens(lengths: np.ndarray) -> int:
    return int(lengths.max()) * len(lengths)


def _usual_share(loader: StepLoader, steps: int) -> float:
    """Return the mean of the padded tokens in the micro-batches of some steps, as a share of the largest of them."""
    lengths, steps = _lengths(loader), min(steps, loader.steps_per_epoch)
    sampled = _micro_batches(loader, range(0, steps, max(1, steps // SAMPLED_STEPS)))
    sizes = [_padded_tokens(lengths[rows]) for rows in sampled]
    return sum(sizes) / len(sizes) / max(sizes)
