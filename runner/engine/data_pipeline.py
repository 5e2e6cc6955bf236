"""Data pipeline of a run: section `data` -> token stores -> mixture -> packed sequences -> loader."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.filesystem import sha256_of_json
from common.paths import display_path
from data.config import DataConfig, resolved_too_long
from data.schemas.registry import missing_columns, schema_of_source
from data.sources.files import ReadOptions
from data.sources.splits import DataFiles, resolve_data_files
from data.types import BadRowError, EncodingConfig, sequences_per_row
from runner.diagnostics.symptoms import FEW_ROWS, few_validation_rows, troubleshooting
from runner.engine.config import Config
from runner.engine.objectives.config import StageConfig
from runner.tracking.data_report import describe_source, reading_notes, unused_columns
from runner.tracking.progress import ProgressMeter

if TYPE_CHECKING:
    from data.batching.loader import StepLoader
    from data.batching.mixture import MixedRows, WeightedSource
    from data.batching.packing import Sequences
    from data.sources.files import Source
    from data.tokenize.block import RowStats
    from data.tokenize.tokenizer import Tokenizer

COUNTED_BYTES = 8 << 20  # of a file with a bad row whose other bad rows are counted
AUTO_FRACTION, AUTO_DIVISOR = 0.01, 5  # data.val_fraction=auto: 1 %, at least FEW_ROWS, but of few rows at most a fifth


@dataclass
class DataPipeline:
    train: Sequences
    val: dict[str, Sequences]  # of each validation set by its name, the deciding one first; "": the only one
    files: list[dict[str, Any]]  # counts of each file's rows, for run.json and the log
    warnings: list[str]  # of rows that are cut off, or are training and validation data
    notes: list[str]  # how files were chosen and read, and what of them is not used
    held_out: int  # validation rows of all sets
    # `val` is a slice of the training rows, which are trained on, too: train.final_eval_rows
    evaluates_training_rows: bool = False
    # what identifies the rows of the first of `val`, and all named sets, as JSON values; None without evaluation
    evaluation: dict[str, Any] | None = None


def build_data_pipeline(cfg: Config, tokenizer: Tokenizer, data_files: DataFiles | None = None) -> DataPipeline:
    """`data_files`: those of cfg.data, None: they are resolved here.

    Raises UserError if a row, a file or their combination cannot be trained on.
    """
    from data.batching.mixture import MixedRows, mix_sources, separate_validation

    encoding = encoding_config(cfg, tokenizer)
    data_files = data_files or resolve_data_files(cfg.data.paths, cfg.data.val_paths, ReadOptions.of(cfg.data))
    *groups, held_out = [
        [tokenize_source(source, cfg.data, encoding, tokenizer, cfg.tracker.console) for source in group]
        for group in (*data_files.train, data_files.validation)
    ]
    sources = [*itertools.chain.from_iterable(data_files.train), *data_files.validation]
    of_template = groups[0][0].store.metadata["template"]
    uses = [*((part, "training") for group in groups for part in group), *((part, "validation") for part in held_out)]
    files = [describe_source(part) | {"use": use} for part, use in uses]
    is_split = not held_out
    if is_split:
        groups, held_out = split_validation(groups, cfg.data)
    groups, warnings = separate_validation(groups, held_out, cfg.data, is_split)
    rows = mix_sources(groups, cfg.data.weights)
    train = to_sequences(rows, cfg, cfg.seed)
    evaluates_training_rows = not held_out and cfg.train.final_eval_rows > 0
    evaluated = training_slice(groups, cfg.train.final_eval_rows) if evaluates_training_rows else held_out
    of_sets = itertools.groupby(evaluated, lambda part: part.source.val_set)
    val = {name: MixedRows(tuple(parts)) for name, parts in of_sets}
    num_held_out, num_training = (
        sum(part.num_rows for part in parts) for parts in (held_out, itertools.chain.from_iterable(groups))
    )
    return DataPipeline(
        train=train,
        val={name: to_sequences(rows, cfg, seed=0) for name, rows in val.items()},
        files=files,
        warnings=[
            *(f"{warning}; {troubleshooting('test-in-training')}" for warning in warnings),
            *row_warnings([part for group in groups for part in group], cfg, tokenizer),
            *of_template["warnings"],
            *missing_columns(sources),
            *(
                few.message
                for name, rows in val.items()
                if cfg.train.eval_every and held_out and (few := few_validation_rows(len(rows), num_training, name))
            ),
        ],
        notes=[
            *tokenizer.notes(of_texts=cfg.stage.data_format == "text"),
            *of_template["notes"],
            *data_files.notes,
            *(
                [f"validation sets: {', '.join(val)}; {next(iter(val))} decides which weights are best"]
                if any(val)
                else []
            ),
            *reading_notes(sources),
            *unused_columns(files),
        ],
        held_out=num_held_out,
        evaluates_training_rows=evaluates_training_rows,
        evaluation=evaluation_identity(val, evaluates_training_rows, encoding, cfg) if val else None,
    )


def row_warnings(parts: list[WeightedSource], cfg: Config, tokenizer: Tokenizer) -> list[str]:
    """Return warnings of what the rows of the training files lack: their ends, text of this chat template, labels."""
    from data.tokenize.block import truncation_warning
    from runner.diagnostics.rows import check_rows

    stats = [part.store.stats for part in parts]
    truncated = truncation_warning(stats, cfg.data.max_length, cfg.model.max_position_embeddings)
    template = None if cfg.stage.data_format == "text" else tokenizer.chat_template
    symptoms = check_rows(stats, template)
    return [
        *([f"{truncated}; {troubleshooting('truncation')}"] if truncated else []),
        *(symptom.message for symptom in symptoms),
    ]


def encoding_config(cfg: Config, tokenizer: Tokenizer) -> EncodingConfig:
    data = cfg.data
    return EncodingConfig(
        data_format=cfg.stage.data_format,
        schema=data.schema or "",
        tokenizer=tokenizer.folder,
        max_length=data.max_length,
        too_long=resolved_too_long(data.too_long, cfg.stage.data_format),
        loss_on=data.loss_on,
        on_bad_row=data.on_bad_row,
        system_prompts=tuple(data.system_prompts) if data.system_prob else (),
        system_prob=data.system_prob,
        empty_think_prob=data.empty_think_prob,
        seed=cfg.seed if data.system_prob or data.empty_think_prob else 0,
    )


def tokenize_source(
    source: Source, data: DataConfig, encoding: EncodingConfig, tokenizer: Tokenizer, console: str
) -> WeightedSource:
    """Return the file as token ids, from the cache if it was tokenized before. `console`: tracker.console."""
    from data.batching.mixture import WeightedSource
    from data.store.cache import load_or_build

    encoding = replace(encoding, schema=encoding.schema or schema_of_source(source, encoding.data_format))
    with ProgressMeter(f"tokenizing {display_path(Path(source.name))}", console) as progress:
        try:
            store = load_or_build(
                source, encoding, tokenizer, Path(data.cache), progress, worker_timeout=data.worker_timeout
            )
        except BadRowError as error:
            raise with_bad_fraction(error, source, data, encoding, tokenizer) from error
    check_row_stats(store.stats, source, data)
    return WeightedSource(source, store)


def with_bad_fraction(
    error: BadRowError, source: Source, data: DataConfig, encoding: EncodingConfig, tokenizer: Tokenizer
) -> BadRowError:
    """Return the error with data.max_bad_fraction in its fix, if data.on_bad_row=skip alone would be refused. Larger
    files are not read to their end.
    """
    from data.store.cache import load_or_build

    if encoding.on_bad_row != "error" or source.path.stat().st_size > COUNTED_BYTES:
        return error
    with suppress(UserError, OSError), TemporaryDirectory() as folder:
        stats = load_or_build(source, replace(encoding, on_bad_row="skip"), tokenizer, Path(folder)).stats
        bad = sum(stats.bad.values())
        if bad > data.max_bad_fraction * stats.read:
            fix = f"{error.fix} {bad_fraction(bad, stats.read)}"
            if bad == stats.read:  # nothing would be left
                fix = error.fix.partition("; or skip such rows")[0]
            fix += f" ({bad} of {stats.read} rows are bad)"
            return BadRowError(error.reason, error.message, error.setting, fix)
    return error


def bad_fraction(bad: int, read: int) -> str:
    """Return the override that allows these bad rows: the fraction is rounded up."""
    return f"data.max_bad_fraction={math.ceil(100 * bad / read) / 100:g}"


def check_row_stats(stats: RowStats, source: Source, data: DataConfig) -> None:
    """Refuse a file with too many bad rows, or without a row or a token with loss."""
    bad = sum(stats.bad.values())
    if bad > data.max_bad_fraction * stats.read:
        raise UserError(
            f"{bad} of {stats.read} rows are bad: {stats.left_out}",
            source.name,
            f"correct the file, or {bad_fraction(bad, stats.read)}",
        )
    if not stats.kept:
        raise UserError(
            f"no row is left: {stats.left_out or 'the file is empty'}",
            source.name,
            "raise data.max_length, or leave out this file",
        )
    if not stats.loss_tokens:
        raise UserError(
            f"none of the {stats.tokens:,} tokens has loss", source.name, "another data.loss_on, or other data"
        )


def split_validation(
    groups: list[list[WeightedSource]], data: DataConfig
) -> tuple[list[list[WeightedSource]], list[WeightedSource]]:
    """Hold out data.val_fraction of the rows, at least one, spread over the files as evenly as possible.

    A saved config has the value of its time: the rows of a run that is resumed stay the same while no formula of a
    value changes.
    """
    if not data.val_fraction:
        return groups, []
    parts = [part for group in groups for part in group]
    total, before, counts = sum(part.num_rows for part in parts), 0, {}
    share = rows_to_hold_out(total, data.val_fraction) / total
    for part in parts:
        counts[id(part)] = round((before + part.num_rows) * share) - round(before * share)
        before += part.num_rows
    for group in groups:
        if all(counts[id(part)] == part.num_rows for part in group):
            counts[id(group[-1])] -= 1  # an entry keeps a row to train on
    if not any(counts.values()):
        message = f"data.val_fraction={data.val_fraction} holds out at least one row, and the data has {total} in {len(groups)} entries of data.path"
        raise UserError(
            message,
            f"data.val_fraction={data.val_fraction}",
            "data.val_fraction=0 trains on all rows without validation; or data.val_path=FILE",
        )
    split = [[part.hold_out(counts[id(part)]) for part in group] for group in groups]
    kept = [[part for part, _ in group if part is not None] for group in split]
    return kept, [held_out for group in split for _, held_out in group if held_out is not None]


def rows_to_hold_out(total: int, fraction: float | str) -> int:
    """Return how many of `total` rows `data.val_fraction=fraction` holds out."""
    if isinstance(fraction, str):  # auto
        return max(round(total * AUTO_FRACTION), min(FEW_ROWS, total // AUTO_DIVISOR), 1)
    return max(round(total * fraction), 1)


def training_slice(groups: list[list[WeightedSource]], count: int) -> list[WeightedSource]:
    """Return `count` rows spread over all files, the same ones for every seed and batch size.

    They stay training rows.
    """
    parts = [part for group in groups for part in group]
    total = sum(part.num_rows for part in parts)
    slices, before = [], 0
    for part in parts:
        share = round((before + part.num_rows) * min(count, total) / total) - round(before * min(count, total) / total)
        slices.append(part.hold_out(share)[1])
        before += part.num_rows
    return [part for part in slices if part is not None]


def evaluation_identity(
    sets: dict[str, MixedRows], is_training_slice: bool, encoding: EncodingConfig, cfg: Config
) -> dict[str, Any]:
    """Return what two runs must have in common for their evaluation losses to be comparable: rows and tokens of the
    first set, tokenizer, and settings of the loss; and the rows of all `sets` that have a name.
    """
    first, rows = next(iter(sets.items()))
    files = [
        [
            part.store.metadata["content"],
            part.source.reading,
            part.store.metadata["encoding"]["schema"],
            part.split and [part.split.size, part.split.held_out],
        ]
        for part in rows.sources
    ]
    # split texts have the same tokens at every length
    tokens = 0 if encoding.too_long == "split" else int(rows.lengths(0, len(rows)).sum())
    return {
        "on": "training" if is_training_slice else "validation",
        "rows": len(rows),
        "tokens": tokens,
        "data": sha256_of_json(files),
        "tokenizer": rows.sources[0].store.metadata["tokenizer"],
        "loss": loss_settings(cfg),
        **({"sets": {name: rows.fingerprint for name, rows in sets.items()}} if first else {}),
    }


def loss_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that decide what an evaluation loss measures."""
    others = {field.name for field in fields(StageConfig)} - {"objective"}
    # what a resume may change is read by the training alone
    others |= {field.name for field in fields(cfg.stage) if field.metadata.get("on_resume") == "changes_training"}
    loss = {f"stage.{key}": value for key, value in asdict(cfg.stage).items() if key not in others}
    return loss | {f"data.{key}": getattr(cfg.data, key) for key in ("loss_on", "system_prob", "empty_think_prob")}


