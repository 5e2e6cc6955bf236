"""Exceptions with a meaning for the user, exit code and message of every way a command can end, and output streams that
survive a closed pipe.
"""

from __future__ import annotations

import difflib
import errno
import io
import math
import os
import re
import shlex
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TextIO

from common.paths import command_line_here, with_typed_commands

# Format characters (direction overrides among them), surrogates and unassigned code points can rewrite a terminal as
# control codes do.
CONTROL_CHARACTERS = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
MAX_PRINTED = 10_000  # characters of each part of an error
# A line of untrusted text that looks like one of the three lines of an error.
OWN_LINE = re.compile(r"\n(?=\s*(error|where|fix|warning):)")
# Exit codes of every command: part of the contract with the user's scripts.
OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 75
OTHER_IS_BETTER, NOT_TOLD_APART = 10, 11  # of compare.py; OK: a is better
PEER_LOST = 69  # a rank exits with it when another rank died; read by its launcher, never by the user
INTERRUPTED_BY_USER = 130  # 128 + SIGINT: Ctrl-C before training has begun, or in a command that saves nothing
INTERRUPTED_MESSAGE = "interrupted"
# They save a run and end it; SIGUSR1: Slurm, before the time limit; SIGHUP: the terminal was closed
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_ERRORS = FULL_DISK_ERRORS | {
    errno.EIO,
    errno.EROFS,
    errno.EFBIG,
    errno.ESTALE,
    errno.ENXIO,
    errno.ENODEV,
    errno.ETIMEDOUT,
    errno.EUCLEAN,
}
MORE_FILES = "raise the limit, e.g. ulimit -n $(ulimit -Hn)"
SHOW_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"


class Outcome(StrEnum):
    """How a run ended; field `outcome` of run.json."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    PAUSED = "paused"  # interrupted by train.stop_at
    DIVERGED = "diverged"
    FAILED = "failed"


class UserError(ValueError):
    """Invalid settings or data: printed in three lines without traceback, exit code 2, nothing is trained.

    `message` says what was given and what is allowed, `setting` is the override, file or row it concerns, `fix` what to
    type or to change.
    """

    def __init__(self, message: str, setting: str | Path, fix: str) -> None:
        super().__init__(message, str(setting), fix)
        self.message, self.setting, self.fix = message, str(setting), fix


class AlreadyReported(UserError):
    """A user error that another process of the run has printed."""


class TrainingError(Exception):
    """Training cannot go on; the last valid checkpoint is intact."""

    outcome = Outcome.FAILED


class LostRunDirError(TrainingError):
    """The run directory was moved, deleted, replaced, or taken by another launch: this process must not write to its
    path any more.
    """

    def __init__(self, message: str, moved_to: Path | None = None) -> None:
        """`moved_to`: where the directory is now.

        Its lock is still held, so that the last step can be saved there.
        """
        super().__init__(message)
        self.moved_to = moved_to


class DivergedError(TrainingError):
    """The loss is not finite, or far above that of uniform predictions."""

    outcome = Outcome.DIVERGED


class PeerLostError(TrainingError):
    """Another rank failed or died; its log has the cause."""


class StopRequested(BaseException):
    """A stop request ended tokenizing, an evaluation, sampling or a step before it was done: the run is as after its
    last completed step.
    """


class Interrupted(Exception):
    """Training was stopped by a signal or a limit after saving step `step` in the run directory `folder`; step 0:
    before there was anything to save.
    """

    def __init__(self, step: int, folder: Path, outcome: Outcome = Outcome.INTERRUPTED) -> None:
        verb = "paused" if outcome == Outcome.PAUSED else "stopped"
        super().__init__(
            f"{verb} after step {step}, saved" if step else f"{verb} before the first step, nothing to save"
        )
        self.folder, self.outcome = folder, outcome


def strip_control(text: str) -> str:
    """Return untrusted text, safe to print: newlines and tabs stay, other control and format characters are escaped."""
    return "".join(
        c
        if c in "\n\t" or unicodedata.category(c) not in CONTROL_CHARACTERS
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def clean_texts(value: Any) -> Any:
    """Return a JSON value with its texts and names without control characters and lone surrogates; numbers that JSON
    has not become text.
    """
    if isinstance(value, dict):
        return {strip_control(str(name)): clean_texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_texts(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return strip_control(value) if isinstance(value, str) else value


def one_line(text: str) -> str:
    """Return untrusted text, safe to print and without line breaks."""
    return strip_control(text).replace("\n", "\\n")


def print_safely(text: str, file: TextIO | None = None) -> None:
    """Print a line (to stdout) that may quote a file, a path or a row."""
    print(strip_control(text), file=file or sys.stdout, flush=True)


@contextmanager
def stripping_stdout() -> Iterator[None]:
    """Print what is written to stdout inside, e.g. by a library, without control characters."""
    written = io.StringIO()
    try:
        with redirect_stdout(written):
            yield
    finally:
        print(strip_control(written.getvalue()), end="", flush=True)


def print_note(text: str) -> None:
    """Print a note or warning to stderr: one line that may quote a file, a path or a row."""
    print(one_line(text), file=sys.stderr, flush=True)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_PRINTED else f"{text[:MAX_PRINTED]}... ({len(text):,} characters)"


def report_user_error(error: UserError) -> int:
    """Print `error` in three lines to stderr, unless that was done already; return the exit code."""
    if not isinstance(error, AlreadyReported):
        message, setting, fix = (
            _shorten(text) for text in (error.message, error.setting, with_typed_commands(error.fix))
        )
        message = OWN_LINE.sub(r"\\n", strip_control(message))
        print(f"error: {message}\n  where: {one_line(setting)}\n  fix:   {one_line(fix)}", file=sys.stderr)
    return USER_ERROR


def resume_command(folder: Path) -> str:
    """Return the shell command that resumes the run or sweep in `folder`, as it is typed where this process was
    started.
    """
    return shlex.join([*command_line_here("train"), f"resume={folder}"])


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint with the nearest of the `known` names, or `otherwise`."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {nearest[0]}?" if nearest else otherwise


def did_you_mean_path(path: str | Path) -> str:
    """Return a hint with the sibling of `path` that has the most similar name.

    Only the last component is compared.
    """
    wanted = Path(path).absolute()
    siblings = [other.name for other in wanted.parent.glob("*")] if wanted.parent.is_dir() else []
    nearest = difflib.get_close_matches(wanted.name, siblings, n=1, cutoff=0.75)
    return (
        f"did you mean {wanted.parent / nearest[0]}?"
        if nearest
        else "check the path; a relative path starts at the current directory"
    )


# --- streams that survive a closed pipe or terminal ---


class _PipeWriter(io.FileIO):
    """Discards what is written once the reader has closed the pipe, as `tee` does at Ctrl-C."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_broken_pipe() -> None:
    """Replace stdout and stderr so that a closed pipe or terminal does not end this process; the files of the run have
    every line.
    """
    open_standard_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # not a stream that a caller has installed
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = _PipeWriter(stream.fileno(), "w", closefd=False)
            is_line_buffered = stream.line_buffering or stream.write_through
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=is_line_buffered
                ),
            )


