"""init_from=auto: the newest completed run of the previous stage with this model and tokenizer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError, print_note
from common.paths import outputs_dir
from runner.engine.config import Config
from runner.run_dir.best_job import comparison_problem, find_best_job, model_score
from runner.run_dir.contents import RUN_FILE, find_runs, parse_time, sweep_of
from runner.run_dir.metadata import RunMetadata

AGE_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))


def newest_completed_run(config: Config, folder: Path, fingerprints: dict[str, str], warn: bool) -> str:
    stage = config.stage.init_from_stage
    if stage is None:
        return "scratch"
    candidates = [*find_runs(outputs_dir()), *(file.parent for file in folder.parent.glob(f"*/{RUN_FILE}"))]
    found = {
        run: fields
        for run in candidates
        if _is_compatible(fields := RunMetadata.read(run), stage, fingerprints) and (run / "model").is_dir()
    }
    if not found:
        if warn:
            print_note(
                f"warning: no completed {stage} run with this model and tokenizer was found; {config.stage.name} starts from random weights"
            )
        return "scratch"
    taken, what = _or_best_job(max(found, key=lambda run: str(found[run].get("ended"))), found)
    print_note(f"init_from=auto: weights of {what} of stage {stage}, {taken} ({describe_model(found[taken])})")
    if warning := _better_run_warning(taken, found):
        print_note(f"warning: {warning}")
    return str(taken)


def _or_best_job(newest: Path, found: Collection[Path]) -> tuple[Path, str]:
    """Return (the best job of the sweep that the run is a job of, or the run itself; text that names which of the two
    it is).
    """
    sweep = sweep_of(newest)
    if sweep == newest:
        return newest, "the newest run"
    try:
        best = find_best_job(sweep)
    except UserError as error:
        print_note(f"warning: {error.message}; its job that ended last is taken. init_from=DIR chooses another")
        return newest, f"the last job of the newest sweep, {sweep.name},"
    if best in found:
        return best, f"the best job of the newest sweep, {sweep.name},"
    return newest, f"the last job of the newest sweep, {sweep.name}, whose best job has another model or tokenizer,"


def describe_model(fields: Mapping[str, Any]) -> str:
    """Return steps, loss, data and age of a completed run, from its run.json."""
    score = model_score(fields)
    names = [Path(str(file.get("file"))).name for file in fields.get("data") or ()]
    loss = "not evaluated" if score is None or score.loss is None else f"validation loss {score.loss:.4f}"
    if score is not None and score.step != fields.get("step"):
        loss += f" at step {score.step:,}"
    data = [f"data {', '.join(names[:3])}{', ...' * (len(names) > 3)}"] if names else []
    return ", ".join([f"{fields['step']:,} steps", loss, *data, f"ended {_age(fields.get('ended'))}"])


def _better_run_warning(taken: Path, found: Mapping[Path, Mapping[str, Any]]) -> str | None:
    """Return a warning if another run has a lower loss on the same evaluation rows, or has trained longer where losses
    cannot be compared.
    """
    own, others = found[taken], list[tuple[str, float, Path]]()
    for run, fields in found.items():
        evaluations = [own.get("evaluation"), fields.get("evaluation")]
        losses = [score.loss for score in map(model_score, (own, fields)) if score and score.loss is not None]
        if len(losses) == 2 and all(evaluations) and comparison_problem(evaluations) is None:
            if losses[1] < losses[0]:
                others.append(("better", losses[1], run))
        elif fields["tokens"] > own["tokens"]:
            others.append(("longer", -fields["tokens"], run))
    if not others:
        return None
    kind, _, other = min(others)  # "better" comes before "longer"
    return f"there is a {kind} run: init_from={other} ({describe_model(found[other])})"


def _age(ended: object) -> str:
    if (time_of_end := parse_time(ended)) is None:
        return "at an unknown time"
    seconds = time.time() - time_of_end
    unit, size = next((each for each in AGE_UNITS if seconds >= 2 * each[1]), ("seconds", 1))
    return f"{max(0, int(seconds / size)):,} {unit} ago"


def _is_compatible(fields: Mapping[str, Any], stage: str, fingerprints: dict[str, str]) -> bool:
    """Return whether the run of `fields` (run.json) can be the start of another; not if a count is missing."""
    if fields.get("status") != "completed" or fields.get("stage") != stage or not {"step", "tokens"} <= fields.keys():
        return False
    return fields.get("fingerprints", {}).items() >= fingerprints.items()
