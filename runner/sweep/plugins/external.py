"""Launchers and sweepers that are not ours: known to conf/ by names of our own, and led through the books of the sweep."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from common.errors import UserError
from common.paths import REPO_ROOT
from runner.config.overrides import hydra_quote
from runner.launch import subprocesses
from runner.run_dir import lock, metadata
from runner.sweep import scheduler
from runner.sweep.plugins import local
from runner.sweep.plugins.remote_job import RemoteJobFailed, RemoteJobs
from runner.sweep.state import SweepJob

LAUNCHERS = {  # option of hydra/launcher: (module, how it comes)
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "pip install -e '.[submitit]'"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "pip install -e '.[submitit]'"),
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "pip install -e '.[joblib]'"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "pip install -e '.[ray]'"),
}
# The sweeper asks for an Optuna of 2022; it works with today's, which pip would not allow.
SWEEPERS = {"optuna": ("hydra_plugins.hydra_optuna_sweeper", "pip install -e '.[optuna]' && pip install --no-deps hydra-optuna-sweeper==1.3.0")}
# Words that a sweep may keep and a stranger's sweep.json may hold: counts and choices, no code, no place, no line of a script.
STORED_PREFIXES = ("hydra.sweeper.direction", "hydra.sweeper.objectives", "hydra.sweeper.n_trials", "hydra.sweeper.n_jobs", "hydra.sweeper.params.", "hydra.sweeper.sampler.", "hydra.launcher.n_jobs", "hydra.launcher.timeout_min", "hydra.launcher.cpus_per_task", "hydra.launcher.gpus_per_node", "hydra.launcher.mem_gb", "hydra.launcher.array_parallelism")  # fmt: skip
OWN_PLUGINS = {"launcher": ("local",), "sweeper": ("grid", "basic")}
SAVE_TIMEOUT = 60.0  # seconds for the jobs of this machine to save
WATCH_SECONDS = 5.0  # seconds between two looks at how the jobs are getting on


class ExternalLauncher(Launcher):
    """Another's launcher between a sweep and its jobs: it gets only those that are due, and how they ended is read from their folders."""

    def __init__(self, starter: Launcher) -> None:
        self.starter = starter

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.surroundings = {"hydra_context": hydra_context, "config": config}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Every job that is not finished yet. Raises Stopped."""
        from runner.sweep.session import SweepSession, current_sessions, needs_run

        sweep: SweepSession = current_sessions[-1]
        jobs = [sweep.job_of(words) for words in job_overrides]
        todo = [*{job["name"]: job for job in jobs if needs_run(job) and not self._is_busy(sweep, job)}.values()]
        if todo and self._run(sweep, todo):
            raise local.SweepStopped
        return [local.job_return(job, words) for job, words in zip(jobs, job_overrides, strict=True)]

    def _is_busy(self, sweep: Any, job: SweepJob) -> bool:
        if busy := lock.is_locked(sweep.state.folder / job["name"]):
            print(f"{job['name']} is still being trained, it is left alone", file=sys.stderr)
        return busy

    def _run(self, sweep: Any, jobs: list[SweepJob]) -> bool:
        """Returns whether we were asked to stop."""
        self.starter.setup(task_function=RemoteJobs({job["name"]: sweep.child_words(job) for job in jobs}), **self.surroundings)
        for job in jobs:
            job.pop("last_lines", None)
            job.update(status="running", attempt=job["attempt"] + 1, error=None, started=metadata.timestamp(), ended=None, loss=None)
        sweep.state.write()
        # Hydra composes each once more where it lands, for nothing: it shall write nothing into the folder of a run
        words = [[f"hydra.sweep.subdir={hydra_quote(job['name'])}", "hydra.output_subdir=null"] for job in jobs]
        stopped, returns, why = False, [None] * len(jobs), None
        with _picklable_plugins(), _refreshing_report(sweep, jobs):
            try:
                returns = [found._return_value for found in self.starter.launch(words, 0)]
            except (KeyboardInterrupt, SystemExit):  # Ray makes the latter of a SIGTERM
                stopped = True
                self._let_save(sweep, jobs)
            except Exception as error:  # whatever a cluster has to say: the jobs it has taken may go on
                print(f"warning: the launcher gave up, jobs it has taken may go on without it: {error}", file=sys.stderr)
                why = RemoteJobFailed(f"the launcher gave up: {error}")
        for job, found in zip(jobs, returns, strict=True):
            _record_job_end(sweep, job, found or why)
        sweep.state.write()
        sweep.report()
        return stopped

    def _let_save(self, sweep: Any, jobs: list[SweepJob]) -> None:
        """A worker that is told to end has its job save; what a cluster runs goes on without us."""
        if ray := sys.modules.get("ray"):
            ray.shutdown()  # its workers would go on for as long as we are here
        end = time.monotonic() + SAVE_TIMEOUT
        while any(held := [job["name"] for job in jobs if lock.is_locked(sweep.state.folder / job["name"])]) and time.monotonic() < end:
            time.sleep(0.2)
        for name in held:
            print(f"{name} goes on without us", file=sys.stderr)


def _record_job_end(sweep: Any, job: SweepJob, found: Any) -> None:
    """What became of a job: its run.json knows, unless it was killed or refused."""
    folder = sweep.state.folder / job["name"]
    job.update(state.job_status(job, metadata.read_run_metadata(folder)))
    if job["status"] == "completed":
        job.pop("pending_overrides", None)
    elif isinstance(found, RemoteJobFailed) and not lock.is_locked(folder):
        log = folder / scheduler.CONSOLE_LOG
        job.update(
            status="failed", error=" ".join(str(found).split()), last_lines=subprocesses.last_lines(log) if log.exists() else [], ended=metadata.timestamp()
        )
        print(f"{job['name']} failed: {job['error']}", file=sys.stderr)


@contextmanager
def _refreshing_report(sweep: Any, jobs: list[SweepJob]) -> Iterator[None]:
    """sweep.json and the report follow the jobs while the launcher waits for all of them; SIGTERM ends the wait as Ctrl-C does."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(WATCH_SECONDS):
            ended = [
                job for job in jobs if job["status"] == "running" and metadata.read_run_metadata(sweep.state.folder / job["name"]).get("status") == "completed"
            ]
            for job in ended:
                job.update(state.job_status(job, metadata.read_run_metadata(sweep.state.folder / job["name"])))
            if ended:
                sweep.state.write()
                sweep.report()

    watcher = threading.Thread(target=look, daemon=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _picklable_plugins() -> Iterator[None]:
    """What is sent to other processes can be unpacked there: they find this repository, and our plugins by their true names."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO_ROOT), *filter(None, [before])])
    plugins = [plugin for name, plugin in Plugins.instance().class_name_to_class.items() if name.startswith(local.PLUGIN_MODULE)]
    for plugin in plugins:
        plugin.__module__ = local.plugin_modules[plugin.__name__]
    try:
        yield
    finally:
        for plugin in plugins:
            plugin.__module__ = local.PLUGIN_MODULE
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def make_launcher(hydra_context: Any, task_function: Any, config: Any) -> Launcher:
    """The launcher a sweeper of ours works with."""
    starter = Plugins.instance().instantiate_launcher(hydra_context=hydra_context, task_function=task_function, config=config)
    if isinstance(starter, local.LocalLauncher):
        return starter
    foreign = ExternalLauncher(starter)
    foreign.setup(hydra_context=hydra_context, task_function=task_function, config=config)
    return foreign


def check_plugins(typed: Sequence[str]) -> None:
    """Refuse a launcher or sweeper that is not installed, one that nothing here leads, and words they could do nothing with."""
    local.check_launcher_overrides(typed)
    chosen = {"hydra/launcher": "local", "hydra/sweeper": "grid"}
    for word in typed:
        group, _, name = word.lstrip("+").partition("=")
        chosen[group] = name
        if (group, name) == ("hydra/sweeper/sampler", "cmaes"):
            raise UserError(
                "this sampler keeps pickles in the study: whoever sends you a sweep could have code run", word, "choose tpe, nsgaii, random or grid"
            )
        known = {"hydra/launcher": LAUNCHERS, "hydra/sweeper": SWEEPERS}.get(group)
        if known is None or name in OWN_PLUGINS[group.removeprefix("hydra/")]:
            continue
        if name not in known:
            raise UserError(
                "a sweep of ours cannot go through this one", word, f"choose one of {', '.join([*OWN_PLUGINS[group.removeprefix('hydra/')], *known])}"
            )
        module, how = known[name]
        if find_spec("hydra_plugins") is None or find_spec(module) is None:
            raise UserError("this is not installed", word, how)
    if chosen["hydra/sweeper"] == "basic" and chosen["hydra/launcher"] != "local":
        raise UserError(
            "Hydra's own sweeper would go past the books of the sweep here",
            f"hydra/sweeper=basic hydra/launcher={chosen['hydra/launcher']}",
            "leave out hydra/sweeper=basic",
        )


def alias_plugin_configs() -> None:
    """What a plugin calls joblib is joblib_plugin to conf/hydra/launcher/joblib.yaml, which builds on it. Under one name Hydra would warn of both."""
    store = ConfigStore.instance()
    for group, known in (("launcher", LAUNCHERS), ("sweeper", SWEEPERS)):
        for name in known.keys() & {file.removesuffix(".yaml") for file in store.repo.get("hydra", {}).get(group, {})}:
            node = store.repo["hydra"][group].pop(f"{name}.yaml").node
            if group == "sweeper":
                # the plugin calls Optuna as one did in 2022, and Optuna says so at every call
                warnings.filterwarnings("ignore", message=".* been deprecated in v", category=FutureWarning)
                node = OmegaConf.create(OmegaConf.to_container(node))  # without the types: it has a word more
                node.update({"_target_": f"{local.PLUGIN_MODULE}.StudySweeper", "objectives": "???"})
            store.store(group=f"hydra/{group}", name=f"{name}_plugin", node=node, provider="runner")
