"""How a program says no: what is wrong, where, and what to do. Exit codes are the contract of every command."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 75
ALONE = 69  # of one rank, heard by whoever has started it: another has gone


class AlreadySaid(ValueError):
    """A refusal that stands on the terminal already: another process of the run has printed it."""


def is_refusal(error: BaseException) -> bool:
    """A refusal is ValueError(what, where, fix); any other ValueError is a bug and keeps its traceback."""
    return isinstance(error, ValueError) and len(error.args) == 3 and all(isinstance(part, str) for part in error.args)


def report(error: BaseException) -> int:
    """Print a refusal in three lines; returns the exit code."""
    what, where, fix = error.args
    if not isinstance(error, AlreadySaid):
        print(f"error: {what}\n  where: {where}\n  fix:   {fix}", file=sys.stderr)
    return WRONG


def again(folder: Path) -> str:
    """The line that continues a run or a sweep, to be pasted into a shell."""
    return shlex.join(["python", "runner/train.py", f"resume={folder}"])


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """What to write instead of `word`."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else otherwise


def nearest_path(path: str | Path) -> str:
    """The file or folder beside `path` that it may have been meant to be. Names are compared, not paths: the folder they share says nothing."""
    here = Path(path).absolute()
    beside = [other.name for other in here.parent.glob("*")] if here.parent.is_dir() else []
    found = difflib.get_close_matches(here.name, beside, n=1, cutoff=0.75)
    return f"did you mean {here.parent / found[0]}?" if found else "check the path; a relative one starts where you stand"
