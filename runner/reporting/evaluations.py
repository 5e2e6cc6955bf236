"""Results of evaluate.py beside those of the training: in run.json, in leaderboards and in reports.

`evaluations` of run.json has the newest record of each evaluation; a repeated one replaces it. All records are in
evaluations.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import UserError, print_note
from runner.diagnostics.history import finite_number
from runner.inference.evaluate import Record, record_results
from runner.run_dir.contents import RUN_FILE
from runner.run_dir.metadata import RunMetadata

# fields that make two records one evaluation
SAME_EVALUATION = ("task", "metric", "data", "shots", "limit", "chat_template")
MAX_LABEL = 200  # characters
# The metric that stands for an evaluation where there is one column: the first that it has.
HEADLINES = ("acc_norm", "acc", "exact_match", "perplexity", "byte_perplexity", "reward_accuracy", "f1", "bleu")
NOT_RESULTS = {
    *SAME_EVALUATION,
    "files",
    "weights",
    "step",
    "loss_tokens",
    "rows",
    "right",
    "answers",
    "n",
    "lm_eval",
    "task_version",
}


def record_everywhere(folder: Path, record: Record) -> None:
    """Print the record, append it to evaluations.jsonl, and set it in run.json if `folder` is a run that no process
    trains.
    """
    record_results(folder, record)
    if not (folder / RUN_FILE).is_file():
        return
    try:
        metadata = RunMetadata.open(folder, resume=True)
    except UserError as error:
        return print_note(f"warning: the result is in evaluations.jsonl, but not in run.json: {error.message}")
    try:
        others = [
            other
            for other in metadata.fields["evaluations"]
            if not isinstance(other, dict) or identity_of(other) != identity_of(record)
        ]
        metadata.update(evaluations=[*others, record])
    finally:
        metadata.close()


def identity_of(record: Record) -> tuple:
    return tuple(record.get(name) for name in SAME_EVALUATION)


def evaluation_label(record: Record) -> str:
    """Return e.g. `hellaswag 5-shot, first 100` or `perplexity sft_val.jsonl`."""
    if task := record.get("task"):
        parts = [
            str(task),
            f"{record['shots']}-shot" if record.get("shots") else "",
            "chat" if record.get("chat_template") else "",
        ]
        label = " ".join(filter(None, parts)) + (f", first {record['limit']}" if record.get("limit") else "")
    else:
        label = f"{record.get('metric')} {Path(str(record.get('data'))).name}"
    return label[:MAX_LABEL]


def results_of(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record by their names, without counts and settings."""
    values = (
        record["results"]
        if isinstance(record.get("results"), dict)
        else {name: each for name, each in record.items() if name not in NOT_RESULTS}
    )
    numbers = {str(name): finite_number(value) for name, value in values.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def headline(names: Iterable[str]) -> str | None:
    """Return the name of the metric that stands for an evaluation."""
    plain = {name.partition(",")[0]: name for name in reversed([*names]) if "_stderr" not in name}
    return next((plain[name] for name in HEADLINES if name in plain), next(iter(reversed(plain.values())), None))


def current_evaluations(metadata: dict[str, Any]) -> list[Record]:
    """Return the evaluations of the weights that `model/` holds now, from the fields of run.json."""
    export, found = metadata.get("export"), metadata.get("evaluations")
    step = export.get("step") if isinstance(export, dict) else None
    return (
        [record for record in found if isinstance(record, dict) and record.get("step") == step]
        if isinstance(found, list)
        else []
    )
