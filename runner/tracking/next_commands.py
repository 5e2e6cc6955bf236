"""The last lines of a completed run: where its model is, and the commands that come next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from common.paths import IS_INSTALLED, REPO_ROOT, command_line

STAGE_METRICS = {"text": "perplexity", "chat": "exact_match", "preference": "preference"}  # of evaluate.py, by data format
NEXT_STAGES = {"pretrain": ("sft", ""), "sft": ("dpo", "stage=dpo_lora, or stage=lora")}  # stage -> (the next one, other choices)
SAMPLES = REPO_ROOT / "data" / "samples"


def next_commands(run_dir: Path, stage: str, data_format: str, data_path: Path | None, longer: str | None) -> str:
    """Return the lines that a completed run ends with.

    `data_path`: the training file, None for several; `longer`: the override that trains further, None if a resumed run would end at once.
    """
    run = _display_path(run_dir)
    evaluation = f"data.path={_validation_file(data_path)}", f"metric={STAGE_METRICS[data_format]}"
    commands: list[tuple[tuple[str, ...], str]] = [(("chat", f"run={run}"), ""), (("evaluate", f"run={run}", *evaluation), "")]  # (command, comment)
    if stage in NEXT_STAGES:
        next_stage, others = NEXT_STAGES[stage]
        own = () if data_path is not None and data_path.parent == SAMPLES else ("data=own", "data.path=FILE")
        commands.append((("train", f"stage={next_stage}", f"init_from={run}", *own), f"or {others}" if others else ""))
    if longer is not None:
        commands.append((("train", f"resume={run}", longer), "train longer"))
    lines = [f"{shlex.join([*_program(name), *overrides])}{f'  # {comment}' if comment else ''}" for (name, *overrides), comment in commands]
    return "\n".join([f"model  {_display_path(run_dir / 'model')}", *(f"{'' if i else 'next':<7}{line}" for i, line in enumerate(lines))])


def _program(command: str) -> list[str]:
    """Return how the user types `command` here: in another directory than the checkout or without its environment, `python runner/...` is not found."""
    if IS_INSTALLED:
        return command_line(command)
    python, script = command_line(command)
    found = shutil.which(python)
    if found is None or os.path.abspath(found) != os.path.abspath(sys.executable):
        python = _display_path(Path(sys.executable))
    return [python, _display_path(REPO_ROOT / script)]


def _validation_file(data_path: Path | None) -> str:
    """Return X_val.jsonl beside X.jsonl if it exists, else a placeholder."""
    path = None if data_path is None else data_path.with_name(f"{data_path.stem}_val{data_path.suffix}")
    return _display_path(path) if path is not None and path.is_file() else "FILE"


def _display_path(path: Path) -> str:
    """Return the path relative to the current directory if it is inside."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
