"""Resume a run: compare its overrides with its checkpoint, then train on in its directory."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError, print_safely, strip_control
from runner.config import hydra_runtime
from runner.config.unread import check_typed_are_read
from runner.launch.run import check_inputs, run
from runner.recovery.recover import recover_run
from runner.run_dir import resume
from runner.run_dir.metadata import RunMetadata
from runner.tracking.console.modes import open_console

EXTENDING_KEYS = ("train.max_steps=", "train.epochs=", "train.patience=")  # settings that let a completed run train on
LABEL_PREFIX = "run."  # name, tags and note


def _label_run(metadata: RunMetadata, plan: resume.ResumePlan) -> None:
    """Record another name, tags or note of a completed run; nothing is trained."""
    with resume.persisting_overrides(plan) as config:
        metadata.update(**vars(config.run))
    print_safely(
        f"{metadata.folder}: {' '.join(plan.extra)} is recorded; the run stays complete at step {metadata.fields['step']}"
    )


def resume_run(folder: Path, extra: list[str]) -> None:
    """Train on in `folder` with the overrides `extra`, unless the run is completed and they change nothing."""
    extra, runtime = hydra_runtime.typed_settings(extra)
    with RunMetadata.open(folder, resume=True, recover=recover_run) as metadata:
        plan = resume.plan_resume(folder, extra, has_started=metadata.attempt > 0)
        if metadata.attempt:  # for a job of a sweep that has not begun, nothing can have changed
            resume.print_notes(plan)
        if metadata.status == "completed" and not plan.is_changed:
            return open_console(plan.config.tracker.console).print(
                strip_control(f"{folder}: already complete at step {metadata.fields['step']}")
            )
        if metadata.status == "completed" and all(override.startswith(LABEL_PREFIX) for override in extra):
            return _label_run(metadata, plan)
        if metadata.status == "completed" and not any(override.startswith(EXTENDING_KEYS) for override in extra):
            step = metadata.fields["step"]
            message = f"the run is completed at step {step}, and the overrides add no step"
            raise UserError(
                message,
                " ".join(extra),
                f"add train.max_steps=N with N > {step}, or start a new run with init_from={folder}",
            )
        check_inputs(plan.config)
        check_typed_are_read(extra, [plan.config])
        with metadata.reopened(), resume.persisting_overrides(plan) as config:
            hydra_runtime.run_resumed(lambda: run(config, metadata), folder, plan.tree, plan.overrides, runtime)
