"""Symptoms in the rows of a run, before its first step: text of another chat template, answers that teach nothing, few
tokens with loss.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        0,
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
        "bad-labels", 0, measured, "name the right columns, e.g. 'data.columns={prompt: question, completion: answer}'"
    )


def few_labels(stats: RowStats) -> Symptom | None:
    if not stats.tokens or stats.loss_tokens >= LABELLED_SHARE * stats.tokens:
        return None
    share, per_row = stats.loss_tokens / stats.tokens, stats.loss_tokens / max(1, stats.kept)
    return Symptom(
        "few-labels",
        0,
        f"{stats.loss_tokens:,} of {stats.tokens:,} tokens have loss ({share:.1%}, {per_row:.1f} a row)",
        "data.loss_on=assistant (every answer), or other data.columns; runner/rows.py colours the tokens with loss",
    )
