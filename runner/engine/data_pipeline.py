"""From the section `data` to loaders: files are found and tokenised, mixed, held out, packed; and what became of every row is told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from data.config import DataConfig
from runner.engine.config import Config
from runner.engine.data_report import describe_source
from runner.tracking.progress import ProgressMeter

if TYPE_CHECKING:
    from data.batching.batch import SequenceSource
    from data.batching.loader import StepLoader
    from data.batching.mixture import WeightedSource
    from data.sources.files import Source
    from data.tokenize.block import RowStats
    from data.tokenize.tokenizer import Tokenizer
    from data.types import EncodingConfig, RowSource


@dataclass
class DataPipeline:
    """What a run is fed with."""

    train: SequenceSource
    val: SequenceSource | None
    files: list[dict[str, Any]]  # of each file what became of its rows; stands in run.json and in the log
    fingerprint: str  # of the rows that are trained on and how they lie in windows
    held_out: int  # rows


def build_data_pipeline(cfg: Config, tokenizer: Tokenizer) -> DataPipeline:
    """Raises ValueError(what, where, fix) where a row, a file or the sum of them cannot be used."""
    from data.batching.mixture import MixedRows, mix_sources

    encoding = encoding_config(cfg, tokenizer)
    found, held_out_sources = sources_of(cfg.data)
    words = [[tokenize_source(source, cfg.data, encoding, tokenizer) for source in word] for word in found]
    held_out = [tokenize_source(source, cfg.data, encoding, tokenizer) for source in held_out_sources]
    files = [describe_source(part) for word in [*words, held_out] for part in word]
    if not held_out:
        words, held_out = split_validation(words, cfg.data)
    rows = mix_sources(words, cfg.data.weights)
    train = packed_or_single(rows, cfg)
    val = MixedRows(tuple(held_out)) if held_out else None
    return DataPipeline(train, packed_or_single(val, cfg) if val else None, files, getattr(train, "fingerprint", rows.fingerprint), len(val) if val else 0)


def sources_of(data: DataConfig) -> tuple[list[list[Source]], list[Source]]:
    """(the files of each word of data.path, those of data.val_path); `auto` is X_val.jsonl beside X.jsonl."""
    from data.sources.files import resolve_sources

    words = resolve_sources(data.paths)
    if data.val_path != "auto":
        return words, resolve_sources(data.val_path)[0] if data.val_path else []
    twins = {beside for word in words for source in word if (beside := val_twin(source.path)).is_file()}
    words = [[source for source in word if source.path not in twins] for word in words]
    return words, [source for path in sorted(twins) for source in resolve_sources(str(path))[0]]


def val_twin(path: Path) -> Path:
    """X_val.jsonl.gz for X.jsonl.gz."""
    from data.sources.files import COMPRESSED

    name, packed = (path.stem, path.suffix) if path.suffix in COMPRESSED else (path.name, "")
    return path.with_name(f"{Path(name).stem}_val{Path(name).suffix}{packed}")


def encoding_config(cfg: Config, tokenizer: Tokenizer) -> EncodingConfig:
    from data.types import EncodingConfig

    data = cfg.data
    too_long = ("split" if cfg.stage.data_format == "text" else "truncate") if data.too_long == "auto" else data.too_long
    return EncodingConfig(
        data_format=cfg.stage.data_format,
        schema=data.schema or "",
        tokenizer=tokenizer.folder,
        max_length=data.max_length,
        too_long=too_long,
        loss_on=data.loss_on,
        on_bad_row=data.on_bad_row,
        system_prompts=tuple(data.system_prompts) if data.system_prob else (),
        system_prob=data.system_prob,
        empty_think_prob=data.empty_think_prob,
        seed=cfg.seed if data.system_prob or data.empty_think_prob else 0,
    )


def tokenize_source(source: Source, data: DataConfig, encoding: EncodingConfig, tokenizer: Tokenizer) -> WeightedSource:
    """A file as token ids, made now or on an earlier day."""
    from data.batching.mixture import WeightedSource
    from data.store.cache import load_or_build
    from data.tokenize.encoder import schema_of_source

    made = dataclasses.replace(encoding, schema=encoding.schema or schema_of_source(source, encoding.data_format))
    with ProgressMeter(f"tokenising {source.name}") as progress:
        store = load_or_build(source, made, tokenizer, Path(data.cache), progress)
    check_row_stats(store.stats, source, data)
    return WeightedSource(source, store)


def check_row_stats(stats: RowStats, source: Source, data: DataConfig) -> None:
    """A file of which too much is bad, or nothing is left, was not meant."""
    bad = sum(stats.bad.values())
    reasons = ", ".join(f"{count} {reason} (first: {stats.first_seen[reason]})" for reason, count in (stats.bad + stats.dropped).most_common())
    if bad > data.max_bad_fraction * stats.read:
        raise UserError(
            f"{bad} of {stats.read} rows are bad: {reasons}",
            source.name,
            f"mend the file, or allow it: data.max_bad_fraction={bad / stats.read:.2g}",
        )
    if not stats.kept:
        raise UserError(f"no row is left to train on: {reasons or 'the file holds none'}", source.name, "raise data.max_length, or give another file")


def split_validation(words: list[list[WeightedSource]], data: DataConfig) -> tuple[list[list[WeightedSource]], list[WeightedSource]]:
    """That share of the rows, spread over the files as evenly as whole rows allow, one row at least in all."""
    if not data.val_fraction:
        return words, []
    parts = [part for word in words for part in word]
    total, before, counts = sum(part.num_rows for part in parts), 0, {}
    share = max(round(total * data.val_fraction), 1) / total
    for part in parts:
        counts[id(part)] = round((before + part.num_rows) * share) - round(before * share)
        before += part.num_rows
    split = [[part.hold_out(counts[id(part)]) for part in word] for word in words]
    kept = [[part for part, _ in word if part is not None] for word in split]
    if not all(kept):
        raise UserError(
            f"holding out {sum(counts.values())} of {total} rows leaves nothing to train on",
            f"data.val_fraction={data.val_fraction}",
            "choose a smaller share, or give data.val_path",
        )
    return kept, [held for word in split for _, held in word if held is not None]


def packed_or_single(rows: RowSource, cfg: Config) -> SequenceSource:
    from data.batching.batch import UnpackedSequences
    from data.batching.packing import PackedSequences
    from data.types import sequences_per_row

    if cfg.data.packing == "none":
        return UnpackedSequences(rows)
    # A pair has room for both its sides, so that every pair fits that fits unpacked.
    with ProgressMeter("packing") as progress:
        return PackedSequences(rows, cfg.data.max_length * sequences_per_row(cfg.stage.data_format), Path(cfg.data.cache), progress)


def build_loader(windows: SequenceSource, cfg: Config, tokenizer: Tokenizer, global_batch: int, rank: int = 0, world: int = 1, pin: bool = False) -> StepLoader:
    """`global_batch`: windows of one step, over all ranks."""
    from data.batching.loader import StepLoader
    from data.batching.sampler import LengthGroupedSampler, ShuffledSampler

    sampler = LengthGroupedSampler(windows.rows, global_batch, cfg.seed) if cfg.data.group_by_length else ShuffledSampler(len(windows), global_batch, cfg.seed)
    return StepLoader(
        windows,
        sampler,
        batch_size=cfg.train.batch_size,
        pad_id=tokenizer.pad_id,
        packed=cfg.data.packing == "best_fit",
        num_workers=cfg.data.num_workers,
        rank=rank,
        world_size=world,
        pin_memory=pin,
    )
