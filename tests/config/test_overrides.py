"""Overrides: valid ones compose to typed settings; invalid ones are refused by name, with the nearest valid one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.errors import UserError, did_you_mean_path, report_user_error
from common.paths import CONF_DIR
from models.config import LoraConfig
from runner.cli import help
from runner.config import overrides
from runner.config.compose import compose_config, source_files
from runner.config.schema import config_groups, config_schema
from runner.engine.config import Config

OWN_DATA = ["data.path=rows.jsonl"]

UNKNOWN = [
    ("optimizer.lrr=1", "optimizer.lr"),
    ("+optimizer.lrr=1", "optimizer.lr"),
    ("++optimizer.lrr=1", "optimizer.lr"),
    ("optimzer=adamw", "optimizer"),
    ("lr=1e-3", "optimizer.lr"),
    ("batch_size=8", "train.batch_size"),
    ("data.max_len=64", "data.max_length"),
    ("model.hiden_size=64", "model.hidden_size"),
    ("schedule.warmup=3", "schedule.warmup_steps"),
    ("precision.nam=bf16", "precision.name"),
    ("distributed.nme=single", "distributed.name"),
    ("tracker.consol=plain", "tracker.console"),
    ("sweep.match_budgets=steps", "sweep.match_budget"),
    ("supervise.max_restart=2", "supervise.max_restarts"),
    ("stage.beta_=1", "stage.beta"),
    ("sed=1", "seed"),
    ("+stage.lora.rankk=3", "stage.lora.rank"),
    ("init_form=scratch", "init_from"),
    ("export.weight=best", "export.weights"),
    ("run.nam=first", "run.name"),
]

INVALID = [  # overrides, and the setting that the error names
    (["train.epochs=abc"], "train.epochs=abc"),
    (["optimizer.lr=abc"], "optimizer.lr=abc"),
    (["optimizer.lr=1,2"], "optimizer.lr=1,2"),
    (["optimizer.betas=0.9"], "optimizer.betas=0.9"),
    (["optimizer.betas=[a,b]"], "optimizer.betas=[a,b]"),
    (["optimizer.lr=[1"], "optimizer.lr=[1"),
    (["optimizer=adm"], "optimizer=adm"),
    (["optimizer"], "optimizer"),
    (["optimizer=null"], "optimizer=null"),
    (["~optimizer"], "~optimizer"),
    (["+optimizer.lr=1"], "+optimizer.lr=1"),
    (["train=3"], "train=3"),
    (["seed=null"], "seed=null"),
    (["precision.name=fp4"], "precision.name=fp4"),
    (["precision=fp4"], "precision=fp4"),
    (["stage.name=dpo"], "stage.name=dpo"),
    (["optimizer=muon", "optimizer.name=adamw"], "optimizer.name=adamw"),
    (["precision=tf32", "device=cpu"], "precision=tf32 on the CPU"),
    (["schedule.min_lr_ratio=2"], "schedule.min_lr_ratio=2.0"),
    (["data.max_length=4096"], "data.max_length=4096"),
    (["data.path=???"], "data.path"),
    (["tracker=swanlab", "tracker.mode=never"], "tracker.mode=never"),
    (["stage.data_format=preference"], "stage.data_format=preference stage.objective=next_token"),
    (["stage=lora", "stage.lora={rankk: 2}"], "stage.lora.rankk"),
    (["stage=lora", "stage.lora.rank=0"], "stage.lora.rank=0"),
    (["train.max_steps=5", "schedule.warmup_steps=6"], "schedule.warmup_steps=6"),
    (["+x._target_=os.system"], "x._target_"),
    (["stage=lora", "stage.lora={_target_: os.system}"], "stage.lora._target_"),
    (["experiment=minimind_sft"], "data.path"),
    (["hydra.run.dirr=x"], "hydra.run.dirr=x"),
]


def refused(*typed: str) -> UserError:
    with pytest.raises(UserError) as error:
        compose_config(list(typed))
    return error.value


@pytest.mark.parametrize(("override", "nearest"), UNKNOWN)
def test_unknown_setting_is_refused_with_the_nearest_known_one(override: str, nearest: str) -> None:
    error, key = refused(override), override.lstrip("+").split("=")[0]
    assert error.message == f"unknown setting {key}" and error.setting == key
    assert f"did you mean {nearest}?" in error.fix


@pytest.mark.parametrize(("typed", "setting"), INVALID, ids=[" ".join(typed) for typed, _ in INVALID])
def test_invalid_override_is_refused_by_its_dotted_name(typed: list[str], setting: str) -> None:
    assert refused(*typed).setting == setting


@pytest.mark.parametrize("old", overrides.RENAMED_SETTINGS)
def test_renamed_setting_is_refused_with_its_new_name(old: str) -> None:
    new = overrides.RENAMED_SETTINGS[old]
    error = refused(old if "=" in old else f"{old}=value")
    assert new in error.message and error.fix == (new if "=" in new else f"{new}=value")
    assert (new.startswith("hydra") or new.partition("=")[0] in config_schema()) and old not in config_schema()


def test_renamed_value_is_refused_among_the_values_of_a_sweep() -> None:
    with pytest.raises(UserError, match="data.packing=best_fit"):
        overrides.check_overrides(["data.packing=none,pack"])


def test_section_that_is_null_cannot_be_set_by_one_key() -> None:
    # omegaconf 2.3; 2.4 asks for the other keys
    assert refused("stage.lora={rank: 2}").setting in ("stage.lora={rank: 2}", "stage.lora.alpha")


def test_every_section_has_an_unknown_setting_above() -> None:
    sections = {field.name for field in dataclasses.fields(Config)} - {
        "device",
        "keep",
        "resume",
        "seed",
        "init_from",
        "train",
        "plugins",
    }
    assert sections <= {override.lstrip("+").split(".")[0] for override, _ in UNKNOWN}


INDEPENDENT = {  # groups whose options go together; model=transformers is composed with a folder, in tests of its own
    group: [option for option in config_groups()[group] if option != "transformers"]
    for group in ("model", "optimizer", "schedule", "precision", "distributed", "tracker")
}


@pytest.mark.parametrize("number", range(max(map(len, INDEPENDENT.values()))))
def test_every_option_of_independent_groups_composes(number: int) -> None:
    options = {group: choices[number % len(choices)] for group, choices in INDEPENDENT.items()}
    config = compose_config([f"{group}={option}" for group, option in options.items()])
    assert {group: getattr(config, group).name for group in INDEPENDENT} == options


@pytest.mark.parametrize("stage", ["pretrain", "lora", "dpo_lora"])
def test_stage_chooses_its_data(stage: str) -> None:
    config = compose_config([f"stage={stage}"])
    lines = (CONF_DIR / "stage" / f"{stage}.yaml").read_text(encoding="utf-8").splitlines()
    assert (config.stage.name, f"  - override /data: {config.data.name}" in lines) == (stage, True)


@pytest.mark.parametrize("typed", [["stage=lora", "data=own"], ["data=own", "stage=lora"]], ids=" ".join)
def test_typed_data_wins_over_that_of_the_stage_in_any_order(typed: list[str]) -> None:
    config = compose_config([*typed, *OWN_DATA])
    assert (config.stage.name, config.data.name) == ("lora", "own")


def test_typed_override_wins_over_stage_and_experiment() -> None:
    config = compose_config(["optimizer.lr=0.5", "train.epochs=7", "experiment=minimind_sft", "stage=lora", *OWN_DATA])
    assert (config.optimizer.lr, config.train.epochs, config.stage.name, config.train.batch_size) == (
        0.5,
        7,
        "lora",
        16,
    )


MINIMIND = {  # epochs, rows, lr, accumulation, length, stage
    "minimind_pretrain": (2, 32, 5e-4, 8, 340, "pretrain"),
    "minimind_sft": (2, 16, 1e-5, 1, 768, "sft"),
    "minimind_lora": (10, 32, 1e-4, 1, 340, "lora"),
    "minimind_dpo": (1, 4, 4e-8, 1, 1024, "dpo"),
}


@pytest.mark.parametrize("name", MINIMIND)
def test_minimind_experiment_has_minimind_s_settings(name: str) -> None:
    c = compose_config([f"experiment={name}", *OWN_DATA])
    assert (
        c.train.epochs,
        c.train.batch_size,
        c.optimizer.lr,
        c.train.accumulation_steps,
        c.data.max_length,
        c.stage.name,
    ) == MINIMIND[name]
    assert (
        c.schedule.name,
        c.schedule.warmup_steps,
        c.schedule.min_lr_ratio,
        c.optimizer.grad_clip,
        c.precision.name,
    ) == ("cosine", 0, 0.1, 1.0, "bf16")
    assert (c.model.name, c.optimizer.weight_decay, c.optimizer.betas, c.data.val_path, c.data.val_fraction) == (
        "minimind_64m",
        0.01,
        [0.9, 0.999],
        None,
        0.0,
    )
    if name == "minimind_lora":
        assert c.stage.lora == LoraConfig(
            16, 16.0, 0.0, ["q_proj", "o_proj"], rslora=False, dora=False, quantize=None, continue_adapter=False
        )
    if name == "minimind_dpo":
        assert c.stage.beta == 0.15


def test_integer_may_be_written_with_an_exponent() -> None:
    config = compose_config(["train.max_steps=1e3", "optimizer.lr=1e-3"])
    assert config.train.max_steps == 1000 and config.optimizer.lr == 1e-3
    assert overrides.normalize_values(["train.max_steps=1e3,2e3,x"]) == ["train.max_steps=1000,2000,x"]
    assert overrides.normalize_values(["optimizer.lr=1e3"]) == ["optimizer.lr=1e3"]


def test_variable_of_the_environment_is_stored_as_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "7")
    typed = ["seed=${oc.env:SEED}", "train.epochs='${oc.env:UNSET,3}'", "data.path=${oc.env:UNSET}"]
    stored = overrides.prepare_overrides(typed)
    assert stored == ["seed=7", "train.epochs='3'", typed[2]] and compose_config(stored[:2]).train.epochs == 3
    for override in (typed[2], "seed=${oc.decode:3}"):
        with pytest.raises(UserError, match="without a resolver") as refused:
            compose_config([override])
        assert "export NAME=" in refused.value.fix


def test_variable_in_an_override_of_hydra_is_not_stored_as_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be secret; hydra.run.dir is a path of the run."""
    monkeypatch.setenv("KEY", "secret")
    of_hydra = ["+hydra.job.env_set.KEY=${oc.env:KEY}", "hydra.launcher.partition=${oc.env:KEY}"]
    assert overrides.prepare_overrides(of_hydra) == of_hydra
    assert overrides.prepare_overrides(["hydra.run.dir=/x/${oc.env:KEY}"]) == ["hydra.run.dir=/x/secret"]


