"""Symptoms in the rows of a run before its first step: text of another chat template, answers that teach nothing, few
tokens with loss. And rows of an evaluation that the model was trained on: what is measured on them is memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.filesystem import open_regular
from common.ownership import is_on_this_host
from data.sources.byte_stream import COMPRESSION_MAGIC
from data.sources.files import Source
from data.tokenize.block import MARKERS, RowStats
from runner.diagnostics.symptoms import Symptom

MARKED_SHARE, MARKED_ROWS = 0.05, 3  # sampled rows with markers; fewer may quote a template
# sampled rows with one answer; with the question as answer; rows from which this is judged
SAME_SHARE, ECHO_SHARE, MIN_ROWS = 0.95, 0.2, 20
# of the tokens have loss; of data/samples 25 to 60 %, of labels of one token after prompts of 100 tokens 1 %
LABELLED_SHARE = 0.02


def check_rows(files: Iterable[RowStats], template: str | None) -> list[Symptom]:
    """Return the symptoms of training files. `template`: the chat template; None: the rows are texts."""
    if template is None:
        return []
    stats = RowStats()
    for part in files:
        stats += part
    found = [foreign_template(stats, template), bad_labels(stats), few_labels(stats)]
    return [symptom for symptom in found if symptom is not None]


def foreign_template(stats: RowStats, template: str) -> Symptom | None:
    """Messages with the marks of a chat template: it was applied before, and the model would learn to write its marks
    as text.
    """
    counts, sampled = stats.sampled, stats.sampled["rows"]
    marker = max(MARKERS, key=lambda marker: counts[marker])
    if counts[marker] < max(MARKED_ROWS, MARKED_SHARE * sampled):
        return None
    relation = (
        "which the tokenizer's template writes itself" if marker in template else "the tokenizer has another template"
    )
    return Symptom(
        "wrong-template",
        f"{counts[marker]} of {sampled} sampled rows have {marker} in a message, the mark of {MARKERS[marker]}: {relation}",
        "give role and content of each message without marks; runner/rows.py shows the rows",
    )


def bad_labels(stats: RowStats) -> Symptom | None:
    """The same answer to everything, or answers that repeat the question: a wrong column, or labels that were lost."""
    answers, echoes, questions = (stats.sampled[name] for name in ("answers", "echoes", "questions"))
    if answers < MIN_ROWS:
        return None
    [(answer, same)] = stats.common_answers.most_common(1)
    if echoes >= ECHO_SHARE * answers:
        measured = f"{echoes} of {answers} sampled answers are the same text as their question"
    elif same >= SAME_SHARE * answers and questions > answers // 2:
        measured = (
            f"{same} of {answers} sampled answers are the same text, {answer!r}, to {questions} different questions"
        )
    else:
        return None
    return Symptom(
        "bad-labels", measured, "name the right columns, e.g. 'data.columns={prompt: question, completion: answer}'"
    )


def few_labels(stats: RowStats) -> Symptom | None:
    if not stats.tokens or stats.loss_tokens >= LABELLED_SHARE * stats.tokens:
        return None
    share, per_row = stats.loss_tokens / stats.tokens, stats.loss_tokens / max(1, stats.kept)
    return Symptom(
        "few-labels",
        f"{stats.loss_tokens:,} of {stats.tokens:,} tokens have loss ({share:.1%}, {per_row:.1f} a row)",
        "data.loss_on=assistant (every answer), or other data.columns; runner/rows.py colours the tokens with loss",
    )


# of the training files together, and of the evaluated ones: about two seconds; larger ones are not compared
MAX_BYTES = 64 << 20
# of the training data; beyond one of them nothing is compared
MAX_TRAINING_FILES, MAX_TRAINING_ROWS, MAX_READ_SECONDS = 100, 2_000_000, 20.0


class TrainingOverlap(NamedTuple):
    rows: int  # evaluated rows that are training rows, too
    total: int
    first: str  # file:line of the first of them


def training_overlap(evaluated: Iterable[Source], run: Mapping[str, Any]) -> TrainingOverlap | None:
    """Return how many rows of `evaluated` are, field by field, rows of the training files that `run`, a run.json,
    names.

    None: another machine made the run, a file is not there any more, or they are too large to be compared. A run folder
    may be that of another person: each file is read only if its name is literally that of a regular file, neither a
    link nor compressed.
    """
    evaluated = list(evaluated)
    try:
        training = _training_files(run)
        if not training or max(sum(source.size for source in files) for files in (training, evaluated)) > MAX_BYTES:
            return None
        if (seen := _training_digests(training)) is None:
            return None
        rows = [
            (source.where(position), digest in seen) for source in evaluated for position, digest in _digests(source)
        ]
    # a file that only an evaluation or a training with other settings can read
    except (UserError, OSError, ValueError):
        return None
    found = [where for where, is_known in rows if is_known]
    return TrainingOverlap(len(found), len(rows), found[0]) if found else None


def _training_files(run: Mapping[str, Any]) -> list[Source]:
    """Return the files that can be compared; none of a run of another machine."""
    files = run.get("data")
    if not is_on_this_host(run) or not isinstance(files, list) or len(files) > MAX_TRAINING_FILES:
        return []
    names = [entry.get("file") for entry in files if isinstance(entry, dict) and entry.get("use") == "training"]
    return [Source.open(name) for name in names if isinstance(name, str) and _is_plain_file(Path(name))]


def _is_plain_file(path: Path) -> bool:
    try:
        fd, size = open_regular(path)
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return False
    with open(fd, "rb") as file:
        # files of /proc have no size, compressed ones any when they are read
        return size > 0 and not file.read(8).startswith(tuple(COMPRESSION_MAGIC))


def _training_digests(training: list[Source]) -> set[bytes] | None:
    """Return the hashes of the rows, None beyond MAX_TRAINING_ROWS or MAX_READ_SECONDS."""
    seen, end = set[bytes](), time.monotonic() + MAX_READ_SECONDS
    rows = (digest for source in training for _, digest in _digests(source))
    for number, digest in enumerate(islice(rows, MAX_TRAINING_ROWS + 1)):
        if number == MAX_TRAINING_ROWS or number % 1024 == 1023 and time.monotonic() > end:
            return None
        seen.add(digest)
    return seen


def _digests(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield (position, hash of the fields) of each row that can be read."""
    for position, row in source.rows(on_bad=lambda error: None):
        yield (
            position,
            hashlib.blake2b(
                json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"), digest_size=12
            ).digest(),
        )
