"""What a sweep takes in: words to Hydra, words that are written down, words behind resume=."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from common.errors import UserError
from runner.config import overrides
from runner.launch import torchrun
from runner.run_dir import resume
from runner.run_dir.metadata import read_run_metadata
from runner.sweep.plugins import external, optuna_sweeper
from runner.sweep.plugins.local import LAUNCHER_OPTIONS, check_launcher_options
from runner.sweep.state import SweepState

SWEEP_DIR_KEY = "hydra.sweep.dir="
HYDRA_PREFIXES = ("hydra.", "hydra/")
GRID_SWEEPER, FINITE_SWEEPERS = "grid", ("grid", "basic")  # the sweeper whose points we know beforehand
STORED_HYDRA_KEYS = ("hydra/sweeper", "hydra/sweeper/sampler", "hydra/launcher", *(f"hydra.launcher.{word}" for word in LAUNCHER_OPTIONS))


def check_hydra_choices(tree: DictConfig, counted: bool, shared: list[str]) -> tuple[str, str]:
    """(sweeper, launcher). Whatever they would stumble over is refused before there is a folder."""
    sweeper, launcher = (tree.hydra.runtime.choices[f"hydra/{part}"] for part in ("sweeper", "launcher"))
    external.check_plugins([f"hydra/sweeper={sweeper}", f"hydra/launcher={launcher}"])  # a file of conf/ may choose, too
    torchrun.check_sweep_launcher(launcher, tree.hydra.launcher)
    if sweeper in FINITE_SWEEPERS and not counted:
        raise UserError(
            "this sweeper goes through lists of values, it draws none", "hydra/sweeper=" + sweeper, "add hydra/sweeper=optuna, or give the values: a,b,c"
        )
    if sweeper != GRID_SWEEPER and tree.sweep.zip:
        raise UserError("words go in pairs with our own sweeper only", f"sweep.zip hydra/sweeper={sweeper}", f"leave out hydra/sweeper={sweeper}")
    if word := next((word for word in shared if word.startswith("hydra.sweep.subdir=")), None):
        raise UserError("jobs are named by their swept words", word, "leave it out; hydra.sweep.dir=DIR places the sweep")
    if launcher == "local":
        check_launcher_options(tree.hydra.launcher)
    if sweeper == "optuna":
        optuna_sweeper.check_optuna_options(tree.hydra.sweeper)
    return sweeper, launcher


def is_safe_override(word: str) -> bool:
    """Whether it sets no more than what a job's words may set, or chooses among plugins and their options."""
    key = word.partition("=")[0].lstrip("+~")
    ours = not key.startswith(HYDRA_PREFIXES) or key in STORED_HYDRA_KEYS or key.startswith(external.STORED_PREFIXES)
    return ours and "${" not in word and "_target_" not in word


def storable_overrides(words: list[str]) -> list[str]:
    """What is written down. A word to Hydra that could start or open anything is not."""
    for word in words:
        if not is_safe_override(word) and not word.lstrip("+~").startswith(HYDRA_PREFIXES):
            raise UserError("the jobs of a sweep start at different times: nothing is looked up then", word, "write the value itself")
        if not is_safe_override(word):
            print(f"{word} is not kept with the sweep: type it again behind resume=", file=sys.stderr)
    return [word for word in words if is_safe_override(word)]


def check_stored_overrides(state: SweepState) -> None:
    """sweep.json is data."""
    for word in [*state.fields["overrides"], *(f"{key}={value}" for key, values in state.fields["swept"].items() for value in values)]:
        if not is_safe_override(word):
            raise UserError("a sweep's words reach outside", f"{state.folder / 'sweep.json'}: {word}", "take it out there, and type it again behind resume=")


def check_additions(state: SweepState, more: list[str], added: dict[str, list[str]], conf: Path) -> None:
    overrides.check_overrides([*more, *(f"{key}={value}" for key, values in added.items() for value in values)], conf)
    if strange := next((key for key in added if key not in state.fields["swept"]), None):
        raise UserError("the jobs of this sweep are not told apart by this word", strange, f"give one value, or start a sweep over {strange} as well")
    begun = any(read_run_metadata(state.folder / job["name"]).get("attempt") for job in state.jobs)
    if begun and (word := next((word for word in more if word.partition("=")[0] in resume.FIXED_KEYS), None)):
        fix = f"start another sweep with init_from={state.folder}/<job>"
        raise UserError(f"the jobs of a sweep keep their {word.partition('=')[0]}", word, fix)
    if word := next((word for word in more if word.startswith(("sweep.", SWEEP_DIR_KEY))), None):
        raise UserError("a sweep keeps its place and its rules", word, "leave it out, or start another sweep")
