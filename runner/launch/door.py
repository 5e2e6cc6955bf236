"""The door of train.py: words are checked, a folder is taken, Hydra is let in, and every end gets its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode

from runner.launch import folders, help, ready, refusal, relaunch, sweep, words
from runner.launch.compose import register, translated
from runner.launch.origin import share_the_machine
from runner.launch.record import Record

LOOKING = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc"}
SWEEPING = {"--multirun", "-m"}
RESUME = "resume="

tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"  # as the user set it, before we do
opened: list[Record] = []  # the run of this process, its lock held since before Hydra wrote into its folder


def enter(app: Callable[[], None]) -> None:
    """Run a Hydra app on sys.argv. A user's mistake is three lines and exit 2, before any folder exists."""
    share_the_machine()
    try:
        if {"--help", "-h"} & set(sys.argv[1:]):
            return print(help.page())
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of to Hydra's printer
        _let_in(app)
    except Exception as error:
        leave(error)
        raise


def _let_in(app: Callable[[], None]) -> None:
    typed, flags = words.split(sys.argv[1:])
    words.check_flags(flags)
    typed = [words.whole(word) for word in typed]
    sys.argv[1:] = [*flags, *typed]
    if {flag.split("=")[0] for flag in flags} & LOOKING:
        if not {"--shell-completion", "-sc"} & set(flags):
            words.check(typed)
        register()
        with translated(typed):
            return app()
    resume = [word.removeprefix(RESUME) for word in typed if word.startswith(RESUME)]
    typed = words.absolute([word for word in typed if not word.startswith(RESUME)])
    if resume and resume[-1] != "null":
        return _continue(relaunch.find(resume[-1]), typed, flags, app)
    if nowhere := next((word for word in typed if word in ("hydra.run.dir=", "hydra.sweep.dir=")), None):
        raise ValueError("a run needs a folder", nowhere, "give one, or leave the word out")
    if SWEEPING & set(flags):
        return sweep.enter(typed, flags, app)
    folder = ready.folder_of(typed)
    if not any(word.startswith("hydra.run.dir=") for word in typed):
        folders.claim(sweep=False)
        folder = ready.folder_of(typed)
    opened.append(Record.open(folder))
    sys.argv[1:] = [*flags, *typed]
    app()


def _continue(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    if relaunch.is_sweep(folder):
        return sweep.resume(folder, extra, flags, app)
    from runner.launch.start import start

    with Record.open(folder, resume=True) as record:
        if record.status == "completed" and not extra:
            return print(f"{folder}: already complete at step {record.fields['step']}")
        with relaunch.continued(folder, extra) as config:
            loss = start(config, record)
    print(f"{folder}: completed, loss {loss:.4f}")


def record_of(folder: Path) -> Record:
    """The record of the run Hydra has just placed in `folder`: opened at the door, or, for a job of a sweep, now."""
    return opened.pop() if opened else Record.open(folder)


@contextmanager
def explained() -> Iterator[None]:
    """Around a run: an end that has an exit code leaves with it. Within a sweep only the wish to stop does: the other jobs go on."""
    from runner.engine.run import Interrupted

    try:
        yield
    except Exception as error:
        if HydraConfig.get().mode == RunMode.RUN or isinstance(error, Interrupted):
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
        print(f"{error}; continue with: python runner/train.py resume={error.folder}", file=sys.stderr)
        return refusal.INTERRUPTED
    if isinstance(error, RunFailed):
        print(f"error: {error}", file=sys.stderr)
        return refusal.FAILED
    return None
