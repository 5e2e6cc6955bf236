"""evaluate.py tasks=[...]: run tasks of lm-evaluation-harness; results are recorded like those of metrics."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import StopRequested, UserError, print_note
from common.guarded_files import check_own_files
from runner.inference.evaluate import (
    EVALUATIONS_FILE,
    EvaluateConfig,
    Listen,
    Record,
    exported_weights,
    print_partial,
    record_results,
)
from runner.inference.harness.loading import LoadedTasks, check_shots, load_tasks
from runner.inference.load import load_trained, run_dir_of
from runner.tracking.progress import EvaluationProgress

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from runner.inference.harness.model import HarnessModel

SEED = 1234  # of examples and of sampled answers: the harness's own
BOOTSTRAP_SAMPLES = 1000  # for the standard error of metrics that are no means


def evaluate_tasks(cfg: EvaluateConfig, folder: Path, listen: Listen = None) -> list[Record]:
    """Run the tasks `cfg.tasks` on the model in `folder`; print and record the results of each as soon as it is done.

    Where the user stops (`listen`), the result over the documents so far is printed and not recorded. Raises
    KeyboardInterrupt then.
    """
    check_own_files(run_dir_of(folder), (EVALUATIONS_FILE,))
    tasks = load_tasks(cfg.tasks, cfg.tasks_path)
    trained, records = load_trained(folder, cfg.device).compute_in(cfg.dtype), []
    if cfg.chat_template and trained.tokenizer.chat_template is None:
        raise UserError("this model has no chat template", "chat_template=true", "chat_template=false")
    with EvaluationProgress("tasks", listen) as progress:
        from runner.inference.harness.model import HarnessModel

        for name, loaded in tasks.items():
            progress.title = name
            model = HarnessModel(trained, cfg.batch_size, progress)
            for result in run_task(model, name, loaded, cfg):
                progress.hide()
                each = exported_weights(folder) | result
                if trained.dtype:
                    each["dtype"] = trained.dtype
                if progress.is_stopped:
                    print_partial(each)
                else:
                    record_results(folder, each)
                records.append(each)
            if progress.is_stopped:
                if not records or not records[-1].get("partial"):
                    print_note(f"stopped: {name} has no result yet")
                raise KeyboardInterrupt
    return records


def run_task(model: HarnessModel, name: str, loaded: LoadedTasks, cfg: EvaluateConfig) -> Iterator[Record]:
    """Yield the record of a task or group, or of each task of a tag.

    After a stop, those of the documents that are done, task by task.
    """
    if note := check_shots(loaded["tasks"], cfg.shots):
        print_note(note)
    try:
        results = _compute(model, loaded, cfg, cfg.limit)
    except StopRequested:
        model.answers.is_complete = True
        for task_name, task in loaded["tasks"].items():
            if done := model.answers.count_documents(task):
                one = {"tasks": {task_name: task}, "groups": {}, "group_map": {}}
                record = _record(_compute(model, one, cfg, done), task_name, cfg)
                yield {**record, "partial": True, "of": _num_documents([task], cfg.limit)}
        return
    if model.shortened:
        print_note(
            f"warning: {name}: {model.shortened:,} contexts are longer than the model's {model.max_length:,} tokens and have lost their beginning"
        )
    for top in [name] if name in loaded["groups"] else loaded["tasks"]:
        yield _record(results, top, cfg)


def _compute(model: HarnessModel, loaded: LoadedTasks, cfg: EvaluateConfig, limit: int | None) -> dict[str, Any]:
    """Return what lm_eval.simple_evaluate returns, without its report on the machine, which takes seconds."""
    import numpy
    import torch
    from lm_eval import evaluator

    random.seed(0)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    for task in loaded["tasks"].values():
        _set_shots(task, cfg.shots)
    _show_preparation(loaded["tasks"], model, limit)
    try:
        with redirect_stdout(io.StringIO()):  # a bootstrap prints its name
            results = evaluator.evaluate(
                model,
                loaded,
                limit=limit,
                bootstrap_iters=BOOTSTRAP_SAMPLES,
                log_samples=False,
                apply_chat_template=cfg.chat_template,
                fewshot_as_multiturn=cfg.chat_template,
            )
    except (UserError, StopRequested):
        raise
    # what a task raises about its own rows, e.g. from its templates; the model's own errors are shown as they are
    except Exception as error:
        if model.is_computing:
            raise
        reason = (str(error).splitlines() or [""])[0]
        message = f"the task cannot be run: {type(error).__name__}: {reason}"
        raise UserError(
            message, f"tasks={list(loaded['tasks'])[:3]}", "correct the task file or its data, or leave the task out"
        ) from error
    assert results is not None
    return dict(results)


def _set_shots(task: Task, shots: int | None) -> None:
    """Set the number of examples as lm_eval.simple_evaluate does."""
    defined = task.get_config("num_fewshot")
    if shots is not None and defined != 0:
        task.set_config("num_fewshot", shots)
    elif defined is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEED)


def _show_preparation(tasks: dict[str, Task], model: HarnessModel, limit: int | None) -> None:
    """Show how many documents have become requests, which takes minutes for large tasks.

    The user may stop it.
    """
    for task in tasks.values():
        vars(task).pop("fewshot_context", None)  # of an earlier call
    if model.answers.is_complete:
        return
    progress, done = model.progress, 0
    progress.begin("documents prepared", _num_documents(tasks.values(), limit))

    def counting(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_document(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if progress.should_stop():
                raise StopRequested
            done += 1
            progress.advance(done)
            return prepare(*arguments, **options)

        return prepare_document

    for task in tasks.values():
        vars(task)["fewshot_context"] = counting(task.fewshot_context)


def _num_documents(tasks: Iterable[Task], limit: int | None) -> int:
    counts = [len(task.eval_docs) for task in tasks]
    return sum(counts if limit is None else (min(limit, count) for count in counts))


def _record(results: dict[str, Any], name: str, cfg: EvaluateConfig) -> Record:
    """Return the record of a task or group from the results of the harness."""
    counts = {task: int(count["effective"]) for task, count in results["n-samples"].items()}
    values = {each: _values(metrics) for each, metrics in results["results"].items()}
    record: Record = {
        "task": name,
        "shots": results["n-shot"].get(name),
        "limit": cfg.limit,
        "chat_template": cfg.chat_template,
        "n": counts.get(name, sum(counts.values())),
        "task_version": results["versions"].get(name),
        "lm_eval": version("lm_eval"),
        "results": values[name],
    }
    if name not in counts:  # a group
        record["members"] = {task: {"n": counts[task], **values[task]} for task in values if task in counts}
    return record


def _values(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics and their standard errors; one that a filter has computed has its name:
    `exact_match,strict-match`.
    """
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("sample_len", "sample_count")
    }
