"""What `resume=` would do with a run: the same plan and comparisons as a resume, without torch and without a change."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import UserError, resume_command
from common.settings import setting_values
from runner.checkpoint.compatibility import CODE, ENVIRONMENT, diff_facts, environment_facts, run_rules
from runner.checkpoint.environment import code_fingerprint, cpu_model, numeric_variables
from runner.engine.config import Config
from runner.launch.preflight import check_inputs
from runner.recovery.evidence import Evidence
from runner.recovery.finding import Finding, Severity
from runner.run_dir.contents.fields import has_started
from runner.run_dir.contents.files import RUN_FILE
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.resume import plan_resume

TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)
UNKNOWN_WITHOUT_TORCH = "the data, and the number of threads and ranks, are compared when it starts"


class Verdict(StrEnum):
    CONTINUES = "continues"
    COMPLETE = "complete"
    REFUSES = "refuses"


@dataclass(frozen=True)
class Prediction:
    """What resume= would do. `step`: where it continues; `inexact`: why its bits may differ from an uninterrupted run."""

    verdict: Verdict
    text: str
    command: str
    step: int = 0
    inexact: Sequence[str] = ()


def predict_resume(evidence: Evidence, findings: list[Finding]) -> Prediction:
    """Return what `python runner/train.py resume=DIR` does with the run, whose findings are given."""
    folder = evidence.folder
    command = resume_command(folder)
    if blocking := next((finding for finding in findings if finding.severity is Severity.BLOCKING), None):
        return Prediction(Verdict.REFUSES, f"refuses because of {blocking.file}: {blocking.state}", blocking.consequence)
    is_restored = any(finding.file == RUN_FILE and finding.severity is Severity.DAMAGED for finding in findings)
    fields: dict[str, Any] = {"status": "interrupted", "attempt": 1} if is_restored else RunMetadata.read(folder)
    try:
        config = _compose(evidence, has_started(fields))
        if fields.get("status") == "completed":
            return Prediction(
                Verdict.COMPLETE, f"prints that the run is complete at step {fields.get('step')}", f"{command} train.max_steps=N", fields.get("step", 0)
            )
        check_inputs(config)
        return _compare(evidence, config, fields, command)
    except UserError as error:
        return Prediction(Verdict.REFUSES, f"refuses: {error.message}", error.fix)


def _compose(evidence: Evidence, started: bool) -> Config:
    """Return the config that a resume composes, with the damaged files of `.hydra/` as it would restore them."""
    with _restored_settings(evidence) as folder:
        try:
            return plan_resume(folder, [], has_started=started).config
        except UserError as error:
            texts = [text.replace(str(folder), str(evidence.folder)) for text in (error.message, error.setting, error.fix)]
            raise UserError(*texts) from error


@contextmanager
def _restored_settings(evidence: Evidence) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="settings-") as temp:
        folder = Path(temp).resolve()
        if (evidence.folder / ".hydra").is_dir():
            shutil.copytree(evidence.folder / ".hydra", folder / ".hydra", symlinks=True)
        from runner.recovery.settings_files import damage_of

        for name, text in evidence.record["files"].items():
            if damage_of(folder / name, text, name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _compare(evidence: Evidence, config: Config, fields: dict[str, Any], command: str) -> Prediction:
    if evidence.newest_whole is None:
        begins = "starts again at step 0: there is no checkpoint yet" if has_started(fields) else "starts the run, which has not begun to train"
        return Prediction(Verdict.CONTINUES, begins, command)
    name, state = evidence.newest_whole
    step = state["progress"]["step"]
    if 0 < config.train.max_steps < step:
        text = f"refuses: the run is already at step {step}, and train.max_steps={config.train.max_steps}"
        return Prediction(Verdict.REFUSES, text, f"{command} train.max_steps={step}")
    differences = diff_facts(state["compatibility"], current_facts(state["compatibility"], config), run_rules(config))
    if differences["incompatible"]:
        return Prediction(Verdict.REFUSES, f"refuses: another configuration saved {name}: {'; '.join(differences['incompatible'])}", "restore the settings")
    inexact = differences["changes_rounding"]
    how = f"with exact: false because {'; '.join(inexact)}" if inexact else f"exactly ({UNKNOWN_WITHOUT_TORCH})"
    return Prediction(Verdict.CONTINUES, f"continues at step {step} {how}", command, step, inexact)


def torch_version() -> str | None:
    """Return `torch.__version__` without importing torch. The metadata of its wheel lack the build: 2.13.0 for 2.13.0+cu130."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):
        found = TORCH_VERSION.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
        return found[1] if found else None
    return None


def current_facts(saved: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the facts `saved` in a checkpoint with the values that they have now, as far as they can be known without torch and without the data."""
    now = {"python": platform.python_version(), "code": code_fingerprint(), "cpu_model": cpu_model()}
    with suppress(metadata.PackageNotFoundError):
        now["numpy"] = metadata.version("numpy")
    if torch := torch_version():
        now["torch"] = torch
    now |= {f"variables.{name}": value for name, value in numeric_variables(os.environ).items()}
    kept = {fact: value for fact, value in saved.items() if not fact.startswith(f"{ENVIRONMENT}.variables.")}
    known = environment_facts(now)
    if CODE not in saved:  # of an earlier version, which recorded less
        known = {fact: value for fact, value in known.items() if fact in saved or fact == CODE}
    return {**kept, **setting_values(config), **known}
