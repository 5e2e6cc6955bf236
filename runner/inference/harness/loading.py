"""Load the tasks that are asked for, with their data, before the weights of a model are read.

What cannot be loaded is refused with what to type.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.errors import UserError, did_you_mean
from common.hub import is_hub_offline
from runner.tracking.progress import PolledProgress

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

KNOWN_VERSION = "0.4.13"  # of lm-eval: earlier ones have no index of tasks
CONNECT_TIMEOUT = 3.0  # seconds; the libraries of the hub try for 25 seconds and more, for each data set
LoadedTasks = dict[str, Any]  # tasks, groups and group_map of lm_eval.tasks.TaskManager.load


def load_tasks(names: list[str], folder: str | None) -> dict[str, LoadedTasks]:
    """Return the tasks of each name (a task, a group or a tag).

    `folder`: with task files (YAML) of the user, which may name functions beside them.

    Raises UserError without the harness, for an unknown name, and for a task whose data are not on this machine and
    cannot be downloaded.
    """
    if folder and not Path(folder := os.path.expanduser(folder)).is_dir():
        raise UserError(
            "the folder of tasks does not exist", f"tasks_path={folder}", "give a folder with task files (YAML)"
        )
    _set_environment()
    try:
        import lm_eval.tasks._index
    except ImportError as error:
        is_other_version = (error.name or "").startswith("lm_eval.")
        message = (
            f"lm-eval {version('lm_eval')} is not supported: {error}"
            if is_other_version
            else f"tasks need the package {error.name}"
        )
        raise UserError(
            message, f"tasks={names}", f'pip install "lm-runner[eval]", or pip install lm-eval=={KNOWN_VERSION}'
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about defaults of its own task files
    with PolledProgress("reading the task files"):
        manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
        index = manager.task_index
        index |= {name: entry for name, entry in _tasks_of_harness().items() if name not in index}
    if unknown := next((name for name in names if name not in index), None):
        hint = did_you_mean(unknown, index, "tasks_path=FOLDER adds your own")
        raise UserError(f"lm-evaluation-harness has no task {unknown}", f"tasks={names}", hint)
    return {name: _load(manager, name) for name in dict.fromkeys(names)}


@cache
def _tasks_of_harness() -> dict[str, Any]:
    """Return its index of tasks, groups and tags, which takes 10 seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager().task_index


def _set_environment() -> None:
    """Set what the libraries read when they are imported: no download attempts without a network, no bars beside ours,
    no processes for error bars.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if not is_hub_offline() and not _can_reach_hub():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if is_hub_offline():
        os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")  # the library of metrics has a switch of its own


def _can_reach_hub() -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only its client can tell
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), CONNECT_TIMEOUT
        ).close()
    except (OSError, ValueError):
        return False
    return True


def _load(manager: TaskManager, name: str) -> LoadedTasks:
    try:
        return dict(manager.load(name))
    except Exception as error:  # a task file is a program: whatever it raises is a fault of the task, or of its data
        task, cause = _find_failing(manager, name, error)
        raise _load_error(manager, name, task, cause) from error


def _find_failing(manager: TaskManager, name: str, error: Exception) -> tuple[str, Exception]:
    """Return the task of a group or tag that cannot be loaded, and why."""
    entry = manager.task_index[name]
    members = entry.tags if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
    for member in () if isinstance(members, str | None) else members:
        try:
            manager.load(member)
        except Exception as cause:  # as above
            is_known = isinstance(member, str) and member in manager.task_index
            return _find_failing(manager, member, cause) if is_known else (name, cause)
    return name, error


def _load_error(manager: TaskManager, name: str, task: str, error: Exception) -> UserError:
    entry = manager.task_index[task]
    config = entry.cfg or {}
    path, part = config.get("dataset_path"), config.get("dataset_name")
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, ModuleNotFoundError):
        return UserError(
            f"the task {task} needs the package {error.name}", entry.yaml_path, f"pip install {error.name}"
        )
    if isinstance(error, ConnectionError) or type(error).__name__ in (
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
    ):
        arguments = ", ".join(json.dumps(str(each)) for each in (path, part) if each)
        download = f"import datasets; datasets.load_dataset({arguments})"
        if task != name:  # those of all its members
            download = f"from lm_eval.tasks import TaskManager; TaskManager().load({json.dumps(name)})"
        command = f"python -c {shlex.quote(download)}"
        message = f"the data set {path}{f' ({part})' if part else ''} of the task {task} is not on this machine, and the hub cannot be reached"
        home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
        return UserError(
            message,
            f"task {task}: {entry.yaml_path}",
            f"where there is a network: {command}; then copy its {home} to this machine",
        )
    return UserError(
        f"the task {task} cannot be loaded: {type(error).__name__}: {reason}",
        entry.yaml_path,
        "correct the task file or its data",
    )


def check_shots(tasks: dict[str, Task], shots: int | None) -> str | None:
    """Return a note on the tasks whose definition fixes that they have no examples."""
    fixed = [name for name, task in tasks.items() if shots and task.get_config("num_fewshot") == 0]
    return (
        f"warning: shots={shots} has no effect on {', '.join(fixed[:3])}: the task is defined with 0" if fixed else None
    )