def test_fix_of_a_space_after_a_comma_is_quoted_for_a_shell() -> None:
    with pytest.raises(UserError, match="space after a comma") as refused:
        overrides.prepare_overrides(["run.name=a b,", "c", "run.note=a; rm b"])
    assert refused.value.fix == "'run.name=a b,c'"


def test_variable_that_a_yaml_file_names_but_is_not_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: ${oc.env:UNSET}\n")
    with pytest.raises(UserError, match="'UNSET' not found") as refused:
        compose_config([f"hydra.searchpath=['file://{tmp_path}']", "experiment=mine"])
    assert refused.value.fix == "export UNSET=<value>"


def test_names_of_other_programs_lead_to_settings_that_exist() -> None:
    known = {*config_schema(), *config_groups(), "hydra.run.dir"}
    for own, names in overrides.EQUIVALENT_SETTINGS.items():
        assert {part.partition("=")[0] for part in own.split()} <= known
        assert not known & {*names.split()}
        for name in names.split():
            assert overrides.nearest_key(name) == overrides.nearest_key(f"trainer.{name}") == f"did you mean {own}?"


def test_experiment_may_be_null_as_a_value_of_a_sweep() -> None:
    assert compose_config(["experiment=null"]) == compose_config([])
    assert compose_config(["experiment=gpu_8gb", "experiment=null"]) == compose_config([])
    assert source_files(["experiment=null"]) == source_files([])


