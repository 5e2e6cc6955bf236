"""Settings that a plan chooses before a start.

train.batch_size=auto: the largest micro-batch that the memory holds, with the rows per step of the settings.

sweep.budget: the length of the jobs of a sweep with rungs, so that the search costs about half of a budget; what it
leaves goes to wider ranges and more seeds (runner/sweep/seeds.py).
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from common.errors import UserError, print_note, print_safely
from common.paths import REPO_ROOT
from runner.config.compose import compose_config, compose_tree
from runner.config.overrides import key_of
from runner.engine.config import BUDGET_LIMIT
from runner.planning.alternatives import MicroBatch
from runner.run_dir.best_job import SEED_KEY
from runner.sweep import grid, validation
from runner.sweep.extend import STEPS_KEY
from runner.sweep.halving import HalvingOptions, describe_cost, planned_cost
from runner.sweep.seeds import Budget
from runner.sweep.state import SweepState

AUTO_SIZE = "train.batch_size=auto"
SIZE_KEYS = ("train.batch_size=", "train.accumulation_steps=")
KEY, SWEEPER_KEY, RUNG_KEY = "sweep.budget=", "hydra/sweeper", "hydra.sweeper.first_rung="
EVAL_KEY = "train.eval_every"
SEARCH_SHARE = 0.5  # of the budget, for the rungs: a machine that is slower while others use it still finishes them
PLANNED_STEPS = 8  # between evaluations of the jobs whose costs are asked for
MAX_STEPS = 10**9  # between evaluations
START_SHARE = 0.3  # of the start of plan.py and of each of its trials, which is that of a job: jobs are forked
FINE = 4  # evaluations up to the first rung; 1 where they would take more than EVAL_SHARE of the time
EVAL_SHARE = 0.2
FLOPS_PER_PARAMETER = (
    6  # and token, forward and backward: Kaplan et al. (2020), Scaling laws for neural language models
)


def with_batch_size(typed: list[str], is_multirun: bool) -> list[str]:
    """Return the overrides of a new run with a micro-batch and an accumulation in place of AUTO_SIZE; `typed` itself
    without it.

    Raises UserError for a sweep, and if no micro-batch fits.
    """
    if AUTO_SIZE not in typed:
        return typed
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
    others = [found["overrides"] for found in plan["alternatives"] if found["fits"] and not found["changes"]]
    if fitting := [each for each in others if re.fullmatch(r"\S+=\d+ \S+=\d+", each)]:
        return fitting[0]
    fix = (
        f"train.batch_size=1 with {' or '.join(others) or 'a smaller model (model=...), or a shorter data.max_length'}"
    )
    raise UserError("not even a micro-batch of one row fits into the memory", AUTO_SIZE, fix)


class JobCost(NamedTuple):
    """What a job costs, in the unit of the budget; means over the jobs."""

    start: float  # each time that it is started
    evaluation: float
    step: float


def with_budget(typed: list[str], is_multirun: bool) -> list[str]:
    """Return the overrides of a new sweep with train.max_steps and train.eval_every that its sweep.budget allows, and
    print them with their cost; `typed` itself without a budget.

    Raises UserError where there is no sweep, or nothing useful for so little.
    """
    text = next((each.removeprefix(KEY) for each in reversed(typed) if each.startswith(KEY)), "null")
    if text == "null":
        return typed
    BUDGET_LIMIT.check(KEY[:-1], text)
    if not is_multirun:
        fix = "add --multirun, and several values of a setting, e.g. optimizer.lr=1e-4,5e-4"
        raise UserError("sweep.budget is what a sweep may spend", KEY + text, fix)
    others, keys = [each for each in typed if not each.startswith(KEY)], set(map(key_of, typed))
    if SWEEPER_KEY not in keys:
        others.append(f"{SWEEPER_KEY}=halving")
    tree, budget = compose_tree(grid.split_swept(others, is_grid=False)[0]), Budget.parse(text)
    tree.sweep.budget = "1tokens" if budget.unit == "flops" else text  # FLOPs become tokens below
    options, _ = validation.hydra_options(tree)
    assert isinstance(options, HalvingOptions)
    if options.first_rung > 0.5:
        rung = f"{RUNG_KEY}{options.first_rung}"
        raise UserError("sweep.budget needs a first rung of at most half of the steps", rung, RUNG_KEY + "0.5")
    first = math.ceil(1 / options.first_rung)  # evaluations of a job that has one at each rung
    is_given = STEPS_KEY in keys
    if EVAL_KEY in keys and not is_given:
        fix = f"leave it out, or give {STEPS_KEY}, too"
        raise UserError(f"sweep.budget sets {EVAL_KEY}: an evaluation at each rung", EVAL_KEY, fix)
    length = [] if is_given else [f"{STEPS_KEY}={PLANNED_STEPS * first}", f"{EVAL_KEY}={PLANNED_STEPS}"]
    print_note(f"{KEY}{text}: planning{', with some timed steps' * (budget.unit == 's')}")
    began = time.monotonic()
    runs = planned_runs(["--multirun", *others, *length], is_timed=budget.unit == "s")
    if budget.unit == "flops":
        budget, text = in_tokens(budget, runs, text)
    points = len({frozenset(each for each in run["name"].split() if key_of(each) != SEED_KEY) for run in runs})
    counts, full_runs = planned_cost(points, len(runs), options.eta, options.shares)
    cost, starts = mean_cost(runs, budget.unit, time.monotonic() - began), sum(counts) * len(runs) / points
    share = 1.0 if is_given else SEARCH_SHARE
    elapsed = time.monotonic() - SweepState.counted_at if budget.unit == "s" else 0.0
    limit = share * (budget.amount - elapsed)
    if is_given:
        steps, chosen = statistics.fmean(run["data"]["steps"] for run in runs), list[str]()
        evaluations = float(first)
    else:
        available = (limit - starts * cost.start) / full_runs
        evaluations = FINE * first if FINE * first * (cost.evaluation + cost.step) <= EVAL_SHARE * available else first
        every = max(1, int(min(MAX_STEPS, (available - evaluations * cost.evaluation) / cost.step / evaluations)))
        steps, chosen = every * evaluations, [f"{STEPS_KEY}={every * evaluations}", f"{EVAL_KEY}={every}"]
    search = starts * cost.start + full_runs * (steps * cost.step + evaluations * cost.evaluation)
    if search > limit:
        least = budget._replace(amount=1.1 * (search / share + elapsed))
        raise UserError(
            f"the rungs alone cost about {budget.describe(search)}: {describe_cost(points, len(runs), options.eta, options.shares)}, of {steps:.0f} steps each",
            KEY + text,
            f"{KEY}{as_override(least)}, or fewer points" + (f", or a smaller {STEPS_KEY}" if is_given else ""),
        )
    timed = f" ({time.monotonic() - began:.0f} s to time some steps)" if budget.unit == "s" else ""
    print_note(
        f"{KEY}{text}{timed}: {' '.join(chosen) or f'{steps:.0f} steps'}; the rungs cost about {budget.describe(search)}, the rest is for values beyond the edges and seeds of the best {tree.sweep.top}"
    )
    return [*others, *chosen, KEY + text]


def in_tokens(budget: Budget, runs: list[dict[str, Any]], text: str) -> tuple[Budget, str]:
    """Return a budget of FLOPs as tokens, and as the value of sweep.budget."""
    active = {run["model"]["active"] for run in runs}
    if len(active) > 1:
        raise UserError(
            f"the points have models of {min(active):,} to {max(active):,} active parameters: the same FLOPs are different numbers of tokens",
            KEY + text,
            "a budget in minutes or tokens",
        )
    per_token = FLOPS_PER_PARAMETER * active.pop()
    tokens = Budget(budget.amount / per_token, "tokens")
    print_note(f"{KEY}{text}: {tokens.describe(tokens.amount)} of {per_token:.3g} FLOPs (6 per active parameter)")
    return tokens, f"{int(tokens.amount)}tokens"


def mean_cost(runs: list[dict[str, Any]], unit: str, planned_in: float) -> JobCost:
    """`runs`: of plan.py, which took `planned_in` seconds. With sweep.match_budget the jobs of `runs` have different numbers of steps: a step of the
    result is one of the longest job.
    """
    longest = max(run["data"]["steps"] for run in runs)
    if unit == "tokens":
        return JobCost(0.0, 0.0, statistics.fmean(run["data"]["run_tokens"] for run in runs) / longest)
    if failed := next((run for run in runs if not run["time"]), None):
        raise UserError(f"no step could be timed: {'; '.join(failed['notes'])}", failed["name"], "a budget in tokens")
    times = [run["time"] for run in runs]
    steps = [run["data"]["steps"] * run["data"]["padding"] * run["time"]["step_seconds"] for run in runs]
    trials = {tuple(each.values()): measured_seconds(each) for each in times}
    return JobCost(
        START_SHARE * (planned_in - sum(trials.values())) / (1 + len(trials))
        + statistics.fmean(each["first_step_seconds"] + each["save_seconds"] for each in times),
        statistics.fmean(each["eval_seconds"] for each in times),
        statistics.fmean(steps) / longest,
    )


def measured_seconds(trial: dict[str, Any]) -> float:
    """Return about how long a trial took after its start."""
    steps = trial["first_step_seconds"] + trial["timed_steps"] * trial["step_seconds"]
    return steps + trial["eval_seconds"] + trial["sample_seconds"] + trial["save_seconds"]


def as_override(budget: Budget) -> str:
    """Return a value of sweep.budget of at least the amount."""
    if budget.unit == "s":
        return f"{math.ceil(budget.amount / 60)}m" if budget.amount > 600 else f"{math.ceil(budget.amount)}s"
    return f"{budget.amount * 1.005:.3g}".replace("+", "") + budget.unit
