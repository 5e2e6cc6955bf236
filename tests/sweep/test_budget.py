"""What the jobs of a sweep have in common, by numbers."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.sweep import budget
from runner.sweep.budget import StepSize

ROWS = ["train.batch_size"]  # a swept key by which sweep.match_budget=auto means tokens


@pytest.fixture(scope="module")
def base() -> Config:
    return compose_config(
        [
            "data.packing=none",
            "train.batch_size=8",
            "train.max_steps=400",
            "schedule.warmup_steps=20",
            "optimizer.lr=1e-3",
            "train.keep_every=0",
            "train.log_every=2",
        ]
    )


def job(base: Config, **values: object) -> Config:
    """`base` with settings of the section train, and with match_budget and lr_scale of sweep."""
    rules = {name: values.pop(name) for name in ("match_budget", "lr_scale") if name in values}
    return dataclasses.replace(
        base, train=dataclasses.replace(base.train, **values), sweep=dataclasses.replace(base.sweep, **rules)
    )  # type: ignore[arg-type]  # values of many types in one dict


def test_budget_four_times_the_rows_per_step_take_a_quarter_of_the_steps(base: Config) -> None:
    assert budget.matching_overrides(job(base, accumulation_steps=4), StepSize(8), ROWS) == {
        "train.max_steps": "100",
        "train.log_every": "1",  # 2 / 4, but at least 1
        "train.eval_every": "25",
        "train.save_every": "25",
        "train.sample_every": "25",
        "schedule.warmup_steps": "5",
    }


def test_budget_counts_rows_of_batch_size_accumulation_and_ranks_alike(base: Config) -> None:
    batch, accumulation = job(base, batch_size=32), job(base, accumulation_steps=4)
    assert budget.matching_overrides(batch, StepSize(8), ROWS) == budget.matching_overrides(
        accumulation, StepSize(8), ROWS
    )
    assert budget.matching_overrides(job(base, batch_size=2, accumulation_steps=4), StepSize(8), ROWS) == {}
    ranks = compose_config(
        ["data.packing=none", "train.batch_size=8", "train.max_steps=400", "distributed=ddp", "distributed.nproc=2"]
    )
    assert budget.matching_overrides(ranks, StepSize(8), ROWS)["train.max_steps"] == "200"


def test_budget_every_job_sees_the_same_rows_up_to_half_a_step(base: Config) -> None:
    for batch_size in range(1, 65):
        overrides = budget.matching_overrides(job(base, batch_size=batch_size), StepSize(8), ROWS)
        assert abs(int(overrides.get("train.max_steps", 400)) * batch_size - 400 * 8) <= batch_size / 2


def test_budget_warning_names_the_numbers_of_jobs_that_cannot_be_equal(
    base: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(*lengths: int, rule: str = "tokens") -> str:
        configs = [
            job(base, batch_size=1, accumulation_steps=rows, max_steps=steps, match_budget=rule)
            for steps in lengths
            for rows in (1, 4, 16)
        ]
        budget.warn_if_unequal(configs, StepSize(1), [])
        return capsys.readouterr().err

    assert "30 x 1 = 30, 8 x 4 = 32, 2 x 16 = 32" in warning(30)
    assert warning(30, rule="steps") == warning(160) == warning(160, 320) == warning(1601) == warning(0) == ""


def test_budget_warning_compares_no_tokens_that_are_not_known(base: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Of packed rows they are the settings' own, of other rows those of the data."""
    base = job(base, match_budget="tokens", max_steps=30)
    packed = dataclasses.replace(base, data=dataclasses.replace(base.data, packing="best_fit"))
    known = budget.step_size(packed)
    assert known.tokens and not budget.step_size(base).tokens
    budget.warn_if_unequal([packed, base], known, ["data.packing"])
    assert capsys.readouterr().err == ""


def test_budget_rule_steps_changes_no_count(base: Config) -> None:
    assert budget.matching_overrides(job(base, accumulation_steps=4, match_budget="steps"), StepSize(8), []) == {}


def test_budget_rule_epochs_scales_intervals_counted_in_steps(base: Config) -> None:
    overrides = budget.matching_overrides(
        job(base, accumulation_steps=4, max_steps=0, match_budget="epochs"), StepSize(8), []
    )
    assert (
        overrides["train.eval_every"] == "25" and "train.max_steps" not in overrides and "train.epochs" not in overrides
    )


@pytest.mark.parametrize(("rule", "steps"), [("steps", 0), ("epochs", 400)])
def test_budget_refuses_a_rule_that_cannot_be_kept(base: Config, rule: str, steps: int) -> None:
    with pytest.raises(UserError, match=f"sweep.match_budget={rule} needs train.max_steps"):
        budget.matching_overrides(job(base, accumulation_steps=4, max_steps=steps, match_budget=rule), StepSize(8), [])
    assert (
        budget.matching_overrides(job(base, max_steps=steps, match_budget=rule), StepSize(8), []) == {}
    )  # all steps are alike


