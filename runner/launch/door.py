"""The door of train.py: words are checked, a folder is taken, Hydra is let in, and every end gets its exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner.engine.console import outlive_readers
from runner.launch import folders, help, look, places, ready, refusal, relaunch, snapshot, sweep, torchrun, words
from runner.launch.compose import register, translated
from runner.launch.origin import share_the_machine
from runner.launch.processes import run_and_end
from runner.launch.record import Record

COMPLETING = {"--shell-completion", "-sc", "--hydra-help", "--version"}
LOOKING = {"--cfg", "-c", "--info", "-i"}
SWEEPING = {"--multirun", "-m"}
RESUME = "resume="
QUOTED = re.compile(r"\A(['\"])(.*)\1\Z")  # as Hydra wants words with blanks in them; a path needs none
ANSWERED = re.compile(r" resume=(?:\\.|[^\\\s])+(?= )")  # that is no longer being typed

tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"  # as the user set it, before we do
opened: list[Record] = []  # the run of this process, its lock held since before Hydra wrote into its folder


def enter(app: Callable[[], None]) -> None:
    """Run a Hydra app on sys.argv. A user's mistake is three lines and exit 2, before any folder exists."""
    share_the_machine()
    outlive_readers()
    if torchrun.is_on():
        run_and_end(torchrun.follow if torchrun.follows() else lambda: _enter(app))
    _enter(app)


def _enter(app: Callable[[], None]) -> None:
    try:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of to Hydra's printer
        with torchrun.leading():
            _let_in(app)
    except Exception as error:
        leave(error)
        raise


def _let_in(app: Callable[[], None]) -> None:
    typed, flags = words.split(sys.argv[1:])
    if {"--help", "-h"} & set(flags):
        return print(help.page())
    words.check_flags(flags)
    typed = [words.whole(word) for word in typed]
    sys.argv[1:] = [*flags, *typed]
    names = {flag.split("=")[0] for flag in flags}
    if names & COMPLETING:
        register()
        if "COMP_LINE" in os.environ:  # which run is meant changes nothing in what can be said, and its path need not be one that Hydra can read
            os.environ["COMP_LINE"] = ANSWERED.sub("", os.environ["COMP_LINE"])
        with translated(typed):
            return app()
    places.check_flags(flags)
    if SWEEPING & names and names & LOOKING:
        raise ValueError("a sweep is many runs", " ".join(flags), "look at one of them: leave out --multirun, and give each word one value")
    if former := torchrun.former():
        return _continue(former, [], [flag for flag in flags if flag not in SWEEPING], app)
    resume = [QUOTED.sub(r"\2", word.removeprefix(RESUME)) for word in typed if word.startswith(RESUME)]
    typed = words.absolute([word for word in typed if not word.startswith(RESUME)])
    if resume and resume[-1] != "null":
        return _continue(places.find(resume[-1]), typed, flags, app)
    if names & LOOKING:
        words.check(typed)
        sys.argv[1:] = [*flags, *typed]
        register()
        with translated(typed):
            return app()
    _check_hydra_words(typed)
    if SWEEPING & names:
        return sweep.enter(typed, flags, app)
    folder = ready.folder_of(typed)
    if not any(word.startswith("hydra.run.dir=") for word in typed):
        folders.claim(sweep=False)
        folder = ready.folder_of(typed)
    places.check_free(folder)
    opened.append(Record.open(folder))
    sys.argv[1:] = [*flags, *typed]
    app()


def _check_hydra_words(typed: list[str]) -> None:
    """Words to Hydra that would make a run which cannot be continued, or another one than was meant."""
    for word in typed:
        name, _, value = word.lstrip("+").partition("=")
        if name in ("hydra.run.dir", "hydra.sweep.dir") and not value:
            raise ValueError("a run needs a folder", word, "give one, or leave the word out")
        if name == "hydra.output_subdir":
            raise ValueError("a run keeps its words in .hydra, it is continued from there", word, "leave the word out")
        if name == "hydra.mode":
            raise ValueError("whether this is a sweep is said by a flag", word, "leave the word out; --multirun trains every combination")


def _continue(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    looking = {flag.split("=")[0] for flag in flags} & LOOKING
    if places.is_sweep(folder) and not looking:
        return sweep.resume(folder, extra, flags, app)
    if places.is_sweep(folder):
        return look.at_sweep(folder, extra, flags, app)
    if looking:
        plan = relaunch.planned(folder, extra)
        relaunch.say(plan)
        return relaunch.looked_at(plan, flags, app)
    if SWEEPING & set(flags):
        raise ValueError("this folder holds one run", f"--multirun resume={folder}", "leave the flag out; it goes with the folder of a sweep")
    with Record.open(folder, resume=True) as record:
        plan = relaunch.planned(folder, extra, begun=record.attempt > 0)
        relaunch.say(plan)
        if record.status == "completed" and not plan.news:
            return print(f"{folder}: already complete at step {record.fields['step']}")
        ready.check(plan.config)
        with relaunch.kept(plan) as config:
            from runner.launch.start import start

            loss = start(config, record)
    print(f"{folder}: completed, loss {loss:.4f}")


def record_of(tree: DictConfig) -> Record:
    """The record of the run that Hydra has just placed. A job of a sweep comes through the door by itself, whatever has launched it.

    What Hydra has written of its words is made to last: what was looked up stays what it was, and the YAML files are copied.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record = opened.pop()
    try:
        relaunch.keep_values(folder, tree)
        snapshot.take(folder, list(hydra.overrides.task))
    except OSError as error:
        record.close()
        raise ValueError(f"a run cannot live here: {error.strerror or error}", str(folder), "place it elsewhere with hydra.run.dir=DIR") from error
    return record


@contextmanager
def explained() -> Iterator[None]:
    """Around a run: an end that has an exit code leaves with it."""
    try:
        yield
    except Exception as error:
        leave(error)
        raise


def leave(error: Exception) -> None:
    """Exit with the code of `error`; a bug, and any error where the user wants tracebacks, comes back."""
    if not tracebacks and (code := _code(error)) is not None:
        sys.exit(code)


def _code(error: Exception) -> int | None:
    """The exit code of an end that has been explained; None for a bug, which shows its traceback."""
    from runner.engine.run import Interrupted, RunFailed

    if isinstance(error, HydraException):
        error = translated([]).refusal(error)
    if refusal.is_refusal(error):
        return refusal.report(error)
    if isinstance(error, Interrupted):
        print(f"{error}; continue with: {refusal.again(error.folder)}", file=sys.stderr)
        return refusal.INTERRUPTED
    if isinstance(error, RunFailed):
        print(f"error: {error}", file=sys.stderr)
        return refusal.FAILED
    return None
