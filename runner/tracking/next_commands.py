"""The commands that come next after a run, as they are typed where this process was started."""

from __future__ import annotations

from pathlib import Path

from common.paths import REPO_ROOT, command_line_here, display_path
from runner.diagnostics.symptoms import lr_after_divergence
from runner.tracking.run_end import NextCommand

STAGE_METRICS = {"text": "perplexity", "chat": "exact_match", "preference": "preference"}  # of evaluate.py, by data format
NEXT_STAGES = {"pretrain": ("sft", ""), "sft": ("dpo", "stage=dpo_lora, or stage=lora")}  # stage -> (the next one, other choices)
EXPORT_FORMATS = {"decoder": "gguf"}  # by model family
LR_OVERRIDE = "optimizer.lr="
SAMPLES = REPO_ROOT / "data" / "samples"


def next_commands(run_dir: Path, stage: str, data_format: str, data_path: Path | None, longer: str | None, family: str) -> tuple[NextCommand, ...]:
    """Return what to type after a completed run of a model of `family`.

    `data_path`: the training file, None for several; `longer`: the override that trains further, None if a resumed run would end at once.
    """
    run = f"run={display_path(run_dir)}"
    commands = [_command("chat", "talk to it", run)]
    commands.append(_command("evaluate", "measure it", run, f"data.path={_validation_file(data_path)}", f"metric={STAGE_METRICS[data_format]}"))
    if stage in NEXT_STAGES:
        next_stage, others = NEXT_STAGES[stage]
        own = () if data_path is not None and data_path.parent == SAMPLES else ("data=own", "data.path=FILE")
        purpose = f"train the next stage{f', or {others}' if others else ''}"
        commands.append(_command("train", purpose, f"stage={next_stage}", f"init_from={display_path(run_dir)}", *own))
    if longer is not None:
        commands.append(_command("train", "train longer", f"resume={display_path(run_dir)}", longer))
    return (*commands, _command("export", "write it for other programs", run, "to=FOLDER", f"format={EXPORT_FORMATS.get(family, 'hf')}"))


def commands_to_continue(run_dir: Path, has_checkpoint: bool) -> tuple[NextCommand, ...]:
    """Return what to type after a run that was stopped or has failed."""
    purpose = "continue from the checkpoint" if has_checkpoint else "start again: nothing is saved yet"
    return (_command("train", purpose, f"resume={display_path(run_dir)}"),)


def commands_after_divergence(run_dir: Path, lr: float, overrides: list[str], can_resume: bool) -> tuple[NextCommand, ...]:
    """Return what to type after a run that has diverged, with a smaller learning rate. `overrides`: those of the run; `can_resume`: from a checkpoint."""
    smaller = f"{LR_OVERRIDE}{lr_after_divergence(lr)}"
    others = [override for override in overrides if not override.lstrip("+").startswith(LR_OVERRIDE)]
    again = _command("train", "start again with a smaller learning rate", *others, smaller)
    resume = _command("train", "or continue from the newest checkpoint with it", f"resume={display_path(run_dir)}", smaller)
    return (again, resume) if can_resume else (again,)


def _command(name: str, purpose: str, *overrides: str) -> NextCommand:
    return NextCommand((*command_line_here(name), *overrides), purpose)


def _validation_file(data_path: Path | None) -> str:
    """Return X_val.jsonl beside X.jsonl if it exists, else a placeholder."""
    path = None if data_path is None else data_path.with_name(f"{data_path.stem}_val{data_path.suffix}")
    return display_path(path) if path is not None and path.is_file() else "FILE"
