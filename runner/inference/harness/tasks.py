"""evaluate.py tasks=[...]: run tasks of lm-evaluation-harness; results are recorded like those of metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, did_you_mean
from common.guarded_files import check_own_files
from runner.inference.evaluate import EVALUATIONS_FILE, EvaluateConfig, MetricResults, record_results
from runner.inference.load import load_trained

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel


def evaluate_tasks(cfg: EvaluateConfig, folder: Path) -> MetricResults:
    """Run the tasks `cfg.tasks` on the model in `folder`; print and record their results."""
    check_own_files(folder, (EVALUATIONS_FILE,))
    trained = load_trained(folder, cfg.device)
    results = run_tasks(trained, cfg.tasks, cfg.tasks_path, cfg.limit, cfg.shots, cfg.chat_template, cfg.batch_size)
    settings = {"limit": cfg.limit, "shots": cfg.shots, "chat_template": cfg.chat_template}
    record_results(folder, {"tasks": cfg.tasks, **{name: value for name, value in settings.items() if value}, **results})
    return results


def run_tasks(
    trained: LoadedModel, tasks: list[str], folder: str | None, limit: int | None, shots: int | None, is_chat: bool, batch_size: int
) -> dict[str, float]:
    """Return {"<task>/<metric>": value}. `folder`: with task files (YAML) of the user; `limit`: rows of each task; `shots`: examples in the context.

    Raises UserError for an unknown task, and for data that is not on this machine.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from runner.inference.harness.model import HarnessModel
    except ModuleNotFoundError as error:
        raise UserError(f"tasks need the package {error.name}", f"tasks={tasks}", 'pip install "lm-runner[eval]", or pip install lm-eval') from error
    if is_chat and trained.tokenizer.chat_template is None:
        raise UserError("this model has no chat template", "chat_template=true", "chat_template=false")
    if folder is not None and not Path(folder).is_dir():
        raise UserError("the folder of tasks does not exist", f"tasks_path={folder}", "give a folder with task files (YAML)")
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or not set(tasks) <= set(manager.all_tasks):  # reading the tasks of the harness takes seconds
        manager = TaskManager(include_path=folder)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise UserError(
            f"lm-evaluation-harness has no task {unknown[0]}", f"tasks={tasks}", did_you_mean(unknown[0], manager.all_tasks, "tasks_path=FOLDER adds your own")
        )
    model = HarnessModel(trained, batch_size, _print_progress)
    try:
        results = lm_eval.simple_evaluate(
            model, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots, apply_chat_template=is_chat, bootstrap_iters=0, log_samples=False
        )
    except (OSError, ConnectionError, ValueError) as error:
        raise UserError(
            f"the harness cannot run the tasks: {str(error).splitlines()[0]}", f"tasks={tasks}", "their data must be on this machine, or reachable"
        ) from error
    assert results is not None
    return dict(sorted(_flat(results["results"])))


def _flat(results: dict[str, dict[str, Any]]) -> list[tuple[str, float]]:
    return [
        (f"{task}/{name.removesuffix(',none')}", float(value))
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, (int, float)) and "stderr" not in name and name != "sample_len"
    ]


def _print_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} requests", end="\n" if done == total else "", file=sys.stderr, flush=True)