def test_conf_has_interpolations_of_time_and_environment_under_hydra_only() -> None:
    for path in CONF_DIR.rglob("*.yaml"):
        settings = path.read_text().split("\nhydra:")[0]
        assert "${now" not in settings and "${oc." not in settings and "${run_id" not in settings, path.name


def test_source_files_are_those_that_the_overrides_compose_from() -> None:
    files = source_files(["stage=sft", "schedule=linear"])
    assert {
        "config.yaml",
        "stage/sft.yaml",
        "data/sft.yaml",
        "data/base/rows.yaml",
        "schedule/linear.yaml",
        "optimizer/muon.yaml",
    } <= files.keys()
    assert not {"stage/pretrain.yaml", "data/pretrain.yaml", "schedule/cosine.yaml"} & files.keys()
    assert all(path == CONF_DIR / name for name, path in files.items())


def test_typed_path_with_special_characters_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it's a=b, {c}.jsonl"
    path.touch()
    monkeypatch.chdir(tmp_path)
    assert compose_config([overrides.absolutize_path(f"data.path={path.name}")]).data.path == str(path)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("a.jsonl,b.jsonl", "{}/a.jsonl,{}/b.jsonl"),
        ("choice(a.jsonl,b.jsonl)", "{}/a.jsonl,{}/b.jsonl"),
        ("[a.jsonl],[a.jsonl,b.jsonl]", "[{}/a.jsonl],[{}/a.jsonl,{}/b.jsonl]"),
        ("a.jsonl,hub:x/y,${oc.env:HOME}", "{}/a.jsonl,hub:x/y,${oc.env:HOME}"),
    ],
)
def test_swept_paths_and_lists_of_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, expected: str
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert overrides.absolutize_path(f"data.path={typed}") == f"data.path={expected}".replace("{}", str(tmp_path))


