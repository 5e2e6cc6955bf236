"""The last lines of a run: its numbers, where its files are, and the next commands.

Commands are written as they are typed where this process was started.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import strip_control
from common.paths import REPO_ROOT, command_line_here, display_path
from runner.diagnostics.symptoms import lr_after_divergence
from runner.tracking.bar import command_lines, labelled_lines
from runner.tracking.lines import format_rate, format_size

# of evaluate.py, by data format
STAGE_METRICS = {"text": "perplexity", "chat": "exact_match", "preference": "preference"}
# stage -> (the next one, other choices)
NEXT_STAGES = {"pretrain": ("sft", ""), "sft": ("dpo", "stage=dpo_lora, or stage=lora")}
LR_OVERRIDE = "optimizer.lr="
SAMPLES = REPO_ROOT / "data" / "samples"


def next_commands(
    run_dir: Path,
    stage: str,
    data_format: str,
    data_path: Path | None,
    longer: str | None,
    settings: Mapping[str, object],
) -> tuple[NextCommand, ...]:
    """Return what to type after a completed run.

    `data_path`: the training file, None for several; `longer`: the override that trains further, None if a resumed run
    would end at once; `settings`: of the run, by dotted key.
    """
    run, val_path = f"run={display_path(run_dir)}", str(settings.get("data.val_path"))
    is_path = val_path not in ("auto", "null", "None") and not val_path.startswith(("[", "{", "hub:"))
    file = display_path(Path(val_path)) if is_path else _validation_file(data_path)
    evaluated = f"data.path={file}", f"metric={STAGE_METRICS[data_format]}"
    commands = [_command("chat", "talk to it", run), _command("evaluate", "measure it", run, *evaluated)]
    if stage in NEXT_STAGES:
        next_stage, others = NEXT_STAGES[stage]
        own = () if data_path is not None and data_path.parent == SAMPLES else ("data=own", "data.path=FILE")
        purpose = f"train the next stage{f', or {others}' if others else ''}"
        commands.append(_command("train", purpose, f"stage={next_stage}", f"init_from={display_path(run_dir)}", *own))
    if longer is not None:
        commands.append(_command("train", "train longer", f"resume={display_path(run_dir)}", longer))
    exported = "to=FOLDER", f"format={_export_format(settings)}"
    return *commands, _command("export", "write it for other programs", run, *exported)


def _export_format(settings: Mapping[str, object]) -> str:
    """Return the format in which most programs read the model, and export.py writes it."""
    has_experts = str(settings.get("model.num_experts", 0)) not in ("0", "null", "None")
    is_for_llama_cpp = not has_experts or str(settings.get("model.norm_topk_prob")).lower() == "true"
    if settings.get("model.family") == "decoder" and is_for_llama_cpp:
        return "gguf"
    return "merged" if "stage.lora.rank" in settings else "hf"


def commands_to_continue(run_dir: Path, has_checkpoint: bool) -> tuple[NextCommand, ...]:
    """Return what to type after a run that was stopped or has failed."""
    purpose = "continue from the checkpoint" if has_checkpoint else "start again: nothing is saved yet"
    return (_command("train", purpose, f"resume={display_path(run_dir)}"),)


def commands_after_divergence(
    run_dir: Path, lr: float, overrides: list[str], can_resume: bool, is_branch: bool = False
) -> tuple[NextCommand, ...]:
    """Return what to type after a run that has diverged, with a smaller learning rate.

    `overrides`: those of the run, for a branch with those of its trunk; `can_resume`: from a checkpoint.
    """
    smaller = f"{LR_OVERRIDE}{lr_after_divergence(lr)}"
    others = [override for override in overrides if not override.lstrip("+").startswith(LR_OVERRIDE)]
    again = _command("train", "start again with a smaller learning rate", *others, smaller)
    continues = (
        "continue from the newest checkpoint with a smaller learning rate"
        if is_branch
        else "or continue from the newest checkpoint with it"
    )
    resume = _command("train", continues, f"resume={display_path(run_dir)}", smaller)
    return (again,) * (not is_branch) + (resume,) * can_resume


def _command(name: str, purpose: str, *overrides: str) -> NextCommand:
    return NextCommand((*command_line_here(name), *overrides), purpose)


def _validation_file(data_path: Path | None) -> str:
    """Return X_val.jsonl beside X.jsonl if it exists, else a placeholder."""
    path = None if data_path is None else data_path.with_name(f"{data_path.stem}_val{data_path.suffix}")
    # Path.is_file raises for a name that is too long
    return display_path(path) if path is not None and os.path.isfile(path) else "FILE"


COMMAND_INDENT = "  "  # of the commands


class NextCommand(NamedTuple):
    """A command to type: `python runner/chat.py run=DIR`, with what it is for."""

    arguments: tuple[str, ...]
    purpose: str


def next_lines(commands: Sequence[tuple[Sequence[str], str]], width: int) -> list[str]:
    """Return the (arguments, purpose) of commands in lines of `width` cells below `next`; none without commands."""
    lines = (line for each in commands for line in command_lines(*each, width - len(COMMAND_INDENT)))
    return ["next", *(strip_control(COMMAND_INDENT + line) for line in lines)] if commands else []


@dataclass(frozen=True)
class RunEnd:
    """What the end of a run shows. Fields that are None have no line."""

    step: int
    total_steps: int
    tokens: int
    loss_tokens: int
    metrics: Mapping[str, float | None]  # `metrics` of run.json
    run_dir: Path
    checkpoint: Path | None  # its folder
    model: str | None  # which weights are in model/
    page: Path | None  # report.html
    peak_memory: int | None  # bytes
    memory_of: str = "process"  # or the GPU
    commands: tuple[NextCommand, ...] = ()
    prints_commands: bool = True  # False: the last line of the process names the command
    is_job: bool = False  # of a sweep, which has a table of its own: one line
    warnings: int = 0
    tokens_per_second: float | None = None

    def lines(self, width: int) -> list[str]:
        """Return the table and the commands in lines of `width` cells."""
        lines = labelled_lines([(label, strip_control(text)) for label, text in self._rows().items() if text], width)
        return lines + next_lines(self.commands if self.prints_commands else (), width)

    def event(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        counters = "step total_steps tokens loss_tokens tokens_per_second warnings peak_memory".split()
        files = {
            "run": self.run_dir,
            "page": self.page,
            "model": self.run_dir / "model" if self.model else None,
            "checkpoint": self.checkpoint,
        }
        return {
            **{name: getattr(self, name) for name in counters},
            **{name: None if path is None else str(path) for name, path in files.items()},
            "next": [list(command.arguments) for command in self.commands],
        }

    def _rows(self) -> dict[str, str | None]:
        """Return label -> text; one without a text is left out."""
        values, speed, memory = self.metrics, self.tokens_per_second, self.peak_memory
        best, last = _loss_text(values.get("best_val_loss")), _loss_text(values.get("val_loss"))
        where = f" at step {values['best_step']:,}" if values.get("best_step") is not None else ""
        return {
            "steps": f"{self.step:,} of {self.total_steps:,}",
            "tokens": f"{self.tokens:,}, {self.loss_tokens:,} of them with loss",
            "tokens/s": None if speed is None else f"{format_rate(speed)} in training steps",
            "training loss": _loss_text(values.get("loss")),
            "validation loss": f"{best} (best{where}), {last or 'not finite'} (last)" if best else last,
            "loss of training rows": _loss_text(values.get("training_rows_loss")),
            "peak memory": None if memory is None else f"{format_size(memory)}, {self.memory_of}",
            "checkpoint": display_path(self.checkpoint) if self.checkpoint else None,
            "model": self.model and f"{display_path(self.run_dir / 'model')} ({self.model})",
            "page": display_path(self.page) if self.page else None,
            "warnings": f"{self.warnings:,}, in {display_path(self.run_dir / 'train.log')}" if self.warnings else None,
        }


def _loss_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def finite_json(value: object) -> object:
    """Return a JSON value: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
