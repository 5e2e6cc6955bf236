"""The last lines of a completed run: where its model is, and the commands that come next."""

from __future__ import annotations

import shlex
from pathlib import Path

from common.paths import REPO_ROOT, command_line_here, display_path

STAGE_METRICS = {"text": "perplexity", "chat": "exact_match", "preference": "preference"}  # of evaluate.py, by data format
NEXT_STAGES = {"pretrain": ("sft", ""), "sft": ("dpo", "stage=dpo_lora, or stage=lora")}  # stage -> (the next one, other choices)
SAMPLES = REPO_ROOT / "data" / "samples"


def next_commands(run_dir: Path, stage: str, data_format: str, data_path: Path | None, longer: str | None) -> str:
    """Return the lines that a completed run ends with.

    `data_path`: the training file, None for several; `longer`: the override that trains further, None if a resumed run would end at once.
    """
    run = display_path(run_dir)
    evaluation = f"data.path={_validation_file(data_path)}", f"metric={STAGE_METRICS[data_format]}"
    commands: list[tuple[tuple[str, ...], str]] = [(("chat", f"run={run}"), ""), (("evaluate", f"run={run}", *evaluation), "")]  # (command, comment)
    if stage in NEXT_STAGES:
        next_stage, others = NEXT_STAGES[stage]
        own = () if data_path is not None and data_path.parent == SAMPLES else ("data=own", "data.path=FILE")
        commands.append((("train", f"stage={next_stage}", f"init_from={run}", *own), f"or {others}" if others else ""))
    if longer is not None:
        commands.append((("train", f"resume={run}", longer), "train longer"))
    lines = [f"{shlex.join([*command_line_here(name), *overrides])}{f'  # {comment}' if comment else ''}" for (name, *overrides), comment in commands]
    return "\n".join([f"model  {display_path(run_dir / 'model')}", *(f"{'' if i else 'next':<7}{line}" for i, line in enumerate(lines))])


def _validation_file(data_path: Path | None) -> str:
    """Return X_val.jsonl beside X.jsonl if it exists, else a placeholder."""
    path = None if data_path is None else data_path.with_name(f"{data_path.stem}_val{data_path.suffix}")
    return display_path(path) if path is not None and path.is_file() else "FILE"
