"""Data pipeline of a run: section `data` -> token stores -> mixture -> packed sequences -> loader, with a report of each file's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from data.config import DataConfig
from runner.engine.config import Config
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
    train: SequenceSource
    val: SequenceSource | None
    files: list[dict[str, Any]]  # counts of each file's rows, for run.json and the log
    fingerprint: str  # of the training rows and how they are packed
    held_out: int  # validation rows


def build_data_pipeline(cfg: Config, tokenizer: Tokenizer) -> DataPipeline:
    """Raises UserError if a row, a file or their combination cannot be trained on."""
    from data.batching.mixture import MixedRows, mix_sources

    encoding = encoding_config(cfg, tokenizer)
    train_files, val_files = resolve_files(cfg.data)
    groups = [[tokenize_source(source, cfg.data, encoding, tokenizer) for source in group] for group in train_files]
    held_out = [tokenize_source(source, cfg.data, encoding, tokenizer) for source in val_files]
    files = [describe_source(part) for group in [*groups, held_out] for part in group]
    if not held_out:
        groups, held_out = split_validation(groups, cfg.data)
    rows = mix_sources(groups, cfg.data.weights)
    train = to_sequences(rows, cfg, cfg.seed)
    val = MixedRows(tuple(held_out)) if held_out else None
    return DataPipeline(train, to_sequences(val, cfg, seed=0) if val else None, files, train.fingerprint, len(val) if val else 0)


def resolve_files(data: DataConfig) -> tuple[list[list[Source]], list[Source]]:
    """Return (files of each entry of data.path, files of data.val_path). val_path=auto: X_val.jsonl beside X.jsonl."""
    from data.sources.files import COMPRESSED, resolve_sources

    groups = resolve_sources(data.paths)
    if data.val_path != "auto":
        return groups, resolve_sources(data.val_path)[0] if data.val_path else []

    def val_path(path: Path) -> Path:
        name, compression = (path.stem, path.suffix) if path.suffix in COMPRESSED else (path.name, "")
        return path.with_name(f"{Path(name).stem}_val{Path(name).suffix}{compression}")

    val_paths = {path for group in groups for source in group if (path := val_path(source.path)).is_file()}
    groups = [[source for source in group if source.path not in val_paths] for group in groups]
    return groups, [source for path in sorted(val_paths) for source in resolve_sources(str(path))[0]]


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
    """Return the file as token ids, from the cache if it was tokenized before."""
    from data.batching.mixture import WeightedSource
    from data.schemas.registry import schema_of_source
    from data.store.cache import load_or_build

    encoding = dataclasses.replace(encoding, schema=encoding.schema or schema_of_source(source, encoding.data_format))
    with ProgressMeter(f"tokenizing {source.name}") as progress:
        store = load_or_build(source, encoding, tokenizer, Path(data.cache), progress)
    check_row_stats(store.stats, source, data)
    return WeightedSource(source, store)


def check_row_stats(stats: RowStats, source: Source, data: DataConfig) -> None:
    """Refuse a file with too many bad rows, or without a row to train on."""
    bad = sum(stats.bad.values())
    reasons = ", ".join(f"{count} {reason} (first: {stats.first_seen[reason]})" for reason, count in (stats.bad + stats.dropped).most_common())
    if bad > data.max_bad_fraction * stats.read:
        raise UserError(f"{bad} of {stats.read} rows are bad: {reasons}", source.name, f"correct the file, or data.max_bad_fraction={bad / stats.read:.2g}")
    if not stats.kept:
        raise UserError(f"no row to train on: {reasons or 'the file is empty'}", source.name, "raise data.max_length, or choose another data.path")


def split_validation(groups: list[list[WeightedSource]], data: DataConfig) -> tuple[list[list[WeightedSource]], list[WeightedSource]]:
    """Hold out data.val_fraction of the rows, at least one, spread over the files as evenly as possible."""
    if not data.val_fraction:
        return groups, []
    parts = [part for group in groups for part in group]
    total, before, counts = sum(part.num_rows for part in parts), 0, {}
    share = max(round(total * data.val_fraction), 1) / total
    for part in parts:
        counts[id(part)] = round((before + part.num_rows) * share) - round(before * share)
        before += part.num_rows
    split = [[part.hold_out(counts[id(part)]) for part in group] for group in groups]
    kept = [[part for part, _ in group if part is not None] for group in split]
    if not all(kept):
        raise UserError(
            f"data.val_fraction={data.val_fraction} holds out {sum(counts.values())} of {total} rows, which leaves an entry of data.path without rows",
            f"data.val_fraction={data.val_fraction}",
            "a smaller data.val_fraction, or data.val_path=FILE",
        )
    return kept, [held_out for group in split for _, held_out in group if held_out is not None]


def to_sequences(rows: RowSource, cfg: Config, seed: int) -> SequenceSource:
    """Return the rows packed or one by one, as data.packing says; `seed` decides which share a sequence. A preference pair takes the place of two sequences."""
    from data.batching.batch import UnpackedSequences
    from data.batching.packing import PackedSequences
    from data.types import sequences_per_row

    if cfg.data.packing == "none":
        return UnpackedSequences(rows)
    with ProgressMeter("packing") as progress:
        return PackedSequences(rows, cfg.data.max_length * sequences_per_row(cfg.stage.data_format), Path(cfg.data.cache), seed, progress)


def build_loader(
    sequences: SequenceSource, cfg: Config, tokenizer: Tokenizer, global_batch_size: int, rank: int = 0, world_size: int = 1, pin_memory: bool = False
) -> StepLoader:
    """`global_batch_size`: sequences per step, over all ranks."""
    from data.batching.loader import StepLoader
    from data.batching.sampler import LengthGroupedSampler, ShuffledSampler

    if cfg.data.group_by_length:
        sampler: ShuffledSampler = LengthGroupedSampler(sequences.rows, global_batch_size, cfg.seed)
    else:
        sampler = ShuffledSampler(len(sequences), global_batch_size, cfg.seed)
    return StepLoader(
        sequences,
        sampler,
        batch_size=cfg.train.batch_size,
        pad_id=tokenizer.pad_id,
        packed=cfg.data.packing == "best_fit",
        num_workers=cfg.data.num_workers,
        rank=rank,
        world_size=world_size,
        pin_memory=pin_memory,
    )


DATA_COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {  # of data_table, from a dict of describe_source
    "read": lambda file: file["read"],
    "kept": lambda file: file["kept"],
    "split": lambda file: file["split"],
    "truncated": lambda file: file["truncated"],
    "dropped": lambda file: sum(file["dropped"].values()),
    "bad": lambda file: sum(file["bad"].values()),
    "tokens": lambda file: file["tokens"],
    "with loss": lambda file: file["loss_tokens"],
    "loss cut off": lambda file: file["lost_loss_tokens"],
}


def describe_source(part: WeightedSource) -> dict[str, Any]:
    """Return file, schema and counts of rows, as JSON values."""
    counts = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part.store.stats).items()}
    return {"file": part.source.name, "schema": part.store.metadata["encoding"]["schema"], **counts}


def data_table(files: list[dict[str, Any]]) -> str:
    """Return a text table: one line per file, then the reasons for dropped and bad rows."""
    header = ["rows of", "schema", *DATA_COLUMNS]
    table = [header, *([Path(file["file"]).name, file["schema"], *(f"{count(file):,}" for count in DATA_COLUMNS.values())] for file in files)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = [
        "  ".join(f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}" for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    for file in files:
        for kind in ("dropped", "bad"):
            lines += [f"  {kind} {count:,}: {reason} (first: {file['first_seen'][reason]})" for reason, count in file[kind].items()]
    return "\n".join(line.rstrip() for line in lines)
