"""train.batch_size=auto: the largest micro-batch that the memory holds, with the rows per step of the settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from common.errors import UserError, print_note, print_safely
from common.paths import REPO_ROOT
from runner.config.compose import compose_config
from runner.planning.alternatives import MicroBatch

AUTO_SIZE = "train.batch_size=auto"
SIZE_KEYS = ("train.batch_size=", "train.accumulation_steps=")


def with_batch_size(typed: list[str], is_multirun: bool) -> list[str]:
    """Return the overrides of a new run with a micro-batch and an accumulation in place of AUTO_SIZE.

    Raises UserError for a sweep, and if no micro-batch fits.
    """
    if is_multirun:
        fix = "give numbers; python runner/plan.py --multirun with them says what fits"
        raise UserError("jobs of a sweep differ in what fits: each needs a number", AUTO_SIZE, fix)
    others = [override for override in typed if override != AUTO_SIZE]
    train = compose_config(others).train
    rows = train.batch_size * train.accumulation_steps
    others = [override for override in others if not override.startswith(SIZE_KEYS)]
    whole = MicroBatch(rows, 1).overrides.split()
    chosen = fitting_batch(planned_runs([*others, *whole], is_timed=False)[0], rows)
    print_note(f"{AUTO_SIZE}: {chosen}, {rows} rows per step on each rank")
    return [*others, *chosen.split()]


def planned_runs(arguments: list[str], is_timed: bool) -> list[dict[str, Any]]:
    """Return the field `runs` of plan.py with these arguments.

    Another process plans: what it imports and allocates is not in this one. Exits as it does where it refuses the runs;
    its notes are those that the start of the runs prints again.
    """
    options = [f"timing={str(is_timed).lower()}", "json=true"]
    command = [sys.executable, str(REPO_ROOT / "runner" / "plan.py"), *arguments, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print_safely(done.stderr.rstrip("\n"), sys.stderr)
        sys.exit(done.returncode)
    return json.loads(done.stdout)["runs"]


def fitting_batch(plan: dict[str, Any], rows: int) -> str:
    """Return the overrides of the largest micro-batch that fits; `plan`: of micro-batches of all `rows` of a step."""
    if not plan["alternatives"]:
        return MicroBatch(rows, 1).overrides
    for found in plan["alternatives"]:
        if found["fits"] and not found["changes"] and re.fullmatch(r"\S+=\d+ \S+=\d+", found["overrides"]):
            return found["overrides"]
    others = [found["overrides"] for found in plan["alternatives"] if found["fits"] and not found["changes"]]
    fix = (
        f"train.batch_size=1 with {' or '.join(others) or 'a smaller model (model=...), or a shorter data.max_length'}"
    )
    raise UserError("not even a micro-batch of one row fits into the memory", AUTO_SIZE, fix)
