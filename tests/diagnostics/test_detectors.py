"""Detectors over records: none warns of a healthy run, each warns once of its symptom, and a resumed run does not
repeat what it has reported.

healthy.json has the numbers that five runs on data/samples logged at each step: `python runner/train.py stage=STAGE
train.log_every=1`, and sft with optimizer=adamw data.packing=none train.batch_size=16. Steps: [step, loss, gradient
norm, data wait]; evaluations: ["e", step, loss].
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from runner.diagnostics.monitor import RunMonitor, read_metrics, watch_records
from runner.diagnostics.symptoms import FEW_ROWS, RunFacts, Symptom, few_validation_rows, half_width, tiny_validation
from runner.engine import evaluation as engine_evaluation
from runner.engine.data_pipeline import rows_to_hold_out

HEALTHY = json.loads(Path(__file__).with_name("healthy.json").read_text())
UNIFORM = math.log(6400)
FACTS = RunFacts(
    total_steps=200,
    lr=1e-3,
    warmup_steps=0,
    grad_clip=1.0,
    num_workers=0,
    cores=8,
    starts_from_weights=False,
    uniform_loss=UNIFORM,
)  # those of a run from random weights


def step(number: int, loss: float | None, norm: float = 1.0, wait: float = 0.0) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": number,
        "loss": loss,
        "grad_norm": norm,
        "data_wait": wait,
        "tokens": 1000 * number,
        "tokens_per_second": 1000.0,
    }


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "loss": loss}


def falling(count: int, first: float = 8.8, last: float = 2.0, noise: float = 0.1) -> list[dict[str, Any]]:
    """A training whose loss falls."""
    chance = random.Random(0)
    return [
        step(i + 1, last + (first - last) * math.exp(-4 * i / count) + chance.gauss(0, noise)) for i in range(count)
    ]


def diagnose(records: list[dict[str, Any]], facts: RunFacts) -> list[Symptom]:
    """The symptoms of a run, in the order in which it reports them."""
    monitor = RunMonitor(facts)
    return [symptom for record in records for symptom in monitor.add(record)]


def names(records: list[dict[str, Any]], **changed: Any) -> list[str]:
    return [symptom.name for symptom in diagnose(records, dataclasses.replace(FACTS, **changed))]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("run", HEALTHY)
def test_detectors_warn_of_no_healthy_run(run: str, every: int) -> None:
    rows = HEALTHY[run]
    records = [
        evaluation(*row[1:]) if row[0] == "e" else step(*row) for row in rows if row[0] == "e" or row[0] % every == 0
    ]
    facts = {
        "uniform_loss": None if run == "dpo" else UNIFORM,
        "total_steps": rows[-2][0],
        "starts_from_weights": run != "pretrain",
    }
    assert len(records) > 5 and names(records, **facts) == []


def test_loss_that_rises_and_stays_high_is_diverging_and_nothing_else() -> None:
    assert names(falling(60) + [step(61 + i, 6.0 + i / 10) for i in range(12)]) == ["diverging"]
    assert names([step(1, 8.8), *(step(i, 30.0) for i in range(2, 30))]) == ["diverging"]


def test_loss_above_uniform_of_weights_is_diverging_only_if_it_has_risen() -> None:
    assert names([step(i, 12.0 - i / 10) for i in range(11, 30)], starts_from_weights=True) == []
    assert names([step(1, 3.0), *(step(i, 12.0) for i in range(2, 9))], starts_from_weights=True) == ["diverging"]


def test_dead_model_is_diverging_in_a_run_of_three_records() -> None:
    dead = [step(4, 618888.8, norm=2035.7), step(8, UNIFORM, norm=0.0), step(12, UNIFORM, norm=0.0)]
    (symptom,) = diagnose(dead, dataclasses.replace(FACTS, lr=100.0, total_steps=12))
    assert (
        symptom.name == "diverging"
        and "at step 12," in symptom.message
        and "are exactly 0" in symptom.message
        and "optimizer.lr=10 (now 100)" in symptom.message
    )
    # not two in a row
    assert names(dead[:2]) == names([step(4, UNIFORM, norm=0.0), step(8, UNIFORM), step(12, UNIFORM, norm=0.0)]) == []
    # overfit; DPO
    assert names([step(i, 0.001, norm=0.0) for i in range(1, 9)]) == names(dead[1:], uniform_loss=None) == []


def test_loss_far_above_uniform_is_diverging_from_the_second_record_on() -> None:
    assert (
        names([step(1, 8.8), step(2, 20.0)])
        == names([step(1, 3.0), step(2, 20.0)], starts_from_weights=True)
        == ["diverging"]
    )
    assert (
        names([step(1, 8.8), step(2, 12.0)]) == names([step(11, 20.0), step(12, 19.0)], starts_from_weights=True) == []
    )


def test_loss_that_returns_is_a_spike_and_names_its_step() -> None:
    records = falling(60)
    spike = [*records[:40], step(41, 9.0), *records[41:]]
    (symptom,) = diagnose(spike, FACTS)
    assert (
        symptom.name == "loss-spike" and "at step 41," in symptom.message and "optimizer.lr=0.0005" in symptom.message
    )
    assert names([*records[:40], step(41, 9.0), *(step(42 + i, 9.0) for i in range(10))]) == ["diverging"]


def test_losses_of_two_kinds_of_rows_are_no_spike() -> None:
    assert (
        names([step(i, 6.0 - i / 100 if i % 4 == 0 else 0.01) for i in range(1, 150)], starts_from_weights=True) == []
    )


@pytest.mark.parametrize(
    ("first", "starts_from_weights", "text"), [(UNIFORM, False, "nothing is learnt"), (3.2, True, "has not fallen")]
)
def test_loss_that_does_not_fall_in_half_of_the_run_is_flat(first: float, starts_from_weights: bool, text: str) -> None:
    records = [step(i, first + 0.01 * math.sin(i)) for i in range(1, 201)]
    (symptom,) = diagnose(records, dataclasses.replace(FACTS, starts_from_weights=starts_from_weights, lr=1e-6))
    assert (
        symptom.name == "loss-flat"
        and " 100 of 200" in symptom.message
        and text in symptom.message
        and "optimizer.lr=1e-05 (now 1e-06)" in symptom.message
    )


def test_flat_loss_of_weights_proposes_a_higher_rate_only_of_a_small_one() -> None:
    (symptom,) = diagnose(
        [step(i, 3.2 + 0.01 * math.sin(i)) for i in range(1, 201)], dataclasses.replace(FACTS, starts_from_weights=True)
    )
    assert "the model already knows this data" in symptom.message and "optimizer.lr=" not in symptom.message


def test_small_fall_above_the_noise_is_not_flat_for_weights() -> None:
    chance = random.Random(0)
    records = [step(i, 1.2 * (1 - 0.015 * i / 400) + chance.gauss(0, 0.005)) for i in range(1, 401)]
    assert names(records, starts_from_weights=True, total_steps=400) == []


def test_flat_loss_is_seen_after_a_long_warmup() -> None:
    assert names([step(i, UNIFORM) for i in range(1, 2001)], warmup_steps=1500, total_steps=2000) == ["loss-flat"]


@pytest.mark.parametrize("width", [3, 4])
def test_spike_of_several_steps_names_the_first(width: int) -> None:
    records = falling(60)
    found = diagnose([*records[:40], *(step(41 + i, 9.0) for i in range(width)), *records[40 + width :]], FACTS)
    assert [symptom.name for symptom in found] == ["loss-spike"] and "at step 41," in found[0].message


def test_smaller_rise_that_stays_is_diverging() -> None:
    assert names(
        [*falling(200, last=2.7, noise=0.05), *(step(200 + i, 4.1 + 0.05 * math.sin(i)) for i in range(1, 301))],
        total_steps=500,
    ) == ["diverging"]


def test_loss_is_not_flat_if_validation_falls_in_warmup_or_if_it_is_learnt() -> None:
    flat = [step(i, 3.2) for i in range(1, 101)]
    assert (
        names(
            [*flat[:50], evaluation(50, 3.2), *flat[50:], evaluation(100, 3.1), step(101, 3.2)],
            starts_from_weights=True,
            total_steps=210,
        )
        == []
    )
    assert names(flat, warmup_steps=95, starts_from_weights=True) == []
    assert names([step(i, 0.01) for i in range(1, 201)], starts_from_weights=True) == []
    assert names(flat, uniform_loss=None) == []


def test_weights_that_begin_at_the_uniform_loss_do_not_fit_the_data() -> None:
    assert names([step(1, 8.7)], starts_from_weights=True) == ["high-initial-loss"]
    assert (
        names([step(1, 8.7)])
        == names([step(1, 5.0)], starts_from_weights=True)
        == names([step(40, 8.7)], starts_from_weights=True)
        == []
    )


def test_gradients_far_above_the_limit_are_always_clipped() -> None:
    assert names([{**record, "grad_norm": 40.0} for record in falling(30)]) == ["always-clipped"]
    assert names([{**record, "grad_norm": 3.0} for record in falling(30)]) == []
    assert names([{**record, "grad_norm": 40.0} for record in falling(30)], grad_clip=0.0) == []


def test_wait_for_data_names_its_share_and_twice_the_workers() -> None:
    slow = [{**record, "data_wait": 0.5} for record in falling(30)]
    (symptom,) = diagnose(slow, FACTS)
    assert (
        symptom.name == "slow-data"
        and "50% of the training time" in symptom.message
        and "data.num_workers=2;" in symptom.message
    )
    assert "data.num_workers=8;" in diagnose(slow, dataclasses.replace(FACTS, num_workers=4))[0].message
    assert "data.packing" in diagnose(slow, dataclasses.replace(FACTS, num_workers=8))[0].message
    # the first steps start the workers
    assert names([falling(30)[0] | {"data_wait": 0.9, "tokens_per_second": 10.0}, *falling(30)[1:]]) == []


def test_overfitting_names_the_best_step_after_two_evaluations_above_it() -> None:
    records = [
        record
        for i, loss in enumerate([4.0, 3.0, 3.1, 3.2, 3.4])
        for record in [*falling(60)[12 * i : 12 * i + 12], evaluation(12 * i + 12, loss)]
    ]
    (symptom,) = diagnose(records, FACTS)
    assert (
        symptom.name == "overfitting"
        and "at step 48," in symptom.message
        and "best at step 24 (3.000)" in symptom.message
        and "train.max_steps=24" in symptom.message
    )
    rising = [
        record | {"loss": 2.0 + i / 200} if record["kind"] == "train" else record for i, record in enumerate(records)
    ]
    assert names(rising) == []  # the training loss rises as well


def test_detectors_read_records_with_missing_and_damaged_fields() -> None:
    damaged: list[Any] = [
        {},
        {"kind": "train"},
        {"kind": "train", "step": "1"},
        step(1, None, float("nan")),
        {"kind": "eval", "step": 2, "loss": None},
    ]
    assert diagnose([*damaged, step(3, 4.0) | {"tokens": None, "tokens_per_second": 0.0}], FACTS) == []


def test_symptom_is_reported_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    hot, shown = [step(1, 8.8), *(step(i, 30.0) for i in range(2, 40))], list[str]()
    watch = watch_records(FACTS, None, shown.append)
    for record in hot:
        watch(record)
    assert len(shown) == 1
    (tmp_path / "metrics.jsonl").write_text("no JSON\n" + "".join(json.dumps(record) + "\n" for record in hot[:20]))
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == hot[:20]
    watch = watch_records(FACTS, tmp_path / "metrics.jsonl", shown.append)
    for record in hot[20:]:
        watch(record)
    assert len(shown) == 1


def test_symptom_of_steps_that_are_trained_again_is_reported_again(tmp_path: Path) -> None:
    """E.g. by `resume=DIR optimizer.lr=SMALLER`, which a diverged run proposes: metrics.jsonl is cut back, train.log is
    not.
    """
    hot, shown = [step(1, 8.8), *(step(i, 30.0) for i in range(2, 40))], list[str]()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(hot[0]) + "\n")
    for _ in range(2):
        (tmp_path / "train.log").write_text("".join(f"warning: {message}\n" for message in shown))
        watch = watch_records(FACTS, tmp_path / "metrics.jsonl", shown.append)
        for record in hot[1:]:
            watch(record)
    assert len(shown) == 2


def test_numbers_that_no_float_holds_do_not_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()
    watch = watch_records(FACTS, None, shown.append)
    watch(step(1, 10**400) | {"grad_norm": -(10**400)})
    watch(step(10**5000, 3.0))
    assert shown == []
    monkeypatch.setattr("runner.diagnostics.monitor.RunHistory.add", lambda history, record: 1 / 0)
    watch(step(2, 3.0))
    watch(step(3, 3.0))
    assert len(shown) == 1 and "ZeroDivisionError" in shown[0]


def test_interval_of_a_validation_loss_is_that_of_a_ratio_of_sums() -> None:
    chance = random.Random(1)
    rows = [(n := chance.randint(5, 50), n * chance.gauss(3.0, 0.5)) for _ in range(4000)]
    means = [
        sum(loss for _, loss in part) / sum(n for n, _ in part)
        for part in (rows[i : i + 40] for i in range(0, 4000, 40))
    ]
    spread = 1.96 * (sum((mean - sum(means) / 100) ** 2 for mean in means) / 99) ** 0.5
    widths = [
        half_width([loss for _, loss in part], [n for n, _ in part]) or 0.0
        for part in (rows[i : i + 40] for i in range(0, 4000, 40))
    ]
    assert sum(widths) / 100 == pytest.approx(spread, rel=0.1)


def test_validation_of_few_rows_is_named_and_of_many_is_not() -> None:
    assert tiny_validation([9.0, 30.0, 20.0], [10, 10, 10], 12) is not None
    assert tiny_validation([30.0, 31.0, 29.0] * 10, [10] * 30, 30) is None
    # 3 rows: reported at the start
    assert tiny_validation([9.0, 30.0, 20.0], [10, 10, 10], 3) is tiny_validation([30.0], [10], 16) is None
    assert [few_validation_rows(rows, 90) is not None for rows in (0, 1, 4, 9, 10)] == [False, True, True, True, False]


def test_few_validation_rows_propose_a_fraction_that_holds_out_enough() -> None:
    few = few_validation_rows(1, 90)
    assert few is not None and few.fix.startswith("data.val_fraction=0.12 ") and rows_to_hold_out(91, 0.12) >= FEW_ROWS
    tiny = few_validation_rows(2, 8)
    assert tiny is not None and tiny.fix == "more rows in data.val_path"  # most of 10 rows would be held out


def test_few_rows_are_those_that_cannot_tell_the_best_of_sixteen_runs() -> None:
    """The smallest p-value of the exact sign-flip test over n paired rows is 2 ** (1 - n); 15 comparisons share 5 %."""
    assert [2.0 ** (1 - rows) <= 0.05 / 15 for rows in (FEW_ROWS - 1, FEW_ROWS)] == [False, True]
    assert tiny_validation([math.nan, 1.0], [1, 1], 2) is None


def test_tiny_validation_is_named_once_also_if_the_first_loss_was_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    state, warned = MagicMock(), list[int]()
    state.dist.all_reduce_sum, state.val_loaders = lambda numbers: numbers, {"": None}
    state.cfg.train.eval_metrics = []
    state.pipeline.evaluates_training_rows, state.objective.eval_metrics = False, lambda means: {}
    monkeypatch.setattr(engine_evaluation, "sum_losses", lambda *_: (1, {"loss": torch.tensor(math.nan)}, []))
    monkeypatch.setattr(engine_evaluation, "warn_of_tiny_validation", lambda *_: warned.append(1))
    for number in range(3):
        state.progress = MagicMock(eval_loss=None, best_loss=None, evals_since_best=number)
        engine_evaluation.evaluate_loss(state)
    assert warned == [1]


def test_symptom_of_a_run_with_long_metrics_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.diagnostics.monitor.MAX_REPLAYED_BYTES", 2000)
    hot, shown = [step(1, 8.8), *(step(i, 30.0) for i in range(2, 40))], list[str]()
    watch = watch_records(FACTS, None, shown.append)
    for record in hot:
        watch(record)
    (tmp_path / "train.log").write_text("step 1\n" + "".join(f"warning: {message}\n" for message in shown))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in hot) * 9)
    read = [*read_metrics(tmp_path / "metrics.jsonl")]
    assert read[0] == hot[0] and read[-1] == hot[-1] and 2 < len(read) < 9 * len(hot)
    watch = watch_records(FACTS, tmp_path / "metrics.jsonl", shown.append)
    for record in hot:
        watch(record | {"step": record["step"] + 40})
    assert len(shown) == 1


def test_interval_of_a_validation_loss_equals_a_calculation_by_hand() -> None:
    # Mean 1.5; residuals -3 and 3; variance of their sum 2 / (2 - 1) * 18 = 36.
    assert half_width([12.0, 18.0], [10, 10]) == pytest.approx(1.96 * 6 / 20)
