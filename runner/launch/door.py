"""The door of train.py: words are checked, a folder is taken, Hydra is let in, and every end gets its exit code."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode

from data.formats import find_sources
from runner.launch import folders, help, lineage, refusal, relaunch, words
from runner.launch.compose import compose_with_folder, register, translated
from runner.launch.origin import share_the_machine
from runner.launch.record import Record
from runner.launch.refusal import nearest_path

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
        return _continue(resume[-1], typed)
    if nowhere := next((word for word in typed if word in ("hydra.run.dir=", "hydra.sweep.dir=")), None):
        raise ValueError("a run needs a folder", nowhere, "give one, or leave the word out")
    sweep = bool(SWEEPING & set(flags))
    place = "hydra.sweep.dir=" if sweep else "hydra.run.dir="
    jobs = _jobs(typed) if sweep else [typed]
    folder = [_checked(job) for job in jobs][0]
    if not any(word.startswith(place) for word in typed):
        folders.claim(sweep)
        folder = _checked(jobs[0])
    if not sweep:
        opened.append(Record.open(folder))
    sys.argv[1:] = [*flags, *typed]
    app()


def _checked(job: list[str]) -> Path:
    """The folder of a job whose words are right and whose files are there."""
    config, folder = compose_with_folder(job)
    find_sources([path for path in config.data.paths if not path.startswith("hub:")])  # a name on the hub is looked up where it is loaded
    val_path = None if config.data.val_path == "auto" else config.data.val_path
    for word, path in (("data.val_path", val_path), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not Path(path).exists():
            raise ValueError("there is no such file or folder", f"{word}={path}", nearest_path(path))
    lineage.check(config)
    return folder


def _continue(name: str, extra: list[str]) -> None:
    from runner.launch.start import start

    folder = relaunch.find(name)
    with Record.open(folder, resume=True) as record:
        if record.status == "completed" and not extra:
            return print(f"{folder}: already complete at step {record.fields['step']}")
        with relaunch.continued(folder, extra) as config:
            loss = start(config, record)
    print(f"{folder}: completed, loss {loss:.4f}")


def record_of(folder: Path) -> Record:
    """The record of the run Hydra has just placed in `folder`: opened at the door, or, for a job of a sweep, now."""
    return opened.pop() if opened else Record.open(folder)


def _jobs(typed: list[str]) -> list[list[str]]:
    """Every combination a basic sweep will run, so that job 7 cannot fail on a typo after six have trained."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with translated(typed):
        parsed = OverridesParser.create().parse_overrides(typed)
    folders.sweeping(override.get_key_element() for override in parsed if override.is_sweep_override())
    values = []
    for word, override in zip(typed, parsed, strict=True):
        if not override.is_sweep_override():
            values.append([word])
        elif override.is_choice_sweep() or override.is_range_sweep():  # glob(*) names files that are there
            values.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*values)]


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
