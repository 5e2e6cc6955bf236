"""What a sweep takes in: words to Hydra, words that are written down, words behind resume=."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from runner.launch import foreign, relaunch, study, torchrun
from runner.launch import words as words_of
from runner.launch.launcher import FIELDS, check_options
from runner.launch.ledger import Ledger, read_run

PLACE = "hydra.sweep.dir="
HYDRA = ("hydra.", "hydra/")
OURS, COUNTED = "grid", ("grid", "basic")  # the sweeper whose points we know beforehand
STORED = ("hydra/sweeper", "hydra/sweeper/sampler", "hydra/launcher", *(f"hydra.launcher.{word}" for word in FIELDS))


def check_hydra(tree: DictConfig, counted: bool, shared: list[str]) -> tuple[str, str]:
    """(sweeper, launcher). Whatever they would stumble over is refused before there is a folder."""
    sweeper, launcher = (tree.hydra.runtime.choices[f"hydra/{part}"] for part in ("sweeper", "launcher"))
    foreign.check([f"hydra/sweeper={sweeper}", f"hydra/launcher={launcher}"])  # a file of conf/ may choose, too
    torchrun.check_launcher(launcher, tree.hydra.launcher)
    if sweeper in COUNTED and not counted:
        raise ValueError(
            "this sweeper goes through lists of values, it draws none", "hydra/sweeper=" + sweeper, "add hydra/sweeper=optuna, or give the values: a,b,c"
        )
    if sweeper != OURS and tree.sweep.zip:
        raise ValueError("words go in pairs with our own sweeper only", f"sweep.zip hydra/sweeper={sweeper}", f"leave out hydra/sweeper={sweeper}")
    if word := next((word for word in shared if word.startswith("hydra.sweep.subdir=")), None):
        raise ValueError("jobs are named by their swept words", word, "leave it out; hydra.sweep.dir=DIR places the sweep")
    if launcher == "local":
        check_options(tree.hydra.launcher)
    if sweeper == "optuna":
        study.check_options(tree.hydra.sweeper)
    return sweeper, launcher


def is_plain(word: str) -> bool:
    """Whether it sets no more than what a job's words may set, or chooses among plugins and their options."""
    key = word.partition("=")[0].lstrip("+~")
    ours = not key.startswith(HYDRA) or key in STORED or key.startswith(foreign.KEPT)
    return ours and "${" not in word and "_target_" not in word


def lasting(words: list[str]) -> list[str]:
    """What is written down. A word to Hydra that could start or open anything is not."""
    for word in words:
        if not is_plain(word) and not word.lstrip("+~").startswith(HYDRA):
            raise ValueError("the jobs of a sweep start at different times: nothing is looked up then", word, "write the value itself")
        if not is_plain(word):
            print(f"{word} is not kept with the sweep: type it again behind resume=", file=sys.stderr)
    return [word for word in words if is_plain(word)]


def check_stored(ledger: Ledger) -> None:
    """sweep.json is data."""
    for word in [*ledger.fields["words"], *(f"{key}={value}" for key, values in ledger.fields["swept"].items() for value in values)]:
        if not is_plain(word):
            raise ValueError("a sweep's words reach outside", f"{ledger.folder / 'sweep.json'}: {word}", "take it out there, and type it again behind resume=")


def check_more(ledger: Ledger, more: list[str], added: dict[str, list[str]], conf: Path) -> None:
    words_of.check([*more, *(f"{key}={value}" for key, values in added.items() for value in values)], conf)
    if strange := next((key for key in added if key not in ledger.fields["swept"]), None):
        raise ValueError("the jobs of this sweep are not told apart by this word", strange, f"give one value, or start a sweep over {strange} as well")
    begun = any(read_run(ledger.folder / job["name"]).get("attempt") for job in ledger.jobs)
    if begun and (word := next((word for word in more if word.partition("=")[0] in relaunch.FIXED), None)):
        fix = f"start another sweep with init_from={ledger.folder}/<job>"
        raise ValueError(f"the jobs of a sweep keep their {word.partition('=')[0]}", word, fix)
    if word := next((word for word in more if word.startswith(("sweep.", PLACE))), None):
        raise ValueError("a sweep keeps its place and its rules", word, "leave it out, or start another sweep")
