"""Fairness between jobs, by numbers."""

from __future__ import annotations

import dataclasses

import pytest

from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.sweep import budget


@pytest.fixture(scope="module")
def base() -> Config:
    return compose_config(
        ["train.batch_size=8", "train.max_steps=400", "schedule.warmup_steps=20", "optimizer.lr=1e-3", "train.keep_every=0", "train.log_every=2"]
    )


def job(base: Config, **words: object) -> Config:
    """`base` with words of train, and with `fix` and `lr_scale` of sweep."""
    rules = {name: words.pop(name) for name in ("match_budget", "lr_scale") if name in words}
    return dataclasses.replace(base, train=dataclasses.replace(base.train, **words), sweep=dataclasses.replace(base.sweep, **rules))  # type: ignore[arg-type]  # values of many types in one dict


def test_four_times_the_rows_of_a_step_take_a_quarter_of_the_steps(base: Config) -> None:
    assert budget.matching_overrides(job(base, accumulation_steps=4), base=8, fix="tokens") == {
        "train.max_steps": "100",
        "train.log_every": "1",  # 2 / 4, but at least 1
        "train.eval_every": "25",
        "train.save_every": "25",
        "train.sample_every": "25",
        "schedule.warmup_steps": "5",
    }


def test_rows_come_from_batch_size_and_accumulation_alike(base: Config) -> None:
    one, other = job(base, batch_size=32), job(base, accumulation_steps=4)
    assert budget.matching_overrides(one, 8, "tokens") == budget.matching_overrides(other, 8, "tokens")
    assert budget.matching_overrides(job(base, batch_size=2, accumulation_steps=4), 8, "tokens") == {}


def test_every_job_sees_the_same_rows_up_to_half_a_step(base: Config) -> None:
    for batch_size in range(1, 65):
        found = budget.matching_overrides(job(base, batch_size=batch_size), 8, "tokens")
        steps = int(found.get("train.max_steps", 400))
        assert abs(steps * batch_size - 400 * 8) <= batch_size / 2


def test_rows_that_cannot_be_made_equal_are_told_with_their_numbers(base: Config) -> None:
    def told(*lengths: int, fix: str = "tokens") -> str | None:
        return budget.budget_warning(
            [job(base, batch_size=1, accumulation_steps=rows, max_steps=steps, match_budget=fix) for steps in lengths for rows in (1, 4, 16)], 1, []
        )

    assert "30 x 1 = 30, 8 x 4 = 32, 2 x 16 = 32" in str(told(30))
    assert told(30, fix="steps") is told(160) is told(160, 320) is told(1601) is told(0) is None


def test_equal_steps_change_no_count(base: Config) -> None:
    assert budget.matching_overrides(job(base, accumulation_steps=4), 8, "steps") == {}


def test_equal_epochs_scale_what_is_counted_in_steps(base: Config) -> None:
    found = budget.matching_overrides(job(base, accumulation_steps=4, max_steps=0), 8, "epochs")
    assert found["train.eval_every"] == "25" and "train.max_steps" not in found and "train.epochs" not in found


def test_a_length_that_cannot_be_kept_equal_is_refused(base: Config) -> None:
    for fix, steps in (("steps", 0), ("epochs", 400)):
        with pytest.raises(ValueError, match="cannot be kept equal"):
            budget.matching_overrides(job(base, accumulation_steps=4, max_steps=steps), 8, fix)
        assert budget.matching_overrides(job(base, max_steps=steps), 8, fix) == {}  # all jobs alike: nothing to keep


@pytest.mark.parametrize(("how", "lr"), [("linear", 4e-3), ("sqrt", 2e-3)])
def test_lr_grows_with_the_rows_of_a_step(base: Config, how: str, lr: float) -> None:
    assert float(budget.matching_overrides(job(base, accumulation_steps=4, lr_scale=how), 8, "steps")["optimizer.lr"]) == pytest.approx(lr)


def test_auto_keeps_tokens_where_the_rows_of_a_step_are_swept() -> None:
    assert (
        budget.resolve_budget_rule("auto", ["optimizer.lr", "train.accumulation_steps"]) == budget.resolve_budget_rule("auto", ["train.batch_size"]) == "tokens"
    )
    assert budget.resolve_budget_rule("auto", ["optimizer.lr"]) == "epochs" and budget.resolve_budget_rule("steps", ["train.batch_size"]) == "steps"


def test_an_unknown_rule_is_refused() -> None:
    for word in ("sweep.match_budget=rows", "sweep.lr_scale=cubic"):
        with pytest.raises(ValueError, match="must be one of"):
            compose_config([word])


def test_twice_the_ranks_take_half_the_steps() -> None:
    base, more = (compose_config(["train.batch_size=8", "train.max_steps=400", "distributed=ddp", f"distributed.nproc={ranks}"]) for ranks in (1, 2))
    assert budget.matching_overrides(more, base=budget.rows_per_step(base), fix="tokens")["train.max_steps"] == "200"
