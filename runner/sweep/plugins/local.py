"""Hydra's side of a sweep: a sweeper that knows which points are left, and a launcher that gives each job a process of its own."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from common.errors import UserError, did_you_mean

PLUGIN_MODULE = "hydra_plugins.runner"  # Hydra takes plugins from this namespace only
plugin_modules: dict[str, str] = {}  # where our plugins are, by the name of their class
LAUNCHER_KEY = "hydra.launcher."
LAUNCHER_OPTIONS = {  # what our launcher is told, and what each takes; the values stand in conf/hydra/launcher/local.yaml
    "workers": "a whole number, 1 or more",
    "devices": "a list in brackets, e.g. [0,1]",
    "fail_fast": "true or false",
    "retries": "a whole number, 0 or more",
}


class SweepStopped(Exception):
    """The sweep was asked to stop; its running jobs have saved."""


class SweepJobFailed(HydraException):
    """What a sweeper finds in the place of a loss."""


class LocalLauncher(Launcher):
    """Each job as a process on this machine; one that dies takes no other with it."""

    def __init__(self, workers: int | None, devices: list[Any] | None, fail_fast: bool, retries: int) -> None:
        self.slots = _job_slots({"workers": workers, "devices": devices})
        self.fail_fast, self.retries = fail_fast, retries

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Nothing: a job is composed in its own process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Every job that is not finished yet. Raises Stopped."""
        from runner.sweep.session import current_sessions, needs_run

        sweep = current_sessions[-1]
        jobs = [sweep.job_of(words) for words in job_overrides]
        todo = {job["name"]: job for job in jobs if needs_run(job)}
        if sweep.children().run([*todo.values()], self.slots, self.fail_fast, self.retries):
            raise SweepStopped
        return [job_return(job, words) for job, words in zip(jobs, job_overrides, strict=True)]


class GridSweeper(Sweeper):
    """Every point of the sweep that is not finished, whatever the launcher. They were composed and checked before Hydra came in."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from runner.sweep.plugins.external import make_launcher

        self.starter = make_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        from runner.sweep.session import current_sessions, needs_run

        sweep = current_sessions[-1]
        batch = [[f"{key}={value}" for key, value in job["overrides"].items()] for job in sweep.state.jobs if needs_run(job)]
        return self.starter.launch(batch, initial_job_idx=0) if batch else []


def job_return(job: dict[str, Any], words: Sequence[str]) -> JobReturn:
    """A job that diverged has a loss, infinity: a sampler learns from it."""
    ended = job["status"] == "completed" or job["loss"] == "inf"
    value = float(job["loss"] or 0.0) if ended else SweepJobFailed(f"{job['name']}: {job['error'] or job['status']}")
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED if ended else JobStatus.FAILED, _return_value=value)


def check_launcher_overrides(words: Sequence[str]) -> None:
    """Refuse words to Hydra that a sweep would stumble over when it stands there already."""
    from runner.config.hydra_errors import translating_hydra_errors

    chosen = [word for word in words if word.lstrip("+").startswith("hydra/launcher=")]
    ours = not chosen or chosen[-1].endswith("=local")
    options: dict[str, Any] = {}
    for word in words:
        name = word.lstrip("+").partition("=")[0]
        if not name.startswith(("hydra.", "hydra/")) or "=" not in word:
            continue
        with translating_hydra_errors([word]):
            override = OverridesParser.create().parse_override(word)
        option = name.removeprefix(LAUNCHER_KEY)
        if option != name and ours and option not in LAUNCHER_OPTIONS:
            raise UserError(
                "our launcher has no such word",
                name,
                did_you_mean(name, [LAUNCHER_KEY + field for field in LAUNCHER_OPTIONS], f"it has {', '.join(LAUNCHER_OPTIONS)}"),
            )
        if override.is_sweep_override():
            values = word.partition("=")[2]
            raise UserError("one value is meant here", word, f"write '{name}=[{values}]'" if option == "devices" else "only words of the training can be swept")
        if option != name and ours and "${" not in word:
            _check_option(option, override.value())
            options[option] = override.value()
    _job_slots(options)


def check_launcher_options(options: Mapping[str, Any]) -> None:
    """The same of what stands in conf/."""
    for name in LAUNCHER_OPTIONS:
        _check_option(name, options[name])
    _job_slots(options)


def _job_slots(options: Mapping[str, Any]) -> list[Any]:
    from runner.sweep.scheduler import make_slots

    return make_slots(options.get("workers"), [str(device) for device in options.get("devices") or []] or None)


def _check_option(name: str, value: Any) -> None:
    if name == "devices":
        fits = value is None or (isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and all(map(_is_device, value)))
    elif name == "fail_fast":
        fits = isinstance(value, bool)
    else:
        fits = (value is None and name == "workers") or (type(value) is int and value >= (name == "workers"))
    if not fits:
        alone = name == "devices" and _is_device(value)
        raise UserError(
            "this word takes " + LAUNCHER_OPTIONS[name],
            f"{LAUNCHER_KEY}{name}={value}",
            f"write '{LAUNCHER_KEY}{name}=[{value}]'" if alone else f"give {LAUNCHER_OPTIONS[name]}",
        )


def _is_device(value: Any) -> bool:
    """Its number, or its name as nvidia-smi -L has it."""
    return (type(value) is int and value >= 0) or (isinstance(value, str | QuotedString) and bool(str(value)))


def register_plugins() -> None:
    """Give ours a name where Hydra looks for plugins, without a hydra_plugins/ folder beside runner/."""
    from runner.sweep.plugins import external, optuna_sweeper

    if PLUGIN_MODULE in sys.modules:
        return
    plugins = Plugins.instance()  # scans those that are installed
    try:
        space = importlib.import_module("hydra_plugins")
    except ImportError:
        space = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        space.__path__ = []
        space.__spec__ = ModuleSpec("hydra_plugins", None, is_package=True)  # importlib asks for it when another plugin is looked for
    home = sys.modules[PLUGIN_MODULE] = types.ModuleType(PLUGIN_MODULE)
    space.runner = home  # type: ignore[attr-defined]  # as an import of it would have done
    for plugin in (LocalLauncher, GridSweeper, optuna_sweeper.OptunaSweeper):
        plugin_modules[plugin.__name__] = plugin.__module__
        plugin.__module__ = PLUGIN_MODULE
        setattr(home, plugin.__name__, plugin)
        plugins.register(plugin)
    store = ConfigStore.instance()
    store.store(
        group="hydra/launcher",
        name="local_plugin",
        node={"_target_": f"{PLUGIN_MODULE}.LocalLauncher", **dict.fromkeys(LAUNCHER_OPTIONS, "???")},
        provider="runner",
    )
    store.store(group="hydra/sweeper", name="grid", node={"_target_": f"{PLUGIN_MODULE}.GridSweeper"}, provider="runner")
    external.alias_plugin_configs()
