"""What a user types: right words compose and are typed, wrong ones are refused with the place and the nearest right one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.errors import UserError, did_you_mean_path, report_user_error
from common.paths import CONF_DIR
from models.config import LoraConfig
from runner.cli import help
from runner.config import flags, overrides, schema
from runner.config.compose import compose_config
from runner.config.schema import config_groups
from runner.engine.config import Config

OWN = ["data.path=rows.jsonl"]

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
    ("stage.beta_=1", "stage.beta"),
    ("sed=1", "seed"),
    ("+stage.lora.rankk=3", "stage.lora.rank"),
    ("init_form=scratch", "init_from"),
]

WRONG = [  # words, where it is said to be wrong
    (["train.epochs=abc"], "train.epochs=abc"),
    (["train.epochs=1.5"], "train.epochs=1.5"),
    (["train.activation_checkpointing=3x"], "train.activation_checkpointing=3x"),
    (["train.activation_checkpointing=null"], "train.activation_checkpointing=null"),
    (["optimizer.lr=abc"], "optimizer.lr=abc"),
    (["optimizer.lr=null"], "optimizer.lr=null"),
    (["optimizer.lr=1,2"], "optimizer.lr=1,2"),
    (["optimizer.betas=0.9"], "optimizer.betas=0.9"),
    (["optimizer.betas=[a,b]"], "optimizer.betas=[a,b]"),
    (["optimizer.lr=-1"], "optimizer.lr=-1.0"),
    (["optimizer.lr=[1"], "optimizer.lr=[1"),
    (["optimizer=adm"], "optimizer=adm"),
    (["optimizer"], "optimizer"),
    (["optimizer=null"], "optimizer=null"),
    (["+optimizer=muon"], "+optimizer=muon"),
    (["~optimizer"], "~optimizer"),
    (["~optimizer.lr"], "~optimizer.lr"),
    (["+optimizer.lr=1"], "+optimizer.lr=1"),
    (["train=3"], "train=3"),
    (["seed=null"], "seed=null"),
    (["precision.name=fp4"], "precision.name=fp4"),
    (["precision=fp4"], "precision=fp4"),
    (["precision=tf32", "device=cpu"], "precision=tf32 on the CPU"),
    (["schedule.min_lr_ratio=2"], "schedule.min_lr_ratio=2.0"),
    (["model.num_key_value_heads=3"], "model.num_key_value_heads=3"),
    (["data.max_length=4096"], "data.max_length=4096"),
    (["data.path=???"], "data.path"),
    (["tracker.mode=never"], "tracker.mode=never"),
    (["stage.data_format=preference"], "stage.data_format=preference stage.objective=next_token"),
    (["stage=lora", "stage.lora={rankk: 2}"], "stage.lora.rankk"),
    (["stage=lora", "stage.lora.rank=0"], "stage.lora.rank=0"),
    (["train.max_steps=5", "schedule.warmup_steps=6"], "schedule.warmup_steps=6"),
    (["+x._target_=os.system"], "x._target_"),
    (["stage=lora", "stage.lora={_target_: os.system}"], "stage.lora._target_"),
    (["experiment=minimind_sft"], "data.path"),
    (["hydra.run.dirr=x"], "hydra.run.dirr=x"),
]


def refused(*said: str) -> tuple[str, str, str]:
    with pytest.raises(ValueError) as caught:
        compose_config(list(said))
    assert isinstance(caught.value, UserError), caught.value
    return caught.value.args


@pytest.mark.parametrize(("word", "meant"), UNKNOWN)
def test_an_unknown_word_is_refused_with_the_nearest_known_one(word: str, meant: str) -> None:
    what, where, fix = refused(word)
    assert what == "no such word" and where == word.lstrip("+").split("=")[0]
    assert f"did you mean {meant}?" in fix


@pytest.mark.parametrize(("said", "where"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_word_is_refused_by_its_dotted_name(said: list[str], where: str) -> None:
    assert refused(*said)[1] == where


def test_a_section_that_is_null_is_not_made_of_one_word() -> None:
    assert refused("stage.lora={rank: 2}")[1] in ("stage.lora={rank: 2}", "stage.lora.alpha")  # omegaconf 2.3; 2.4 asks for the rest


def test_every_section_has_an_unknown_word_above() -> None:
    sections = {field.name for field in dataclasses.fields(Config)} - {"device", "resume", "seed", "init_from", "train"}
    tried = {word.lstrip("+").split(".")[0] for word, _ in UNKNOWN}
    assert sections <= tried


@pytest.mark.parametrize(("group", "option"), [(group, option) for group, options in config_groups().items() for option in options])
def test_every_file_of_conf_composes_and_is_typed(group: str, option: str) -> None:
    config = compose_config([f"{group}={option}", *OWN])
    assert group == "experiment" or getattr(config, group).name == option


@pytest.mark.parametrize("stage", config_groups()["stage"])
def test_a_stage_brings_its_data_and_the_user_may_choose_others(stage: str) -> None:
    assert compose_config([f"stage={stage}"]).data.name == {"lora": "lora_identity", "dpo_lora": "dpo"}.get(stage, stage)
    after = compose_config([f"stage={stage}", "data=own", *OWN])
    before = compose_config(["data=own", f"stage={stage}", *OWN])
    assert after == before and after.data.name == "own" and after.stage.name == stage


def test_a_word_of_the_user_stands_above_stage_and_experiment() -> None:
    config = compose_config(["optimizer.lr=0.5", "train.epochs=7", "experiment=minimind_sft", "stage=lora", *OWN])
    assert (config.optimizer.lr, config.train.epochs, config.stage.name, config.train.batch_size) == (0.5, 7, "lora", 16)


MINIMIND = {  # epochs, rows, lr, accumulation, length, stage
    "minimind_pretrain": (2, 32, 5e-4, 8, 340, "pretrain"),
    "minimind_sft": (2, 16, 1e-5, 1, 768, "sft"),
    "minimind_lora": (10, 32, 1e-4, 1, 340, "lora"),
    "minimind_dpo": (1, 4, 4e-8, 1, 1024, "dpo"),
}


@pytest.mark.parametrize("name", MINIMIND)
def test_the_presets_are_minimind_s_own_settings(name: str) -> None:
    c = compose_config([f"experiment={name}", *OWN])
    assert (c.train.epochs, c.train.batch_size, c.optimizer.lr, c.train.accumulation_steps, c.data.max_length, c.stage.name) == MINIMIND[name]
    assert (c.schedule.name, c.schedule.warmup_steps, c.schedule.min_lr_ratio, c.optimizer.grad_clip, c.precision.name) == ("cosine", 0, 0.1, 1.0, "bf16")
    assert (c.model.name, c.optimizer.weight_decay, c.optimizer.betas, c.data.val_path, c.data.val_fraction) == ("minimind_64m", 0.01, [0.9, 0.999], None, 0.0)
    if name == "minimind_lora":
        assert c.stage.lora == LoraConfig(rank=16, alpha=16.0, dropout=0.0, targets=["q_proj", "o_proj"])
    if name == "minimind_dpo":
        assert c.stage.beta == 0.15


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    config = compose_config(["train.max_steps=1e3", "optimizer.lr=1e-3"])
    assert config.train.max_steps == 1000 and config.optimizer.lr == 1e-3
    assert overrides.normalize_int("train.max_steps=1e3,2e3,x") == "train.max_steps=1000,2000,x"
    assert overrides.normalize_int("optimizer.lr=1e3") == "optimizer.lr=1e3"


@pytest.mark.parametrize(
    ("flag", "word"),
    [("--epochs", "train.epochs"), ("--batch-size=8", "train.batch_size=8"), ("--optimizer.lr=1", "optimizer.lr=1"), ("--stage=sft", "stage=sft")],
)
def test_words_written_as_flags_are_refused_with_how_we_write_them(flag: str, word: str) -> None:
    with pytest.raises(ValueError) as caught:
        flags.check_no_dashed_settings([flag])
    assert word in caught.value.args[2]


def test_hydra_s_own_flags_pass() -> None:
    flags.check_no_dashed_settings(["--cfg", "job", "-m", "--multirun", "--info", "--resolve", "--config-name=x"])


def test_interpolations_that_change_with_time_stand_only_under_hydra() -> None:
    for path in CONF_DIR.rglob("*.yaml"):
        own = path.read_text().split("\nhydra:")[0]
        assert "${now" not in own and "${oc." not in own and "${run_id" not in own, path.name


def test_paths_mean_the_same_wherever_the_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "it's a=b, {c}.jsonl"
    odd.touch()
    monkeypatch.chdir(tmp_path)
    assert compose_config(overrides.absolutize_paths([f"data.path={odd.name}"])).data.path == str(odd)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("a.jsonl,b.jsonl", "{}/a.jsonl,{}/b.jsonl"),
        ("choice(a.jsonl,b.jsonl)", "{}/a.jsonl,{}/b.jsonl"),
        ("[a.jsonl],[a.jsonl,b.jsonl]", "[{}/a.jsonl],[{}/a.jsonl,{}/b.jsonl]"),
        ("a.jsonl,hub:x/y,${oc.env:HOME}", "{}/a.jsonl,hub:x/y,${oc.env:HOME}"),
    ],
)
def test_each_of_several_paths_means_the_same_wherever_the_sweep_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert overrides.absolutize_paths([f"data.path={typed}"]) == [f"data.path={meant}".replace("{}", str(tmp_path))]


def test_the_folder_of_a_job_can_be_typed_though_its_name_is_full_of_signs(tmp_path: Path) -> None:
    job = tmp_path / "optimizer.lr=0.001,train.accumulation_steps=4"
    job.mkdir()
    assert compose_config(overrides.absolutize_paths([f"init_from={job}"])).init_from == str(job)


def test_a_path_is_compared_by_its_name_with_what_stands_beside_it(tmp_path: Path) -> None:
    for name in ("opt", "pretrain_512.jsonl"):
        (tmp_path / name).touch()
    assert str(tmp_path / "pretrain_512.jsonl") in did_you_mean_path(tmp_path / "pretrain_521.jsonl")
    for stranger in (tmp_path / "nope", tmp_path / "nowhere" / "opt"):
        assert "did you mean" not in did_you_mean_path(stranger)


def test_of_a_word_that_is_said_twice_the_wrong_one_is_shown() -> None:
    assert refused("train.max_steps=40", "train.max_steps=x")[1] == "train.max_steps=x"
    assert refused("train.max_steps=x", "train.max_steps=40")[1] == "train.max_steps=x"


@pytest.mark.parametrize("values", ["1,2", "range(1,3)", "choice(1,2)"])
def test_several_values_for_one_run_are_refused_however_they_are_written(values: str) -> None:
    assert refused("seed=3", f"train.epochs={values}", "stage=sft")[:2] == ("several values for one run", f"train.epochs={values}")


def test_the_help_page_gives_no_value_as_if_it_were_the_default() -> None:
    for word, _ in help.COMMON_SETTINGS:
        name, stands_for = word.split("=")
        assert name in schema.config_schema() or name.startswith("hydra.")
        assert stands_for.isupper(), word


def test_a_refusal_is_three_lines_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_user_error(UserError("it is wrong", "here", "do this")) == 2
    assert capsys.readouterr().err.splitlines() == ["error: it is wrong", "  where: here", "  fix:   do this"]