def test_directory_of_a_sweep_s_job_can_be_typed_as_init_from(tmp_path: Path) -> None:
    job = tmp_path / "optimizer.lr=0.001,train.accumulation_steps=4"
    job.mkdir()
    assert compose_config([overrides.absolutize_path(f"init_from={job}")]).init_from == str(job)


def test_path_hint_compares_file_names_in_the_same_folder(tmp_path: Path) -> None:
    for name in ("opt", "pretrain_512.jsonl"):
        (tmp_path / name).touch()
    assert str(tmp_path / "pretrain_512.jsonl") in did_you_mean_path(tmp_path / "pretrain_521.jsonl")
    for unlike in (tmp_path / "nope", tmp_path / "nowhere" / "opt"):
        assert "did you mean" not in did_you_mean_path(unlike)


def test_key_given_twice_is_refused_by_the_invalid_override() -> None:
    assert refused("train.max_steps=40", "train.max_steps=x").setting == "train.max_steps=x"
    assert refused("train.max_steps=x", "train.max_steps=40").setting == "train.max_steps=x"


@pytest.mark.parametrize("values", ["1,2", "range(1,3)", "choice(1,2)"])
def test_several_values_for_one_run_are_refused_in_every_notation(values: str) -> None:
    error = refused("seed=3", f"train.epochs={values}", "stage=sft")
    assert (error.message, error.setting) == ("several values for one run", f"train.epochs={values}")


def test_common_settings_of_help_exist_and_are_described() -> None:
    page = help.train_help([CONF_DIR])
    for key, placeholder in help.COMMON_SETTINGS.items():
        line = next(line for line in page.splitlines() if line.startswith(f"  {key}={placeholder}"))
        assert key in config_schema() and len(line.split()) > 2, line


def test_user_error_is_printed_in_three_lines_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_user_error(UserError("it is wrong", "here", "do this")) == 2
    assert capsys.readouterr().err.splitlines() == ["error: it is wrong", "  where: here", "  fix:   do this"]


@pytest.mark.parametrize(
    "override",
    [
        "",
        "data.path=${oc.env:HOME}",
        "data.path=${oc.${seed}:HOME}",
        "data.path=${repo:}${hydra:x}",
        "train.sample_prompts=[${now:%Y}]",
    ],
)
def test_stored_override_has_no_resolver(override: str) -> None:
    with pytest.raises(UserError, match="may not hold"):
        overrides.check_stored(["seed=1", override], Path("overrides.yaml"))


def test_stored_override_may_refer_to_settings_and_own_folders() -> None:
    overrides.check_stored(
        ["data.path=${repo:}/rows.jsonl", "train.eval_every=${train.save_every}", "hydra.run.dir=${now:%Y}", "seed=1"],
        Path("overrides.yaml"),
    )
