"""Points of a sweep, and their configs."""

from __future__ import annotations

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.sweep import grid


def test_split_swept_lists_every_combination_once() -> None:
    shared, swept = grid.split_swept(["stage=sft", "optimizer.lr=1e-4,0.0001,5e-4", "seed=range(1,3)"])
    assert shared == ["stage=sft"]
    assert grid.cartesian_points(swept) == [
        {"optimizer.lr": lr, "seed": seed} for lr in ("0.0001", "0.0005") for seed in ("1", "2")
    ]


@pytest.mark.parametrize(
    "values",
    [
        ("1e-3", "2e-3"),
        ("a.jsonl", "'b, c.jsonl'"),
        ("null", "true"),
        ("[1,2]", "[0.9,0.95]"),
        ("hub:some/name@main", "x"),
    ],
)
def test_split_swept_writes_one_value_of_a_known_key_as_several(values: tuple[str, str]) -> None:
    one = [grid.split_swept([f"optimizer.lr={value}"], known={"optimizer.lr": []}) for value in values]
    assert [value for shared, swept in one for value in swept["optimizer.lr"]] == grid.split_swept(
        [f"optimizer.lr={','.join(values)}"]
    )[1]["optimizer.lr"]


def test_canonicalize_takes_two_spellings_of_a_number_as_one_value() -> None:
    swept = grid.split_swept(
        ["optimizer.weight_decay=0,0.0,0.1", "optimizer.lr=5,5.0,05", "seed=1,01,2", "data.path=1,01"]
    )[1]
    assert list(swept.values()) == [["0", "0", "0.1"], ["5", "5", "5"], ["1", "1", "2"], ["1", "01"]]
    assert len(grid.cartesian_points(swept)) == 2 * 1 * 2 * 2
    assert grid.canonicalize("optimizer.lr", ["5.0", "1e-3"], known=["0.001", "5"]) == ["5", "0.001"]


@pytest.mark.parametrize(("key", "value"), [("optimizer.lr", "interval(1e-5,1e-3)"), ("seed", "range(1,9,2)")])
def test_split_swept_keeps_the_text_that_a_sampler_draws_from(key: str, value: str) -> None:
    assert grid.split_swept([f"{key}={value}"], is_grid=False) == ([], {key: [value]})


def test_split_swept_of_a_grid_refuses_an_interval() -> None:
    with pytest.raises(UserError, match="needs lists of values"):
        grid.split_swept(["optimizer.lr=interval(1e-5,1e-3)"])


@pytest.mark.parametrize("value", ["range(0,1000000000000)", "range(0.0,1.0,1e-12)"])
def test_split_swept_refuses_a_range_of_too_many_values(value: str) -> None:
    with pytest.raises(UserError, match="more than 100,000 values"):
        grid.split_swept([f"seed={value}"])


def test_split_swept_expands_a_pattern_to_the_options_of_a_group() -> None:
    assert grid.split_swept(["precision=glob(*16)"])[1] == {"precision": ["bf16", "fp16"]}


def test_zip_may_use_a_value_in_several_pairs() -> None:
    swept = grid.split_swept(["seed=1,2,3", "optimizer.lr=0.1,0.2,0.2"])[1]
    assert grid.cartesian_points(swept, ["seed", "optimizer.lr"]) == [
        {"seed": s, "optimizer.lr": lr} for s, lr in (("1", "0.1"), ("2", "0.2"), ("3", "0.2"))
    ]


def test_zip_pairs_its_keys_and_combines_the_others_with_each_pair() -> None:
    swept = {"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2", "3"], "train.batch_size": ["8", "16"]}
    points = grid.cartesian_points(swept, ["optimizer.lr", "train.batch_size"])
    assert len(points) == 6 and {(point["optimizer.lr"], point["train.batch_size"]) for point in points} == {
        ("0.1", "8"),
        ("0.2", "16"),
    }


@pytest.mark.parametrize(
    "zipped", [["optimizer.lr", "seed"], ["optimizer.lr", "train.epochs"]], ids=["different counts", "one value"]
)
def test_zip_refuses_keys_that_cannot_be_paired(zipped: list[str]) -> None:
    with pytest.raises(UserError, match="sweep.zip"):
        grid.cartesian_points({"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2", "3"]}, zipped)


@pytest.mark.parametrize(
    "point",
    [
        {"optimizer.lr": "0.1", "train.max_steps": "1e3"},
        {"precision": "bf16", "data.path": "'a b.jsonl'"},
        {"stage": "lora", "stage.lora.rank": "4"},
    ],
    ids=["values", "group and value", "group with its section"],
)
def test_composer_returns_the_config_that_hydra_composes(point: dict[str, str]) -> None:
    composer = grid.PointComposer(["train.epochs=2"])
    composer.config({"optimizer.lr": "0.7"})  # must not change the next config
    assert composer.config(point) == compose_config(
        ["train.epochs=2", *(f"{key}={value}" for key, value in point.items())]
    )


def test_composer_resolves_an_interpolation_in_each_point() -> None:
    composer = grid.PointComposer(["optimizer.weight_decay=${schedule.min_lr_ratio}", "run.name=${seed}"])
    points = [{"schedule.min_lr_ratio": value, "seed": value[-1]} for value in ("0.3", "0.4")]
    configs = [composer.config(point) for point in points]
    assert [(config.optimizer.weight_decay, config.run.name) for config in configs] == [(0.3, "3"), (0.4, "4")]


def test_composer_checks_each_start_once_that_points_share(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Config] = []
    monkeypatch.setattr("runner.launch.run.check_start", checked.append)
    axes = {"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2"], "data.max_length": ["128", "256"]}
    points = grid.cartesian_points(axes | {"train.supervise": ["false", "true"]})
    assert len(grid.PointComposer([]).checked_configs(points)) == len(points) == 16
    assert [(each.data.max_length, each.train.supervise) for each in checked] == [
        (128, False), (128, True), (256, False), (256, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "point", [{"optimizer.lr": "x"}, {"optimizer.lrr": "1"}, {"stage": "sfft"}], ids=["value", "key", "option"]
)
def test_composer_names_the_setting_of_an_invalid_point(point: dict[str, str]) -> None:
    with pytest.raises(UserError) as error:
        grid.PointComposer([]).config(point)
    assert next(iter(point)) in error.value.setting
