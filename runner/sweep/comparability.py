"""Whether the losses of a sweep's jobs can rank them: said before compute is spent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, print_note
from common.paths import workspace_dir
from data.config import resolved_too_long
from runner.diagnostics.symptoms import FEW_ROWS, MAX_HELD_OUT
from runner.engine.config import Config
from runner.engine.data_pipeline import AUTO_DIVISOR, loss_settings, rows_to_hold_out
from runner.launch.run import check_data
from runner.run_dir.metadata import RunMetadata
from runner.sweep.state import SweepState

if TYPE_CHECKING:
    from data.sources.splits import DataFiles

COUNTED_ROWS = 100_000  # of the files of a sweep, to say that it has few validation rows
BYTES_OF_TOKEN = 4  # about, of text; a longer one is split into rows of data.max_length tokens


def print_unranked(configs: Sequence[Config], is_refused: bool = False) -> None:
    """Print for which settings, and for how few validation rows, the jobs of a sweep will have no ranks.

    Raises UserError for few rows where `is_refused`: the search would stop jobs by them.
    """
    for text, keys in unranked_settings(configs).items():
        print_note(f"jobs that differ in {', '.join(keys)} are judged by {text}: they will not be ranked")
    if rows := too_few_rows(configs):
        count = (
            f"there {'are' if rows > 1 else 'is'} {rows} validation row{'s' * (rows > 1)}, and {FEW_ROWS} are needed"
        )
        fix = "data.val_path=FILE, or a larger data.val_fraction"
        if is_refused:
            raise UserError(
                f"jobs cannot be stopped early by their losses: {count}",
                f"data.val_fraction={configs[0].data.val_fraction}",
                fix,
            )
        print_note(f"the jobs will not be ranked: {count}; {fix}")


def unranked_settings(configs: Sequence[Config]) -> dict[str, list[str]]:
    """Return what the evaluations of `configs` do not have in common -> the settings from which it follows.

    They are those that `evaluation_identity` depends on, as far as settings alone say it.
    """
    identities, found = [*map(_evaluation_settings, configs)], dict[str, list[str]]()
    for text in identities[0]:
        values = [identity[text] for identity in identities]
        for key in {key: None for each in values for key in each}:
            if any(each.get(key) != values[0].get(key) for each in values):
                found.setdefault(text, []).append(key)
    return found


def _evaluation_settings(cfg: Config) -> dict[str, dict[str, Any]]:
    data, text = cfg.data, cfg.stage.data_format == "text"
    path = next(iter(data.val_paths.values()), None)
    rows = ["columns", "encoding", "text_unit", "turns", "schema"]
    if path in (None, "auto"):
        rows += ["path", "val_fraction"]
    tokens = [] if data.too_long == "split" or (text and data.too_long == "auto") else ["max_length"]
    return {
        "other rows": {"data.val_path": path, **{f"data.{name}": getattr(data, name) for name in rows}},
        "other tokenizers": {"data.tokenizer": data.tokenizer},
        "different tokens, where a row is longer": {f"data.{name}": getattr(data, name) for name in tokens},
        "different losses": loss_settings(cfg),
    }


def too_few_rows(configs: Sequence[Config]) -> int | None:
    """Return how many validation rows the jobs would have, if they are too few to rank them; None for enough, or none."""
    first = configs[0]
    if len(configs) < 2 or not first.evaluates or (files := check_data(first.data, first.stage.data_format)) is None:
        return None
    return few_held_out_rows(first, files)


def wider_split(configs: Sequence[Config]) -> str:
    """Return the override with which the default split of the jobs holds out enough rows to rank them; empty where it
    does, where another split is typed, or half of the rows are too few.
    """
    data = configs[0].data
    is_default = all(each.data.val_fraction == "auto" and each.data.paths == data.paths for each in configs)
    if not is_default or not (rows := too_few_rows(configs)):
        return ""
    share = math.ceil(100 * FEW_ROWS / (AUTO_DIVISOR * rows)) / 100  # auto: total // AUTO_DIVISOR of few rows
    if share > MAX_HELD_OUT:
        return ""
    wider = [replace(each, data=replace(data, val_fraction=share)) for each in configs[:2]]
    return "" if too_few_rows(wider) else f"data.val_fraction={share:g}"


def few_held_out_rows(cfg: Config, data_files: DataFiles) -> int | None:
    """Return how many validation rows a run would have, if these are fewer than FEW_ROWS; None for enough, or none.

    Files are read only as far as the answer needs it.
    """
    first_set = [source for source in data_files.validation if source.val_set == data_files.validation[0].val_set]
    if not first_set and not cfg.data.val_fraction:
        return None
    fraction = 1.0 if first_set else cfg.data.val_fraction
    needed = FEW_ROWS * AUTO_DIVISOR if isinstance(fraction, str) else math.ceil(FEW_ROWS / fraction)
    if needed > COUNTED_ROWS:
        return None
    is_split = resolved_too_long(cfg.data.too_long, cfg.stage.data_format) == "split"
    bytes_of_row = BYTES_OF_TOKEN * cfg.data.max_length
    rows = (
        row
        for source in first_set or itertools.chain(*data_files.train)
        for _, row in source.rows(lambda error: None)
        for _ in range(1 + is_split * len(str(row.get("text", "")).encode(errors="replace")) // bytes_of_row)
    )
    total = sum(1 for _ in itertools.islice(rows, needed))
    held_out = total if first_set else rows_to_hold_out(total, fraction)
    return held_out if held_out < FEW_ROWS else None


def changed_data(state: SweepState) -> list[str]:
    """Return a line for each data file of a completed job that is not the one it was trained on."""
    from data.store.cache import NOT_SHARED, file_sha256_cached

    known: dict[str, str] = {}
    for job in state.jobs:
        run = RunMetadata.read(state.folder / job.name) if job.status == "completed" else {}
        for file in run.get("data") or ():
            if isinstance(sha256 := file.get("sha256"), str):
                known.setdefault(str(file.get("file")), sha256)
    lines, cache = [], workspace_dir() / ".cache"
    for name, sha256 in known.items():
        try:
            cache.mkdir(NOT_SHARED, parents=True, exist_ok=True)
            # of the hub, or gone: the job that needs the file names it
            is_changed = Path(name).is_file() and file_sha256_cached(Path(name), cache) != sha256
        except OSError:
            is_changed = False
        if is_changed:
            lines.append(
                f"{name} has changed since jobs were trained on it: jobs trained now are not comparable to them"
            )
    return lines
