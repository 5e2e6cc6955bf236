"""compare.py: whether arms (settings, each with one run per seed) differ in their evaluation loss by more than chance.

The loss of a run is that of the weights in its `model/`. Lower is better. The rule is that of statistics.py; with one
seed in an arm the spread over seeds is not known, and nothing is decided.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from common.errors import NOT_TOLD_APART, OTHER_IS_BETTER, UserError, clean_texts, print_safely, resume_command
from common.filesystem import sha256_of
from runner.config.resolve import resolve_run
from runner.diagnostics.symptoms import finite_number
from runner.inference.evaluate import EVALUATIONS_FILE, current_evaluations
from runner.reporting.columns import loss_text
from runner.reporting.compare import FACTS, ComparedRun, Comparison, shortened_table
from runner.reporting.metrics import iter_records
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.runs import (
    NO_VALUE,
    RUN_FIELDS,
    as_dict,
    differing_values,
    is_file,
    split_names,
)
from runner.reporting.statistics import (
    MAX_LOSS,
    MAX_SEEDS,
    POWER,
    MeanStd,
    difference_interval,
    is_different,
    mean_std,
    needed_seeds,
    shared_level,
)
from runner.reporting.sweep_results import own_train_command
from runner.run_dir.best_job import SEED_KEY, comparison_problem, model_score
from runner.run_dir.contents import RUN_FILE, enclosing_run, is_sweep_dir, size_of, typed

MIN_SEEDS = 3  # of an arm with the seeds that `add_seeds` trains
# what runs of one arm must have in common beside their settings
SAME_IN_AN_ARM = ("tokenizer (fingerprint)", "model shape (fingerprint)")
# prefixes of settings that no number of a run depends on
NOT_TRAINED = (
    *("sweep.", "supervise.", "train.supervise", "train.log_every", "train.save_every", "train.keep_"),
    *("train.sample_", "train.max_hours", "train.max_failed_saves", "train.profile", "train.verify_resume"),
    *("data.num_workers", "data.worker_timeout", "distributed.timeout", "distributed.max_restarts"),
)


@dataclass
class CompareConfig:
    # run directories that differ in the seed alone, separated by commas; a sweep: the jobs of its best point; or a model
    # folder with results of evaluate.py
    a: Optional[str]
    b: Optional[str]  # compared with a
    c: Optional[str]  # a third arm; with more than two, each is compared with the best
    d: Optional[str]  # a fourth
    e: Optional[str]  # a fifth
    f: Optional[str]  # a sixth
    json: bool  # print one JSON object instead of text

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            given = " ".join(f"{name}={value}" for name, value in self.arms.items())
            raise UserError("compare.py compares two and more arms", given or "compare.py", "a=DIR b=DIR")

    @property
    def arms(self) -> dict[str, str]:
        return {name: value for name in "abcdef" if (value := getattr(self, name))}


@dataclass
class Arm:
    name: str
    given: str  # as typed
    runs: list[ComparedRun]
    points: int = 1  # of the sweep whose best point this is

    @property
    def setting(self) -> str:
        return f"{self.name}={self.given}"

    @cached_property
    def loss(self) -> MeanStd:
        found = mean_std(loss_of(run) for run in self.runs)
        assert found is not None
        return found

    @property
    def seeds(self) -> list[str]:
        return [run.values.get(SEED_KEY, "") for run in self.runs]

    @property
    def add_seeds(self) -> str:
        """The command that trains more seeds of the arm; empty where its settings are not known."""
        run, known = self.runs[0], {int(seed) for seed in self.seeds if seed.lstrip("-").isdecimal()}
        if not known or run.branched_from:  # a branch has the seed of its trunk
            return ""
        unused = (seed for seed in range(1, MAX_SEEDS) if seed not in known)
        new = [str(next(unused)) for _ in range(max(1, MIN_SEEDS - len(self.runs)))]
        own = [each for each in run.overrides if not each.startswith(f"{SEED_KEY}=")]
        return own_train_command(own, "--multirun", f"{SEED_KEY}={','.join(new)}")


@dataclass(frozen=True)
class Difference:
    """Of the losses of two arms, one of which has the lowest of all; `first` was given first."""

    first: Arm
    second: Arm
    level: float

    @property
    def value(self) -> float:
        return self.second.loss.mean - self.first.loss.mean

    @property
    def interval(self) -> tuple[float, float] | None:
        return difference_interval(self.first.loss, self.second.loss, self.level)

    @property
    def is_real(self) -> bool:
        return bool(is_different(self.first.loss, self.second.loss, self.level))

    @property
    def needed_seeds(self) -> int | None:
        """About how many seeds per side would decide; None: not known, decided already, or too many."""
        found = None if self.is_real else needed_seeds(self.first.loss, self.second.loss, self.level)
        return found and max(found, self.first.loss.n + 1, self.second.loss.n + 1)


@dataclass
class ArmComparison:
    arms: list[Arm]
    runs: Comparison  # of all arms

    @cached_property
    def best(self) -> Arm:
        return min(self.arms, key=lambda arm: arm.loss.mean)

    @cached_property
    def differences(self) -> list[Difference]:
        level = shared_level(len(self.arms) - 1)
        pairs = [(self.arms.index(self.best), index) for index, arm in enumerate(self.arms) if arm is not self.best]
        return [Difference(self.arms[min(pair)], self.arms[max(pair)], level) for pair in pairs]

    @property
    def evaluation(self) -> dict[str, Any]:
        """What all runs were judged on."""
        return self.arms[0].runs[0].evaluation

    @property
    def verdict(self) -> str:
        """better: a is; worse: another arm is better than all others, or not told apart."""
        if not all(difference.is_real for difference in self.differences):
            return "not told apart"
        return "better" if self.best is self.arms[0] else "worse"

    @property
    def reason(self) -> str:
        """Why the arms are not told apart; empty where they are."""
        if self.verdict != "not told apart":
            return ""
        if single := [arm.name for arm in self.arms if arm.loss.n == 1]:
            return f"one seed in {', '.join(single)}: the spread over seeds is not known"
        return "0 is in the interval of the difference"

    @property
    def notes(self) -> list[str]:
        notes = [
            f"{arm.name} is the best of {arm.points} points of its sweep, chosen by these losses: its mean is too low by chance"
            for arm in self.arms
            if arm.points > 1
        ]
        return [*self.runs.notes, *notes]

    @property
    def differing(self) -> dict[str, list[str]]:
        """Settings and facts that differ: key -> value of each arm, several joined."""
        found = {}
        for key, _ in self.runs.differing:
            values = [", ".join(dict.fromkeys(run.values.get(key, NO_VALUE) for run in arm.runs)) for arm in self.arms]
            if key != SEED_KEY and len({*values}) > 1:
                found[key] = values
        return found


def print_comparison(cfg: CompareConfig) -> None:
    """Print the verdict. Raises SystemExit with NOT_TOLD_APART, or OTHER_IS_BETTER where the best arm is not `a`."""
    comparison = compare_arms(cfg.arms)
    print_safely(json.dumps(clean_texts(comparison_json(comparison))) if cfg.json else comparison_text(comparison))
    if comparison.verdict != "better":
        raise SystemExit(OTHER_IS_BETTER if comparison.verdict == "worse" else NOT_TOLD_APART)


def compare_arms(given: dict[str, str]) -> ArmComparison:
    """Read the arms. Raises UserError where their losses cannot be compared."""
    arms = [_read_arm(name, value) for name, value in given.items()]
    runs, owners = [run for arm in arms for run in arm.runs], dict[Path, Arm]()
    for arm in arms:
        for run in arm.runs:
            if (owner := owners.setdefault(run.folder.resolve(), arm)) is not arm:
                raise UserError(
                    f"{owner.name} and {arm.name} have the same run", str(run.folder), "leave it out of one"
                )
    if not all(is_file(run.folder / RUN_FILE) for run in runs):  # a model folder
        _use_results_of_evaluate(runs)
    for run in runs:
        _check_evaluated(run)
    if problem := comparison_problem(run.evaluation for run in runs):
        fix = "train all with the same validation rows (data.val_path), tokenizer, data.max_length and stage; or export them (export.py), measure all with evaluate.py, and compare the exported folders"
        settings = " ".join(arm.setting for arm in arms)
        raise UserError(f"the runs cannot be compared: they were judged {problem}", settings, fix)
    comparison = ArmComparison(arms, Comparison(runs))
    for arm in arms:
        _check_one_arm(arm)
    return comparison


def _read_arm(name: str, given: str) -> Arm:
    arm = Arm(name, given, [])
    for part in split_names(given):
        path = Path(part).expanduser().absolute()
        is_model = is_file(path / "config.json") or is_file(path / "adapter_config.json")
        if is_model and enclosing_run(path) is None:
            arm.runs.append(ComparedRun(path, typed({}, RUN_FIELDS), "completed"))
            continue
        folder = resolve_run(part, name)
        if is_sweep_dir(folder):
            point, arm.points = _best_point(folder, arm.setting)
            arm.runs += point
        else:
            arm.runs.append(ComparedRun.read(folder))
    arm.runs = [*{run.folder: run for run in arm.runs}.values()]
    return arm


def _best_point(sweep: Path, setting: str) -> tuple[list[ComparedRun], int]:
    """Return the jobs of the best point of a sweep, and the number of points it was chosen from."""
    results = read_sweep_results(sweep)
    if not results.ranked:
        reason = results.problem or "no point has all of its jobs completed and evaluated"
        raise UserError(
            f"this sweep has no best point: {reason}", setting, f"name its jobs; or {results.resume_command}"
        )
    completed = [job.run_dir for job in results.ranked[0].jobs if job.run_dir and job.status == "completed"]
    return [*map(ComparedRun.read, completed)], len(results.rows)


def _use_results_of_evaluate(runs: list[ComparedRun]) -> None:
    """Set the loss of each run or model folder to that of evaluate.py on the data that all were evaluated on."""
    of_runs = [_measured(run) for run in runs]
    common = [data for data in of_runs[0] if all(data in measured for measured in of_runs)]
    if not common:
        raise UserError(
            "the runs and model folders have no result of evaluate.py on the same data in the same dtype",
            ", ".join(str(run.folder) for run in runs),
            "evaluate each of them on the same file: python runner/evaluate.py run=DIR data.path=FILE metric=perplexity dtype=fp32",
        )
    for run, measured in zip(runs, of_runs, strict=True):
        path, tokens = common[-1]
        tokenizers = (run.folder / "tokenizer.json", run.folder / "model" / "tokenizer.json")
        tokenizer = next(filter(is_file, tokenizers), None)
        identity = {"on": f"evaluate.py on {path}", "data": path, "tokens": tokens, "loss": {}}
        identity["tokenizer"] = tokenizer and sha256_of(tokenizer, size_of(tokenizer))
        export = {"weights": "last", "step": 0, **as_dict(run.fields.get("export")), "loss": measured[common[-1]]}
        run.fields |= {"status": run.status, "evaluation": identity, "export": export}


def _measured(run: ComparedRun) -> dict[tuple[str, int], float]:
    """Return (data, tokens) -> loss of the results of evaluate.py metric=perplexity for the weights of `run`, the newest
    last.
    """
    is_run = is_file(run.folder / RUN_FILE)
    records = current_evaluations(run.fields) if is_run else iter_records(run.folder / EVALUATIONS_FILE)
    found: dict[tuple[str, int], float] = {}
    for record in records:
        loss, tokens = finite_number(record.get("loss")), record.get("loss_tokens")
        if record.get("metric") == "perplexity" and loss is not None and isinstance(tokens, int):
            where = record.get("files") or record.get("data"), record.get("dtype")
            data = " in ".join(str(part) for part in where if part), tokens
            found.pop(data, None)  # the order is that of the newest results
            found[data] = loss
    return found


def loss_of(run: ComparedRun) -> float | None:
    score = model_score(run.fields)
    return score.loss if score else None


def _check_evaluated(run: ComparedRun) -> None:
    if run.status != "completed":
        fix = "compare it when it has ended" if run.is_running else resume_command(run.folder)
        raise UserError(f"this run is not completed: {run.status}", str(run.folder), fix)
    if (loss := loss_of(run)) is None or not run.evaluation or not abs(loss) < MAX_LOSS:
        raise UserError(
            "this run has no evaluation loss of the weights in model/",
            str(run.folder),
            "train it again with data.val_fraction or data.val_path; train.final_eval_rows=256 evaluates training rows",
        )


def _check_one_arm(arm: Arm) -> None:
    """Raise UserError unless the runs of an arm differ in their seed, and in nothing else that is trained."""
    for key, values in differing_values([run.values for run in arm.runs]).items():
        if not (key == SEED_KEY or key.startswith(NOT_TRAINED)) and (key not in FACTS or key in SAME_IN_AN_ARM):
            shown = ", ".join(dict.fromkeys(values))
            fix = "name the runs of other settings as another arm, e.g. c=RUN"
            raise UserError(f"the runs of {arm.name} differ in more than the seed: {key} is {shown}", arm.setting, fix)
    seeds = [seed for seed in arm.seeds if seed]
    losses = [loss_of(run) for run in arm.runs]
    if len({*losses}) < len(losses):
        message = f"{arm.name} has several runs with the same loss: copies of one run, or the seed changes nothing"
        raise UserError(message, arm.setting, "give one run of each seed")
    if len({*seeds}) < len(seeds):
        repeated = next(seed for seed in seeds if seeds.count(seed) > 1)
        message = f"{arm.name} has several runs with seed={repeated}: they do not show the spread over seeds"
        raise UserError(message, arm.setting, "give one run of each seed")


def comparison_json(comparison: ArmComparison) -> dict[str, Any]:
    arms = {
        arm.name: {
            "runs": [str(run.folder) for run in arm.runs],
            "loss": arm.loss.mean,
            "deviation": arm.loss.deviation,
            "seeds": arm.loss.n,
            "losses": [loss_of(run) for run in arm.runs],
            "add_seeds": arm.add_seeds or None,
        }
        for arm in comparison.arms
    }
    differences = [
        {
            "first": each.first.name,
            "second": each.second.name,
            "difference": each.value,
            "interval": each.interval,
            "level": each.level,
            "told_apart": each.is_real,
            "needed_seeds": each.needed_seeds,
        }
        for each in comparison.differences
    ]
    return {
        "verdict": comparison.verdict,
        "best": comparison.best.name,
        "reason": comparison.reason,
        "arms": arms,
        "differences": differences,
        "evaluation": {key: comparison.evaluation.get(key) for key in ("on", "rows", "tokens")},
        "settings": comparison.differing,
        "notes": comparison.notes,
    }


def comparison_text(comparison: ArmComparison) -> str:
    rows = [
        [arm.name, loss_text(arm.loss), f"{arm.loss.n} seed{'s' * (arm.loss.n > 1)}", arm.given]
        for arm in comparison.arms
    ]
    lines = shortened_table(rows, [False] * 4)
    lines += [f"evaluation loss of model/, lower is better; judged on {_judged_on(comparison.evaluation)}", ""]
    others = " and ".join(arm.name for arm in comparison.arms if arm is not comparison.best)
    first = comparison.arms[0].name
    verdicts = {
        "better": f"{first} is better than {others}",
        "worse": f"{first} is worse: {comparison.best.name} is better than {others}",
    }
    lines.append(verdicts.get(comparison.verdict) or f"not told apart: {comparison.reason}")
    lines += [*map(_difference_text, comparison.differences)]
    if comparison.verdict not in verdicts:
        few = [arm for arm in comparison.arms if arm.loss.n == 1] or comparison.arms
        commands = [f"more seeds of {arm.name}: {arm.add_seeds}" for arm in few if arm.add_seeds]
        lines += [*commands, f"then compare with {few[0].name}={few[0].given},SWEEP"] if commands else []
    lines += [f"note: {note}" for note in comparison.notes]
    if differing := comparison.differing:
        table = [["", *(arm.name for arm in comparison.arms)], *([key, *values] for key, values in differing.items())]
        return "\n".join([*lines, "", "what differs", *shortened_table(table, [False] * len(table[0]))])
    return "\n".join([*lines, "", "no setting differs"])


def _judged_on(evaluation: dict[str, Any]) -> str:
    if isinstance(rows := evaluation.get("rows"), int):
        return f"{rows:,} {evaluation.get('on')} rows"
    tokens = evaluation.get("tokens")
    return f"{f'{tokens:,}' if isinstance(tokens, int) else 'an unknown number of'} tokens by {evaluation.get('on')}"


def _difference_text(each: Difference) -> str:
    text = f"{each.second.name} - {each.first.name}: {each.value:+.4f}"
    if each.interval is None:
        return text
    text += f", from {each.interval[0]:+.4f} to {each.interval[1]:+.4f} (Welch's t interval over seeds, {100 * each.level:.4g} %)"
    if each.is_real:
        return text
    if each.needed_seeds is None:
        return f"{text}; no number of seeds up to {MAX_SEEDS:,} decides a difference of this size"
    return f"{text}; about {each.needed_seeds:,} seeds per side decide a difference of this size ({100 * POWER:.0f} % sure)"