def open_standard_streams() -> None:
    """Open /dev/null as standard input, output or error where the caller has closed it: the next file of the run would
    get its descriptor, and the output of libraries and children.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and not _is_open(descriptor):
            null = os.open(os.devnull, os.O_RDWR)
            if null == descriptor:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(
                sys,
                name,
                open(
                    descriptor,
                    "r" if descriptor == 0 else "w",
                    closefd=False,
                    encoding="utf-8",
                    errors="backslashreplace",
                ),
            )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# --- exit code and message for every way a command can end ---


def run_then_hard_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`, flush, then `os._exit(code)`.

    Interpreter shutdown is skipped: threads of a torch process group that free tensors while Python finalises abort the
    process. `main` itself closes files and joins threads.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the parent closed it
                stream.flush()
        finally:  # it may be on a full disk
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)


@contextmanager
def exiting_with_code() -> Iterator[None]:
    """Turn an exception into its message on stderr and SystemExit with its code.

    A bug shows its traceback and exits with 1, Ctrl-C with 130.

    With HYDRA_FULL_ERROR=1 every exception shows its traceback.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        print_safely(f"\n{INTERRUPTED_MESSAGE}", sys.stderr)
        raise SystemExit(INTERRUPTED_BY_USER) from error
    except Exception as error:
        raise SystemExit(_report(error)) from error


def _report(error: Exception) -> int:
    text = ""
    match error:
        case _ if SHOW_TRACEBACKS:
            pass
        case UserError():
            return report_user_error(error)
        case Interrupted():
            print_safely(f"{error}; continue with: {resume_command(error.folder)}", sys.stderr)
            return INTERRUPTED
        case OSError(errno=errno.ENAMETOOLONG):
            fix = "a name has at most 255 bytes"
            return report_user_error(UserError("the path is too long", error.filename or "", fix))
        case TrainingError():
            text = f"error: {error}"
        case OSError(errno=errno.EMFILE):
            text = f"error: {error.strerror}; {MORE_FILES}"
        case OSError() if error.errno in DISK_ERRORS or (error.errno == errno.EACCES and error.filename):
            text = f"error: {error.filename or 'a file'} could not be written or read: {error.strerror}"
    print_safely(text or "".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)
    return FAILED
