"""What a run reports about its data files: counts of rows, detected formats and unused columns, for run.json and the
log.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.paths import display_path
from runner.tracking.bar import LINE_WIDTH, labelled_lines, shorten_middle, table_lines, widest, wrap_text

if TYPE_CHECKING:
    from data.batching.mixture import WeightedSource
    from data.sources.files import Source

MAX_LISTED_COLUMNS, MAX_LISTED_FILES = 20, 3  # in one line of the log; run.json has all
# column of data_table -> key of describe_source
COUNTS = {name: name for name in "read kept split truncated dropped bad tokens".split()}
COUNTS |= {"with loss": "loss_tokens", "cut off": "lost_loss_tokens"}
ALWAYS_SHOWN = ("read", "kept", "tokens", "with loss")
MIN_NAME_WIDTH, MAX_NAME_WIDTH = 12, 28  # cells of a file's name in the table, and before a paragraph
NO_BREAK_SPACE = "\u00a0"


def describe_source(part: WeightedSource) -> dict[str, Any]:
    """Return file, schema and counts of rows, as JSON values."""
    counts = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(part.store.stats).items()
        if name != "lost_by_length"
    }
    named = {"set": part.source.val_set} if part.source.val_set else {}
    content = {"schema": part.store.metadata["encoding"]["schema"], "sha256": part.store.metadata["content"]}
    return {"file": part.source.name, **content, **named, **counts}


def reading_notes(sources: list[Source]) -> list[str]:
    """Return a line for the files whose encoding or delimiter was detected."""
    return [
        f"{files}: {detected}"
        for detected, files in _grouped((source.detected, Path(source.name).name) for source in sources)
    ]


def unused_columns(files: list[dict[str, Any]]) -> list[str]:
    """Return a line for the files with fields that training ignores; rows in which they are null do not count."""
    named = ((listed(sorted(file["unused"]), MAX_LISTED_COLUMNS), Path(file["file"]).name) for file in files)
    return [f"unused columns of {where}: {columns}" for columns, where in _grouped(named)]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (text, files) for each text that is not empty."""
    groups: dict[str, list[str]] = {}
    for text, file in pairs:
        groups.setdefault(text, []).append(file)
    return [(text, listed(files, MAX_LISTED_FILES)) for text, files in groups.items() if text]


def listed(names: list[str], limit: int) -> str:
    """Return the first `limit` names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def data_summary(paths: list[str], files: list[dict[str, Any]], rows: int, held_out: int) -> str:
    """Return what there is to train on, `rows` and `held_out`, and what data.max_length costs in all `files`."""
    tokens, loss_tokens, lost = (
        sum(file[key] for file in files) for key in ("tokens", "loss_tokens", "lost_loss_tokens")
    )
    cut = f"{lost / (loss_tokens + lost):.1%} cut off" if lost else "none cut off"
    held = f", {held_out:,} more held out" if held_out else ", none held out"
    named = listed([display_path(Path(path)) if Path(path).is_absolute() else path for path in paths], MAX_LISTED_FILES)
    return f"{named}\n{rows:,} rows{held}; {tokens:,} tokens in all files, {loss_tokens:,} with loss, {cut}"


def _counts(file: dict[str, Any]) -> dict[str, int]:
    """Return column -> number, from a dict of `describe_source`."""
    counts = {name: file[key] for name, key in COUNTS.items()}
    return {name: sum(count.values()) if isinstance(count, dict) else count for name, count in counts.items()}


def data_table(files: list[dict[str, Any]]) -> str:
    """Return a text table: one line per file, then the reasons for dropped and bad rows.

    Columns that are 0 for every file are left out.

    A table that is wider than LINE_WIDTH becomes a paragraph for each file.
    """
    counts = [_counts(file) for file in files]
    columns = [name for name in COUNTS if name in ALWAYS_SHOWN or any(row[name] for row in counts)]
    table = [["rows of", "schema", *columns]]
    table += [
        ["", file["schema"], *(f"{row[name]:,}" for name in columns)] for file, row in zip(files, counts, strict=True)
    ]
    is_number = [False, False, *[True] * len(columns)]
    space = max(MIN_NAME_WIDTH, LINE_WIDTH - widest(table_lines(table, is_number)) + len("rows of"))
    for line, file in zip(table[1:], files, strict=True):
        line[0] = shorten_middle(Path(file["file"]).name, space)
    lines = table_lines(table, is_number)
    if widest(lines) > LINE_WIDTH:
        lines = _paragraphs(files)
    for file in files:
        for kind in ("dropped", "bad"):
            for reason, count in file[kind].items():
                lines += wrap_text(f"{kind} {count:,}: {reason} (first: {file['first_seen'][reason]})", "  ", "    ")
    return "\n".join(lines)


def _paragraphs(files: list[dict[str, Any]]) -> list[str]:
    """Return the same counts as text, without those that are 0; a number stays in the line of its name."""
    rows = []
    for file in files:
        text = ", ".join(
            f"{count:,}{NO_BREAK_SPACE}{name.replace(' ', NO_BREAK_SPACE)}"
            for name, count in _counts(file).items()
            if count or name in ALWAYS_SHOWN
        )
        rows.append((shorten_middle(Path(file["file"]).name, MAX_NAME_WIDTH), f"{file['schema']}: {text}"))
    return [line.replace(NO_BREAK_SPACE, " ") for line in labelled_lines(rows)]
