"""Evaluate a trained model on data files: settings, the registry of metrics, and the record that is written and read
again.

A metric is a function in metrics.py, or in a module that the user names in `plugins=[...]`:

    @register_metric("top5_accuracy", reads=("text", "chat"))
    def top5_accuracy(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
        for batch in examples.batches(trained, cfg.batch_size):
            ...
        return {"top5_accuracy": correct / tokens, "loss_tokens": tokens}

`evaluations` of run.json has the newest record of each evaluation; a repeated one replaces it. All records are in
evaluations.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError, print_note, strip_control
from common.guarded_files import check_own_files, open_append
from common.registry import Registry
from common.settings import CheckedSettings, at_least, one_of, settings_class
from data.config import check_max_length
from runner.diagnostics.rows import training_overlap
from runner.diagnostics.symptoms import finite_number, troubleshooting
from runner.inference.evaluation_data import OF_RUN, EvaluationData, EvaluationSet
from runner.inference.load import (
    LoadedModel,
    find_checkpoint,
    load_trained,
    read_settings,
    run_dir_of,
    unreadable_settings,
)
from runner.run_dir.contents import RUN_FILE
from runner.run_dir.metadata import RunMetadata
from runner.tracking.progress import EvaluationProgress

if TYPE_CHECKING:
    from data.sources.files import Source

EVALUATIONS_FILE = "evaluations.jsonl"
TASK_SETTINGS = ("tasks_path", "limit", "shots", "chat_template")
# setting -> metrics of BUILT_IN that read it; those of plugins may read all
METRIC_SETTINGS = {
    "reference": ("preference",),
    **dict.fromkeys(("max_new_tokens", "show"), ("exact_match", "conversation")),
}
BUILT_IN = ("perplexity", "preference", "exact_match", "conversation")

MetricResults = dict[str, float]
Record = dict[str, Any]  # of one evaluation: a line of EVALUATIONS_FILE
# opens what receives the user's request to stop
Listen = Callable[[], AbstractContextManager[Callable[[], bool]]] | None
ComputeMetric = Callable[[LoadedModel, EvaluationSet, "EvaluateConfig"], MetricResults]
# fields that make two records one evaluation
SAME_EVALUATION = ("task", "metric", "data", "shots", "limit", "chat_template", "reference", "dtype", *OF_RUN)
MAX_LABEL = 200  # characters
# The metric that stands for an evaluation where there is one column: the first that it has.
HEADLINES = "acc_norm acc exact_match perplexity byte_perplexity reward_accuracy f1 bleu".split()
NOT_RESULTS = {
    *SAME_EVALUATION,
    *"files weights step loss_tokens rows right answers n lm_eval task_version".split(),
}


@dataclass(frozen=True)
class Metric:
    compute: ComputeMetric
    data_formats: tuple[str, ...]  # formats that it reads (text, chat, preference), tried in this order


METRICS: Registry[Metric] = Registry("metric", "runner.inference.metrics")


def register_metric(name: str, reads: tuple[str, ...]) -> Callable[[ComputeMetric], ComputeMetric]:
    def register(compute: ComputeMetric) -> ComputeMetric:
        METRICS.register(name)(Metric(compute, reads))
        return compute

    return register


@settings_class
class EvaluateConfig(CheckedSettings):
    run: str  # run directory, Hugging Face or PEFT folder, or last: the newest finished run
    metric: str  # what to measure
    data: EvaluationData
    batch_size: int = at_least(1, 16)  # examples per batch
    max_new_tokens: int = at_least(1, 128)  # exact_match, conversation: length limit of an answer (tokens)
    show: int = at_least(0, 5)  # exact_match, conversation: number of wrong answers to print
    tasks: list[str]  # instead of metric and data: tasks of lm-evaluation-harness, e.g. [hellaswag,arc_easy]
    tasks_path: Optional[str]  # folder with your own task files (YAML)
    limit: Optional[int] = at_least(1, 100)  # tasks: rows of each task; null: all
    shots: Optional[int] = at_least(0, 5)  # tasks: solved examples in the context; null: as the task says
    chat_template: bool  # tasks: put questions into the model's chat template
    reference: Optional[str]  # preference: the model before DPO; null: the one that the run started from
    device: str  # auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps (GPU of a Mac)
    # auto (bf16 on a GPU that computes it, else fp32), fp32, bf16 or fp16: the model is rounded to it
    dtype: str = one_of("auto", "fp32", "bf16", "fp16")

    REGISTRIES = {"metric": METRICS}  # --help lists their names

    def __post_init__(self) -> None:
        super().__post_init__()
        METRICS.get(self.metric)
        reads_data = self.metric != "perplexity" or any(getattr(self.data, name) is not None for name in OF_RUN)
        if bool(self.tasks) == bool(self.data.path) or (self.tasks and reads_data):
            both = "tasks, and metric with data.*, are two kinds of evaluation: give one of them"
            message = both if self.tasks else "what to evaluate is missing: data.path or tasks"
            raise UserError(
                message,
                f"tasks={self.tasks} metric={self.metric} data.path={self.data.path}",
                "data.path=FILE metric=perplexity, or tasks=[hellaswag]",
            )

    @property
    def unread(self) -> dict[str, str]:
        return {
            **{name: "tasks=[hellaswag]" for name in TASK_SETTINGS if not self.tasks},
            **{
                name: f"metric={metrics[0]}"
                for name, metrics in METRIC_SETTINGS.items()
                if self.tasks or (self.metric in BUILT_IN and self.metric not in metrics)
            },
        }


def print_partial(record: Record) -> None:
    """Print the result of an evaluation that the user has stopped."""
    _print_record(record)
    print_note(f"stopped: the result is that of {record['n']:,} of {record['of']:,}, and is not recorded")


def _print_record(record: Record) -> None:
    line = json.dumps(record, ensure_ascii=False)
    print(line if strip_control(line) == line else json.dumps(record), flush=True)  # a file may have any name


def evaluate(cfg: EvaluateConfig, folder: Path, listen: Listen = None) -> MetricResults:
    """Evaluate the model in `folder`, print and record the result.

    Where the user stops (`listen`), the result over the rows so far is printed and not recorded. Raises
    KeyboardInterrupt then.
    """
    import torch

    check_own_files(run_dir_of(folder), (EVALUATIONS_FILE,))
    with EvaluationProgress(cfg.metric, listen) as progress:
        # before the weights are read, which takes longer
        data = _settings_of_run(cfg.data, run_dir_of(folder))
        examples = open_evaluation_set(data, cfg.metric, progress)
        trained = load_trained(folder, cfg.device).compute_in(cfg.dtype)
        check_max_length(cfg.data.max_length or 0, trained.model.cfg.max_position_embeddings)
        sources = [source for source, _ in examples.files]
        if overlap := training_overlap(sources, RunMetadata.read(trained.run_dir)):
            measured = f"{overlap.rows:,} of {overlap.total:,} rows are in the training files of this run, too (first: {overlap.first})"
            print_note(f"warning: {measured}: the result is too good; {troubleshooting('test-in-training')}")
        with torch.inference_mode():
            results = METRICS.get(cfg.metric).compute(trained, examples, cfg)
    files = [source.name for source in sources]
    evaluated = {} if files == [cfg.data.path] else {"files": files}
    details = {name: getattr(cfg.data, name) for name in OF_RUN} | {
        "reference": cfg.reference,
        "dtype": trained.dtype,
    }
    details = {name: value for name, value in details.items() if value is not None}
    result = {
        "metric": cfg.metric,
        "data": cfg.data.path,
        **details,
        **evaluated,
        **exported_weights(folder),
        **results,
    }
    if progress.is_stopped:
        print_partial({**result, "partial": True, "n": progress.done, "of": progress.total})
        raise KeyboardInterrupt
    record_results(folder, result)
    return results


def _settings_of_run(data: EvaluationData, run_dir: Path) -> EvaluationData:
    try:
        return data.of_run(read_settings(run_dir).get("data", {}))
    except TypeError as error:
        raise unreadable_settings(run_dir, error) from error


def exported_weights(folder: Path) -> Record:
    """Return which weights `model/` of a run holds, e.g. {"weights": "best", "step": 400}, of a checkpoint its name and
    step; {} without a run.
    """
    from runner.checkpoint.format import step_of

    if checkpoint := find_checkpoint(folder):
        return {"weights": checkpoint.name, "step": step_of(checkpoint.name)}
    export = RunMetadata.read(folder).get("export")
    return {name: export.get(name) for name in ("weights", "step")} if isinstance(export, dict) else {}


def open_evaluation_set(data: EvaluationData, metric: str, progress: EvaluationProgress) -> EvaluationSet:
    """Find the files and detect their schemas.

    Raises UserError if the metric does not read their data format.
    """
    from data.schemas.registry import SCHEMAS, missing_columns, schema_of_source
    from data.sources.files import ReadOptions
    from data.sources.splits import resolve_evaluation_files
    from runner.tracking.data_report import reading_notes

    assert data.path is not None, "refused by EvaluateConfig"
    (sources, note), errors = resolve_evaluation_files(data.path, ReadOptions.of(data), "data.path"), []
    for line in [
        *([note] if note else []),
        *reading_notes(sources),
        *(f"warning: {warning}" for warning in missing_columns(sources)),
    ]:
        print_note(line)
    data_formats = METRICS.get(metric).data_formats
    for data_format in data_formats:
        try:
            typed = SCHEMAS.get(data.schema or "")
            own = typed if typed and typed.data_format == data_format else None
            files = [(source, own or SCHEMAS[schema_of_source(source, data_format)]) for source in sources]
            return EvaluationSet(data, data_format, files, progress)
        except UserError as error:
            errors.append(error)
    # the format fits, the row does not
    fitting = [error for error in errors if getattr(error, "reason", "") != "wrong keys" or "stage=" not in error.fix]
    first = (fitting or errors)[0]
    other = next((name for name in METRICS.names() if name != metric and _reads(name, sources[0])), None)
    raise UserError(
        f"metric={metric} reads {' or '.join(data_formats)} data: {first.message}",
        first.setting,
        f"metric={other} reads this file" if other else first.fix,
    ) from first


def _reads(metric: str, source: Source) -> bool:
    """Return whether a metric reads a file of one of its data formats."""
    from data.schemas.registry import schema_of_source

    for data_format in METRICS.get(metric).data_formats:
        with suppress(UserError):
            return bool(schema_of_source(source, data_format))
    return False


def record_results(folder: Path, record: Record) -> None:
    """Print the record as JSON, append it to evaluations.jsonl in the model's directory, of a checkpoint in that of its
    run, as retention deletes checkpoints, and set it in run.json if `folder` is a run that no process trains.
    """
    _print_record(record)
    try:
        with open_append(run_dir_of(folder) / EVALUATIONS_FILE) as file:
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
    except PermissionError as error:  # of the user, who may read the model; a full disk is a failure
        return print_note(f"warning: the result is not recorded: {error}")
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
            str(record.get("dtype") or ""),
        ]
        label = " ".join(filter(None, parts)) + (f", first {record['limit']}" if record.get("limit") else "")
    else:
        typed = (
            f", {name}={record[name]}"
            for name in ("reference", "dtype", *OF_RUN)
            if isinstance(record.get(name), str | int)
        )
        label = f"{record.get('metric')} {Path(str(record.get('data'))).name}{''.join(typed)}"
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
