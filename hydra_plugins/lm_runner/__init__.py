"""Hydra's plugins of this program: `hydra/launcher=local|submitit|ray` and `hydra/sweeper=grid|halving|optuna`.

Hydra executes every module of the namespace package `hydra_plugins` (hence no __init__.py there) when it starts, and
registers the plugin classes it finds. Nothing else may import this module: it would be executed twice. What the plugins
do is in runner/sweep.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from common.errors import UserError
from runner.sweep.backends import LAUNCHERS
from runner.sweep.optuna_search import SWEEPERS

for group, nodes in (("launcher", LAUNCHERS), ("sweeper", SWEEPERS)):
    for name, node in nodes.items():
        ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node, provider="lm_runner")


class JobLauncher(Launcher):
    """Names the options of `hydra/launcher`: the sweepers below run their jobs on the backend that these choose."""

    def __init__(self, **options: Any) -> None: ...

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None: ...

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise UserError(
            "hydra/launcher needs a sweeper of this program",
            "hydra/sweeper",
            "hydra/sweeper=grid, halving or optuna",
        )


class GridSweeper(Sweeper):
    """Trains every combination of the swept values."""

    def __init__(self, **options: Any) -> None: ...

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config: Any = config

    def sweep(self, arguments: list[str]) -> None:
        from runner.sweep.command import run_sweep

        run_sweep(self.config, arguments)


class HalvingSweeper(GridSweeper):
    """Trains every combination of the swept values, the worse ones not to their end."""


class OptunaSweeper(GridSweeper):
    """Trains the points that Optuna draws, each as soon as a worker is free."""
