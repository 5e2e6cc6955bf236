"""Symptoms in the rows of a run, before its first step: text of another chat template, answers that teach nothing, few
tokens with loss.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from data.errors import BadRowError
from data.schemas.registry import SCHEMAS, ChatExample, Example, PreferencePair
from data.sources.files import Source
from data.tokenize.block import RowStats
from runner.diagnostics.symptoms import Symptom

SAMPLED_FILES, SAMPLED_ROWS = 8, 64  # files, and rows from the beginning of each: a few milliseconds
MAX_SAMPLED_BYTES = 64 << 20  # of a file without lines (a JSON array, parquet) that is opened for its first rows
MARKED_SHARE, MARKED_ROWS = 0.05, 3  # sampled rows with markers; fewer may quote a template
# sampled rows with one answer; with the question as answer; rows from which this is judged
SAME_SHARE, ECHO_SHARE, MIN_ROWS = 0.95, 0.2, 20
# of the tokens have loss; of data/samples 25 to 60 %, of labels of one token after prompts of 100 tokens 1 %
LABELLED_SHARE = 0.02
# What begins a turn in the chat templates in use: text that has it was rendered already
MARKERS = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<|header_start|>": "Llama 4",
    "[INST]": "Llama 2 and Mistral",
    "<start_of_turn>": "Gemma",
    "<|start_of_role|>": "Granite",
    "<|assistant|>": "Phi, Zephyr and GLM",
    "<\uff5cAssistant\uff5c>": "DeepSeek",
    "### Response:": "Alpaca",
    "ASSISTANT:": "Vicuna",
}


def check_rows(
    sources: Iterable[Source], schemas: Iterable[str], stats: Iterable[RowStats], template: str | None
) -> list[Symptom]:
    """Return the symptoms of training files.

    `schemas`: the row schema of each; `template`: the chat template; None: the rows are texts.
    """
    if template is None:
        return []
    examples = list(sample_examples(zip(sources, schemas, strict=True)))
    found = [foreign_template(examples, template), bad_labels(examples), few_labels(stats)]
    return [symptom for symptom in found if symptom is not None]


def sample_examples(files: Iterable[tuple[Source, str]]) -> Iterator[Example]:
    """Yield the first rows of the first files. Bad rows are left out: the encoder reports them."""
    for source, schema in itertools.islice(files, SAMPLED_FILES):
        if source.file_format not in ("jsonl", "text lines") and source.size > MAX_SAMPLED_BYTES:
            continue
        for position, raw in itertools.islice(source.items(), SAMPLED_ROWS):
            try:
                yield SCHEMAS[schema].read(source.parse(position, raw), source.where(position))
            except BadRowError:
                continue


def foreign_template(examples: list[Example], template: str) -> Symptom | None:
    """Messages with the marks of a chat template: it was applied before, and the model would learn to write its marks
    as text.
    """
    counts = Counter(
        marker for example in examples for marker in MARKERS if any(marker in text for text in _texts(example))
    )
    marker, rows = counts.most_common(1)[0] if counts else ("", 0)
    if rows < max(MARKED_ROWS, MARKED_SHARE * len(examples)):
        return None
    relation = (
        "which the tokenizer's template writes itself" if marker in template else "the tokenizer has another template"
    )
    measured = (
        f"{rows} of {len(examples)} sampled rows have {marker} in a message, the mark of {MARKERS[marker]}: {relation}"
    )
    return Symptom(
        "wrong-template",
        0,
        measured,
        "give role and content of each message without marks; runner/rows.py shows the rows",
    )


def bad_labels(examples: list[Example]) -> Symptom | None:
    """The same answer to everything, or answers that repeat the question: a wrong column, or labels that were lost."""
    pairs = [pair for example in examples if (pair := _question_and_answer(example)) is not None]
    if len(pairs) < MIN_ROWS:
        return None
    answer, same = Counter(answer for _, answer in pairs).most_common(1)[0]
    echoes = sum(question == answer for question, answer in pairs)
    questions = len({question for question, _ in pairs})
    if echoes >= ECHO_SHARE * len(pairs):
        measured = f"{echoes} of {len(pairs)} sampled answers are the same text as their question"
    elif same >= SAME_SHARE * len(pairs) and questions > len(pairs) // 2:
        measured = f"{same} of {len(pairs)} sampled answers are the same text, {answer[:40]!r}, to {questions} different questions"
    else:
        return None
    return Symptom(
        "bad-labels", 0, measured, "name the right columns, e.g. 'data.columns={prompt: question, completion: answer}'"
    )


def few_labels(stats: Iterable[RowStats]) -> Symptom | None:
    stats = list(stats)
    labelled, tokens, rows = (sum(getattr(part, name) for part in stats) for name in ("loss_tokens", "tokens", "kept"))
    if not tokens or labelled >= LABELLED_SHARE * tokens:
        return None
    measured = (
        f"{labelled:,} of {tokens:,} tokens have loss ({labelled / tokens:.1%}, {labelled / max(1, rows):.1f} a row)"
    )
    return Symptom(
        "few-labels",
        0,
        measured,
        "data.loss_on=assistant (every answer), or other data.columns; runner/rows.py colours the tokens with loss",
    )


def _texts(example: Example) -> list[str]:
    chats = (
        [example.chosen, example.rejected]
        if isinstance(example, PreferencePair)
        else [example]
        if isinstance(example, ChatExample)
        else []
    )
    return [str(message.get("content", "")) for chat in chats for message in chat.messages]


def _question_and_answer(example: Example) -> tuple[str, str] | None:
    """Return the last question of a conversation and the answer to it."""
    if not isinstance(example, ChatExample):
        return None
    turns = [(message["role"], str(message.get("content", "")).strip()) for message in example.messages]
    answers = [
        i for i, (role, text) in enumerate(turns) if role == "assistant" and text and i and turns[i - 1][0] == "user"
    ]
    return (turns[answers[-1] - 1][1], turns[answers[-1]][1]) if answers else None
