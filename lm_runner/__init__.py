"""The installed form of the runner: `lm-train stage=sft`, or `python -m lm_runner train stage=sft`.

The program's packages are called `runner`, `models`, `data` and `common`; at the top level of site-packages they would
clash with the user's own `data` or `models`. The wheel holds them in `lm_runner/_app/`, and only a process of this
program puts that folder on its path.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

__version__ = "0.2.0"

COMMANDS = (
    *("train", "chat", "evaluate", "rows", "report", "compare"),
    *("tokenizer", "doctor", "faults", "export", "serve", "plan"),
)


def app_dir() -> Path:
    """Return the folder that holds `runner/` and `conf/`: `_app/` in a wheel, the checkout otherwise."""
    installed = Path(__file__).parent / "_app"
    return installed if installed.is_dir() else Path(__file__).parents[1]


def run_command(name: str) -> None:
    """Run `runner/<name>.py` as if it was started by its path, with the arguments of this process."""
    script = app_dir() / "runner" / f"{name}.py"
    sys.path.insert(0, str(script.parent))  # what Python does for a script; the command replaces the entry by the root
    runpy.run_path(str(script), run_name="__main__")


def train() -> None:
    run_command("train")


def chat() -> None:
    run_command("chat")


def evaluate() -> None:
    run_command("evaluate")


def rows() -> None:
    run_command("rows")


def report() -> None:
    run_command("report")


def compare() -> None:
    run_command("compare")


def tokenizer() -> None:
    run_command("tokenizer")


def doctor() -> None:
    run_command("doctor")


def faults() -> None:
    run_command("faults")


def export() -> None:
    run_command("export")


def serve() -> None:
    run_command("serve")


def plan() -> None:
    run_command("plan")
