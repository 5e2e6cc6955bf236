"""Exit code and message for every way a command can end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import (
    FAILED,
    INTERRUPTED,
    INTERRUPTED_BY_USER,
    INTERRUPTED_MESSAGE,
    Interrupted,
    TrainingError,
    UserError,
    print_safely,
    report_user_error,
    resume_command,
)
from common.filesystem import DISK_ERRORS

SHOW_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"  # as the user has set it; hydra_app sets it too


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
    if not SHOW_TRACEBACKS:
        if isinstance(error, UserError):
            return report_user_error(error)
        if isinstance(error, Interrupted):
            print_safely(f"{error}; continue with: {resume_command(error.folder)}", sys.stderr)
            return INTERRUPTED
        if isinstance(error, TrainingError):
            print_safely(f"error: {error}", sys.stderr)
            return FAILED
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            print_safely(
                f"error: {error.filename or 'a file'} could not be written or read: {error.strerror}", sys.stderr
            )
            return FAILED
    print_safely("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)
    return FAILED
