"""From the section `data` to loaders: files are found and tokenised, mixed, held out, packed; and what became of every row is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.config import DataConfig
from runner.engine.config import Config
from runner.engine.console import Meter

if TYPE_CHECKING:
    from data.block import Tally
    from data.formats import Source
    from data.loader import StepLoader, Windows
    from data.mixture import Part
    from data.rows import Recipe, RowSource
    from data.tokenizer import Tokenizer


@dataclass
class Feed:
    """What a run is fed with."""

    train: Windows
    val: Windows | None
    files: list[dict[str, Any]]  # of each file what became of its rows; stands in run.json and in the log
    fingerprint: str  # of the rows that are trained on and how they lie in windows
    held_out: int  # rows


def open_feed(cfg: Config, tokenizer: Tokenizer) -> Feed:
    """Raises ValueError(what, where, fix) where a row, a file or the sum of them cannot be used."""
    from data.mixture import Rows, mixture

    recipe = recipe_of(cfg, tokenizer)
    found, held_out_sources = sources_of(cfg.data)
    words = [[prepared(source, cfg.data, recipe, tokenizer) for source in word] for word in found]
    held_out = [prepared(source, cfg.data, recipe, tokenizer) for source in held_out_sources]
    files = [described(part) for word in [*words, held_out] for part in word]
    if not held_out:
        words, held_out = hold_out(words, cfg.data)
    rows = mixture(words, cfg.data.weights)
    train = windows(rows, cfg)
    val = Rows(tuple(held_out)) if held_out else None
    return Feed(train, windows(val, cfg) if val else None, files, getattr(train, "fingerprint", rows.fingerprint), len(val) if val else 0)


def sources_of(data: DataConfig) -> tuple[list[list[Source]], list[Source]]:
    """(the files of each word of data.path, those of data.val_path); `auto` is X_val.jsonl beside X.jsonl."""
    from data.formats import find_sources

    words = find_sources(data.paths)
    if data.val_path != "auto":
        return words, find_sources(data.val_path)[0] if data.val_path else []
    twins = {beside for word in words for source in word if (beside := beside_it(source.path)).is_file()}
    words = [[source for source in word if source.path not in twins] for word in words]
    return words, [source for path in sorted(twins) for source in find_sources(str(path))[0]]


def beside_it(path: Path) -> Path:
    """X_val.jsonl.gz for X.jsonl.gz."""
    from data.formats import PACKED

    name, packed = (path.stem, path.suffix) if path.suffix in PACKED else (path.name, "")
    return path.with_name(f"{Path(name).stem}_val{Path(name).suffix}{packed}")


def recipe_of(cfg: Config, tokenizer: Tokenizer) -> Recipe:
    from data.rows import Recipe

    data = cfg.data
    too_long = ("split" if cfg.stage.rows == "text" else "truncate") if data.too_long == "auto" else data.too_long
    return Recipe(
        rows=cfg.stage.rows,
        shape=data.shape or "",
        tokenizer=tokenizer.folder,
        max_length=data.max_length,
        too_long=too_long,
        train_on=data.train_on,
        on_bad_row=data.on_bad_row,
        system_prompts=tuple(data.system_prompts) if data.system_prob else (),
        system_prob=data.system_prob,
        empty_think_prob=data.empty_think_prob,
        seed=cfg.seed if data.system_prob or data.empty_think_prob else 0,
    )


def prepared(source: Source, data: DataConfig, recipe: Recipe, tokenizer: Tokenizer) -> Part:
    """A file as token ids, made now or on an earlier day."""
    from data.build import prepare
    from data.mixture import Part
    from data.rows import shape_of

    made = dataclasses.replace(recipe, shape=recipe.shape or shape_of(source, recipe.rows))
    with Meter(f"tokenising {source.name}") as progress:
        store = prepare(source, made, tokenizer, Path(data.cache), progress)
    check(store.tally, source, data)
    return Part(source, store)


def check(tally: Tally, source: Source, data: DataConfig) -> None:
    """A file of which too much is bad, or nothing is left, was not meant."""
    bad = sum(tally.bad.values())
    reasons = ", ".join(f"{count} {reason} (first: {tally.first[reason]})" for reason, count in (tally.bad + tally.dropped).most_common())
    if bad > data.max_bad_fraction * tally.read:
        raise ValueError(
            f"{bad} of {tally.read} rows are bad: {reasons}",
            source.name,
            f"mend the file, or allow it: data.max_bad_fraction={bad / tally.read:.2g}",
        )
    if not tally.kept:
        raise ValueError(f"no row is left to train on: {reasons or 'the file holds none'}", source.name, "raise data.max_length, or give another file")


def hold_out(words: list[list[Part]], data: DataConfig) -> tuple[list[list[Part]], list[Part]]:
    """That share of the rows, spread over the files as evenly as whole rows allow, one row at least in all."""
    if not data.val_fraction:
        return words, []
    parts = [part for word in words for part in word]
    total, before, counts = sum(part.rows for part in parts), 0, {}
    share = max(round(total * data.val_fraction), 1) / total
    for part in parts:
        counts[id(part)] = round((before + part.rows) * share) - round(before * share)
        before += part.rows
    split = [[part.held_out(counts[id(part)]) for part in word] for word in words]
    kept = [[part for part, _ in word if part is not None] for word in split]
    if not all(kept):
        raise ValueError(
            f"holding out {sum(counts.values())} of {total} rows leaves nothing to train on",
            f"data.val_fraction={data.val_fraction}",
            "choose a smaller share, or give data.val_path",
        )
    return kept, [held for word in split for _, held in word if held is not None]


def windows(rows: RowSource, cfg: Config) -> Windows:
    from data.loader import Single
    from data.packing import Packed
    from data.rows import sides_of

    if cfg.data.packing == "none":
        return Single(rows)
    # A pair has room for both its sides, so that every pair fits that fits unpacked.
    with Meter("packing") as progress:
        return Packed(rows, cfg.data.max_length * sides_of(cfg.stage.rows), Path(cfg.data.cache), progress)


def loader_of(windows: Windows, cfg: Config, tokenizer: Tokenizer, global_batch: int, rank: int = 0, world: int = 1, pin: bool = False) -> StepLoader:
    """`global_batch`: windows of one step, over all ranks."""
    from data.loader import StepLoader
    from data.order import ByLength, Order

    order = ByLength(windows.rows, global_batch, cfg.seed) if cfg.data.group_by_length else Order(len(windows), global_batch, cfg.seed)
    return StepLoader(
        windows,
        order,
        batch_size=cfg.train.batch_size,
        pad_id=tokenizer.pad_id,
        packed=cfg.data.packing == "pack",
        num_workers=cfg.data.num_workers,
        rank=rank,
        world=world,
        pin=pin,
    )


COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {
    "read": lambda file: file["read"],
    "kept": lambda file: file["kept"],
    "split": lambda file: file["split"],
    "cut": lambda file: file["cut"],
    "dropped": lambda file: sum(file["dropped"].values()),
    "bad": lambda file: sum(file["bad"].values()),
    "tokens": lambda file: file["tokens"],
    "with loss": lambda file: file["supervised"],
    "loss cut off": lambda file: file["lost"],
}


def described(part: Part) -> dict[str, Any]:
    counts = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part.store.tally).items()}
    return {"file": part.source.name, "shape": part.store.facts["recipe"]["shape"], **counts}


def table(files: list[dict[str, Any]]) -> str:
    """What became of the rows of each file, as lines of text."""
    head = ["rows of", "shape", *COLUMNS]
    lines = [[Path(file["file"]).name, file["shape"], *(f"{count(file):,}" for count in COLUMNS.values())] for file in files]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    told = [
        "  ".join(f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}" for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in [head, *lines]
    ]
    for file in files:
        for kind in ("dropped", "bad"):
            told += [f"  {kind} {count:,}: {reason} (first: {file['first'][reason]})" for reason, count in file[kind].items()]
    return "\n".join(line.rstrip() for line in told)