def to_sequences(rows: MixedRows, cfg: Config, seed: int) -> Sequences:
    """Return the rows packed or one by one, as data.packing says; `seed` decides which share a sequence.

    A preference pair takes the place of two sequences.
    """
    from data.batching.packing import PackedSequences, UnpackedSequences

    if cfg.data.packing == "none":
        return UnpackedSequences(rows)
    with ProgressMeter("packing", cfg.tracker.console) as progress:
        return PackedSequences(
            rows, cfg.data.max_length * sequences_per_row(cfg.stage.data_format), Path(cfg.data.cache), seed, progress
        )


def build_loader(
    sequences: Sequences,
    cfg: Config,
    tokenizer: Tokenizer,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> StepLoader:
    """`global_batch_size`: sequences per step, over all ranks."""
    from data.batching.loader import StepLoader
    from data.batching.sampler import LengthGroupedSampler, ShuffledSampler

    if cfg.data.group_by_length:
        sampler: ShuffledSampler = LengthGroupedSampler(
            len(sequences), global_batch_size, cfg.seed, sequences.rows.lengths
        )
    else:
        sampler = ShuffledSampler(len(sequences), global_batch_size, cfg.seed)
    return StepLoader(
        sequences,
        sampler,
        batch_size=cfg.train.batch_size,
        pad_id=tokenizer.pad_id,
        num_workers=cfg.data.num_workers,
        worker_timeout=cfg.data.worker_timeout,
        rank=rank,
        world_size=world_size,
        pin_memory=pin_memory,
    )