@pytest.mark.parametrize(("how", "lr"), [("linear", 4e-3), ("sqrt", 2e-3)])
def test_budget_lr_scale_follows_the_rows_per_step(base: Config, how: str, lr: float) -> None:
    assert float(
        budget.matching_overrides(job(base, accumulation_steps=4, lr_scale=how, match_budget="steps"), StepSize(8), [])[
            "optimizer.lr"
        ]
    ) == pytest.approx(lr)


def test_budget_rule_auto_means_tokens_where_the_rows_per_step_are_swept() -> None:
    assert budget.resolve_budget_rule("auto", ["optimizer.lr", "train.accumulation_steps"]) == "tokens"
    assert budget.resolve_budget_rule("auto", ["train.batch_size"]) == "tokens"
    assert (
        budget.resolve_budget_rule("auto", ["optimizer.lr"]) == "epochs"
        and budget.resolve_budget_rule("steps", ["train.batch_size"]) == "steps"
    )


@pytest.mark.parametrize("override", ["sweep.match_budget=rows", "sweep.lr_scale=cubic"])
def test_budget_refuses_an_unknown_rule(override: str) -> None:
    with pytest.raises(UserError, match="must be one of"):
        compose_config([override])


def composed(**values: object) -> Config:
    return compose_config([f"{key.replace('__', '.')}={value}" for key, value in values.items()])


@pytest.mark.slow
def test_budget_of_packed_sequences_counts_their_tokens() -> None:
    """`sweep.fix=tokens data.max_length=128,256` gave both jobs 400 steps: one saw twice the tokens."""
    jobs = [composed(data__max_length=length, train__batch_size=4, train__max_steps=400) for length in (128, 256)]
    base = budget.smallest_step(jobs)
    assert base == StepSize(4, 512)
    assert [
        budget.matching_overrides(config, base, ["data.max_length"]).get("train.max_steps", "400") for config in jobs
    ] == [
        "400",
        "200",
    ]
    assert (
        budget.uncountable_reason(jobs) is None and budget.resolve_budget_rule("auto", ["data.max_length"]) == "tokens"
    )
    pair = composed(stage="dpo", data__packing="best_fit", data__max_length=128, train__batch_size=4)
    assert budget.step_size(pair).tokens == 2 * 512


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([{"data__max_length": 128}, {"data__max_length": 256}], "data.max_length"),
        ([{"data__packing": "none"}, {"data__packing": "best_fit"}], "data.packing"),
        ([{"stage": "sft"}, {"stage": "dpo"}], "data.max_length|data.path|stage.data_format"),
    ],
)
def test_budget_refuses_tokens_that_it_cannot_count(
    values: list[dict], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [composed(**({"data__packing": "none", "train__max_steps": 100} | each)) for each in values]
    with pytest.raises(UserError, match=f"cannot be kept: ({key}) differs and data.packing=none"):
        budget.check_countable(jobs, "tokens", [])
    budget.check_countable(jobs, "auto", ["train.batch_size"])
    assert "do not see the same number of tokens" in capsys.readouterr().err
    budget.check_countable(jobs, "steps", [])
    assert capsys.readouterr().err == ""


def test_budget_of_epochs_counts_tokens_unless_conversations_are_cut() -> None:
    texts, conversations = (
        [composed(stage=stage, data__max_length=length) for length in (128, 256)] for stage in ("pretrain", "sft")
    )
    assert budget.uncountable_reason(texts) is None
    assert "an epoch has different numbers of tokens" in str(budget.uncountable_reason(conversations))


def test_budget_job_without_evaluation_gets_one_at_its_end() -> None:
    assert budget.evaluation_overrides(composed()) == {}
    for values in ({"train__eval_every": 0}, {"data__val_path": "null", "data__val_fraction": 0}):
        assert budget.evaluation_overrides(composed(**values)) == {"train.final_eval_rows": "256"}
    assert budget.evaluation_overrides(composed(train__eval_every=0, train__final_eval_rows=9)) == {}


def test_budget_rule_that_auto_chooses_is_named_with_fixes_that_are_accepted(base: Config) -> None:
    with pytest.raises(UserError, match=r"match_budget=epochs \(the meaning of auto here") as error:
        budget.matching_overrides(job(base, accumulation_steps=4, max_steps=20, match_budget="auto"), StepSize(8), [])
    assert error.value.setting == "sweep.match_budget=auto train.max_steps=20"
    assert (
        "sweep.match_budget=steps" in error.value.fix
        and "train.max_steps=0" in error.value.fix
        and "tokens" not in error.value.fix
    )
    assert (
        budget.matching_overrides(job(base, accumulation_steps=4, max_steps=20, match_budget="steps"), StepSize(8), [])
        == {}
    )
    budget.matching_overrides(job(base, accumulation_steps=4, max_steps=0, match_budget="epochs"), StepSize(8), [])
