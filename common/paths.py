"""Paths of this program's own files, and where it puts what it makes."""

from __future__ import annotations

from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]  # the checkout, or lm_runner/_app/ of an installed wheel
CONF_DIR = REPO_ROOT / "conf"
IS_INSTALLED = REPO_ROOT.name == "_app"


def workspace_dir() -> Path:
    """Return the folder that holds outputs/ and .cache/: the checkout, or the current directory where the wheel is installed."""
    return Path.cwd() if IS_INSTALLED else REPO_ROOT


def outputs_dir() -> Path:
    return workspace_dir() / "outputs"


def command_line(command: str) -> list[str]:
    """Return how the user types a command: `python runner/train.py` in a checkout, `lm-train` where the wheel is installed."""
    return [f"lm-{command}"] if IS_INSTALLED else ["python", f"runner/{command}.py"]
