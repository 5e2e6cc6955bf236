"""Hydra's side of a sweep: a sweeper that knows which points are left, and a launcher that gives each job a process of its own."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

HOME = "hydra_plugins.runner"  # Hydra takes plugins from this namespace only
homes: dict[str, str] = {}  # where our plugins are, by the name of their class
FIELDS = ("workers", "devices", "fail_fast", "retries")  # their values stand in conf/hydra/launcher/local.yaml


class Stopped(Exception):
    """The sweep was asked to stop; its running jobs have saved."""


class JobFailed(HydraException):
    """What a sweeper finds in the place of a loss."""


class LocalLauncher(Launcher):
    """Each job as a process on this machine; one that dies takes no other with it."""

    def __init__(self, workers: int | None, devices: list[Any] | None, fail_fast: bool, retries: int) -> None:
        from runner.launch.children import slots

        self.slots = slots(workers, [str(device) for device in devices or []] or None)
        self.fail_fast, self.retries = fail_fast, retries

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Nothing: a job is composed in its own process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Every job that is not finished yet. Raises Stopped."""
        from runner.launch.underway import current, is_due

        sweep = current[-1]
        jobs = [sweep.job_of(words) for words in job_overrides]
        todo = {job["name"]: job for job in jobs if is_due(job)}
        if sweep.children().run([*todo.values()], self.slots, self.fail_fast, self.retries):
            raise Stopped
        return [returned(job, words) for job, words in zip(jobs, job_overrides, strict=True)]


class GridSweeper(Sweeper):
    """Every point of the sweep that is not finished, whatever the launcher. They were composed and checked before Hydra came in."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from runner.launch.foreign import started_by

        self.starter = started_by(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        from runner.launch.underway import current, is_due

        sweep = current[-1]
        batch = [[f"{key}={value}" for key, value in job["words"].items()] for job in sweep.ledger.jobs if is_due(job)]
        return self.starter.launch(batch, initial_job_idx=0) if batch else []


def returned(job: dict[str, Any], words: Sequence[str]) -> JobReturn:
    """A job that diverged has a loss, infinity: a sampler learns from it."""
    ended = job["status"] == "completed" or job["loss"] == "inf"
    value = float(job["loss"] or 0.0) if ended else JobFailed(f"{job['name']}: {job['error'] or job['status']}")
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED if ended else JobStatus.FAILED, _return_value=value)


def register() -> None:
    """Give ours a name where Hydra looks for plugins, without a hydra_plugins/ folder beside runner/."""
    from runner.launch import foreign, study

    if HOME in sys.modules:
        return
    plugins = Plugins.instance()  # scans those that are installed
    try:
        space = importlib.import_module("hydra_plugins")
    except ImportError:
        space = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        space.__path__ = []
        space.__spec__ = ModuleSpec("hydra_plugins", None, is_package=True)  # importlib asks for it when another plugin is looked for
    home = sys.modules[HOME] = types.ModuleType(HOME)
    space.runner = home  # type: ignore[attr-defined]
    for plugin in (LocalLauncher, GridSweeper, study.StudySweeper):
        homes[plugin.__name__] = plugin.__module__
        plugin.__module__ = HOME
        setattr(home, plugin.__name__, plugin)
        plugins.register(plugin)
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="local_plugin", node={"_target_": f"{HOME}.LocalLauncher", **dict.fromkeys(FIELDS, "???")}, provider="runner")
    store.store(group="hydra/sweeper", name="grid", node={"_target_": f"{HOME}.GridSweeper"}, provider="runner")
    foreign.alias()
