"""Paths of this program's own files, and where it puts what it makes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]  # the checkout, or lm_runner/_app/ of an installed wheel
CONF_DIR = REPO_ROOT / "conf"
IS_INSTALLED = REPO_ROOT.name == "_app"


def workspace_dir() -> Path:
    """Return the folder that holds outputs/ and .cache/: the checkout, or the current directory where the wheel is
    installed.
    """
    return Path.cwd() if IS_INSTALLED else REPO_ROOT


def outputs_dir() -> Path:
    return workspace_dir() / "outputs"


def command_line(command: str) -> list[str]:
    """Return how the user types a command: `python runner/train.py` in a checkout, `lm-train` where the wheel is
    installed.
    """
    return [f"lm-{command}"] if IS_INSTALLED else ["python", f"runner/{command}.py"]


def with_typed_commands(text: str) -> str:
    """Return the text with the commands as the user types them: `lm-train` instead of `python runner/train.py` where
    the wheel is installed.
    """
    return re.sub(r"python runner/(\w+)\.py", lambda match: shlex.join(command_line(match[1])), text)


def command_line_here(command: str) -> list[str]:
    """Return what to type in this shell: in another directory than the checkout or without its environment, `python
    runner/...` is not found.
    """
    if IS_INSTALLED:
        return command_line(command)
    python, script = command_line(command)
    found = shutil.which(python)
    if found is None or os.path.abspath(found) != os.path.abspath(sys.executable):
        python = display_path(Path(sys.executable))
    return [python, display_path(REPO_ROOT / script)]


def display_path(path: Path) -> str:
    """Return the path relative to the current directory if it is inside.

    hydra.job.chdir=true changes to the run directory; the shell is in another one: the path is whole then.
    """
    try:
        path, current = Path(os.path.abspath(path)), Path.cwd()
    except OSError:  # the current directory was deleted
        return str(path)
    is_shown_relative = path.is_relative_to(current) and not (current / "run.json").exists()
    return str(path.relative_to(current) if is_shown_relative else path)
