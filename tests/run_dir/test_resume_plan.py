"""plan_resume: what is read of a run directory, what the overrides typed with resume= change, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from common.errors import UserError
from common.paths import REPO_ROOT
from runner.config import snapshot
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.launch.resume import persisting_overrides, plan_resume

TYPED = ["stage=sft", "seed=7"]


@pytest.fixture(scope="module")
def start_config() -> Config:
    return compose_config(TYPED)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, start_config: Config) -> Path:
    hydra_dir = tmp_path_factory.mktemp("interrupted") / "run" / ".hydra"
    hydra_dir.mkdir(parents=True)
    (hydra_dir / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(start_config)))
    (hydra_dir / "overrides.yaml").write_text(yaml.safe_dump(TYPED))
    (hydra_dir.parent / "run.json").write_text(json.dumps({"status": "interrupted", "code": {"commit": "abc123"}}))
    snapshot.save_snapshot(hydra_dir.parent, TYPED)
    return hydra_dir.parent


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """The directory of a run that was started with TYPED."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def resumed_config(folder: Path, *extra: str) -> Config:
    with persisting_overrides(plan_resume(folder, list(extra))) as config:
        return config


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_config(run: Path, **values: object) -> None:
    path = run / ".hydra" / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def test_resume_without_overrides_takes_the_saved_config(run: Path, start_config: Config) -> None:
    before = contents(run)
    assert resumed_config(run) == start_config
    assert contents(run) == before


@pytest.mark.slow
def test_resume_saves_its_overrides_and_keeps_the_former_files(run: Path) -> None:
    config = resumed_config(run, "train.max_steps=50", "schedule=linear")
    assert (config.train.max_steps, config.schedule.name) == (50, "linear")
    assert resumed_config(run) == config and config.seed == 7
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == [
        *TYPED,
        "train.max_steps=50",
        "schedule=linear",
    ]
    assert yaml.safe_load((run / ".hydra" / "history" / "000" / "overrides.yaml").read_text()) == TYPED
    resumed_config(run, "train.max_steps=60")
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == [
        *TYPED,
        "schedule=linear",
        "train.max_steps=60",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("{chat: C, law: L}", ["chat", "law"]),
        ("{new: N, law: L}", ["new", "law", "chat"]),
        ("{new: N}", ["law", "chat", "new"]),
        ("{chat: C}", ["law", "chat"]),
        ("{law: null, new: N}", ["new", "chat"]),
    ],
)
def test_first_validation_set_changes_only_where_it_is_typed(run: Path, typed: str, names: list[str]) -> None:
    """A resume with the sets in another order was ignored; one that only adds a set leaves the first as it is."""
    path = run / ".hydra" / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"]["val_path"] = {"law": "A", "chat": "B"}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    config = resumed_config(run, f"data.val_path={typed}")
    assert [*config.data.val_paths] == names
    assert [*resumed_config(run).data.val_paths] == names  # as it is saved
    assert config.data.val_paths["chat"] == ("C" if "chat" in typed else "B")


@pytest.mark.slow
@pytest.mark.parametrize("override", ["seed=8", "optimizer=adamw"])
def test_user_error_in_a_resume_restores_every_file(run: Path, override: str) -> None:
    before = contents(run)
    with pytest.raises(UserError), persisting_overrides(plan_resume(run, [override])):
        raise UserError("the checkpoint is of another run", "seed", "leave it out")
    assert contents(run) == before


REFUSED = [
    ("stage=dpo", "stage cannot change"),
    ("model=minimind_26m", "model cannot change"),
    ("data=dpo", "data cannot change"),
    ("optimizer.lr=1e-3,2e-3", "takes one value"),
    ("schedule=linear,cosine", "takes one value"),
    ("train.max_step=50", "unknown setting"),
    ("optimizer=nothing", "no option nothing"),
    ("hydra.run.dir=/other", "no setting of Hydra"),
    ("hydra/launcher=local", "no setting of Hydra"),
    ("+seed=3", "has no [+]"),
    ("~seed", "cannot be deleted"),
    ("${oc.env:HOME}=1", "cannot be parsed|unknown setting"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[override for override, _ in REFUSED])
def test_resume_refuses_overrides_that_a_run_cannot_take(run: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_resume(run, [override])


@pytest.mark.parametrize(
    "value", [{"_target_": "os.system", "command": "true"}, "${oc.env:HOME}", "x${repo:}"], ids=str
)
def test_saved_config_with_code_or_interpolations_is_refused(run: Path, value: object) -> None:
    edit_config(run, device=value)
    with pytest.raises(UserError, match="names code|interpolation"):
        plan_resume(run, [])


@pytest.mark.parametrize("text", ["", "just text", "!!python/object/apply:os.system ['true']"])
def test_saved_config_that_is_no_mapping_is_refused(run: Path, text: str) -> None:
    (run / ".hydra" / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        plan_resume(run, [])


def test_saved_value_of_a_wrong_type_names_the_file_not_the_override(run: Path) -> None:
    edit_config(run, seed="abc")
    with pytest.raises(UserError, match="seed must be an integer, got abc") as caught:
        plan_resume(run, ["seed=7"])
    assert caught.value.setting == str(run / ".hydra" / "config.yaml")


def test_saved_paths_of_the_repository_follow_the_checkout(run: Path, start_config: Config) -> None:
    path = run / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace(str(REPO_ROOT), "${repo:}"))
    assert resumed_config(run) == start_config


@pytest.mark.slow
def test_another_option_drops_the_overrides_of_the_former_one(run: Path) -> None:
    resumed_config(run, "schedule.min_lr_ratio=0.5", "optimizer.weight_decay=0.3")
    plan = plan_resume(run, ["schedule=linear", "schedule.warmup_steps=3"])
    assert plan.config.schedule == compose_config(["stage=sft", "schedule=linear", "schedule.warmup_steps=3"]).schedule
    assert plan.config.optimizer.weight_decay == 0.3 and not [
        override for override in plan.overrides if "min_lr_ratio" in override
    ]
    assert plan.notes == ["schedule.min_lr_ratio=0.5 is dropped: it was given for the former option of schedule"]


@pytest.mark.slow
def test_another_option_is_composed_as_in_a_new_run(run: Path) -> None:
    """The stage's own settings of the optimizer override those of the optimizer's file."""
    assert resumed_config(run, "optimizer=adamw") == compose_config([*TYPED, "optimizer=adamw"])


@pytest.mark.slow
def test_option_is_taken_from_the_run_s_copy_before_conf(run: Path) -> None:
    own = run / snapshot.SNAPSHOT_DIR / "schedule"
    (own / "cosine.yaml").write_text(
        (own / "cosine.yaml").read_text().replace("min_lr_ratio: 0.1", "min_lr_ratio: 0.7")
    )
    (own / "gone.yaml").write_text((own / "cosine.yaml").read_text().replace("0.7", "0.6"))
    assert plan_resume(run, ["schedule=cosine"]).config.schedule.min_lr_ratio == 0.7
    assert plan_resume(run, ["schedule=gone"]).config.schedule.min_lr_ratio == 0.6
    assert resumed_config(run, "schedule=linear").schedule.name == "linear" and (own / "linear.yaml").is_file()


def test_plan_is_changed_only_by_overrides_that_change_a_value(run: Path) -> None:
    assert not plan_resume(run, ["seed=7"]).is_changed and plan_resume(run, ["train.max_steps=5"]).is_changed


def test_setting_newer_than_the_run_is_taken_from_conf_with_a_note(run: Path, start_config: Config) -> None:
    path = run / ".hydra" / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    del saved["train"]["keep_every"]
    path.write_text(yaml.safe_dump(saved))
    plan = plan_resume(run, [])
    assert plan.config == start_config and plan.notes == [
        "train.keep_every=0 is taken from conf/: the setting is newer than the run"
    ]
    with pytest.raises(UserError, match="has no value"):  # the file of a run that never began may be incomplete
        plan_resume(run, [], has_started=False)


@pytest.mark.slow
def test_setting_that_the_saved_config_lacks_is_taken_from_conf(run: Path) -> None:
    """A run of an earlier version: its copies replace the files of conf/ that have the setting."""
    for path in (Path(".hydra/config.yaml"), Path(".hydra/conf/config.yaml")):
        content = yaml.safe_load((run / path).read_text())
        del content["run"], content["train"]["keep_every"]
        (run / path).write_text(yaml.safe_dump(content))
    plan = plan_resume(run, [])
    assert plan.config.run.name == "" and plan.config.train.keep_every == 0


def test_setting_that_no_longer_exists_is_refused_with_the_commit_of_the_run(run: Path) -> None:
    edit_config(run, momentum_of_old=3)
    with pytest.raises(UserError) as error:
        plan_resume(run, [])
    assert "momentum_of_old" in error.value.setting and "git checkout abc123" in error.value.fix


@pytest.mark.slow
def test_saved_overrides_of_hydra_are_ignored(run: Path) -> None:
    path = run / ".hydra" / "overrides.yaml"
    path.write_text(
        yaml.safe_dump([*TYPED, "hydra.searchpath=[file:///nowhere]", "+hydra.callbacks.x._target_=os.system"])
    )
    assert resumed_config(run, "schedule=linear").schedule.name == "linear"
    assert "hydra" not in path.read_text()


@pytest.mark.parametrize(("typed", "message", "fix"), [
    ("train.batch_size=auto", "auto is for new runs: a resume or a branch keeps its rows per step", "leave it out, or give a number"),
    ("model.family=transformers", "model.family cannot change in a run, it is decoder", "then init_from=NEW model.family=transformers"),
    ("stage.objective=dpo", "stage.objective cannot change in a run, it is next_token", "start a new run with init_from="),
    ("stage.lora.rank=4", "stage.lora is null in this run, and stage cannot change", "start a new run with init_from="),
    ("model.rope_scaling.factor=2.0", "model.rope_scaling is null in this run, and model cannot change", "start a new run with init_from="),
])  # fmt: skip
def test_resume_names_the_override_that_needs_another_model_or_stage(
    run: Path, typed: str, message: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        plan_resume(run, [typed])
    assert message in error.value.message and fix in error.value.fix and error.value.setting == typed
    assert plan_resume(run, ["model.family=decoder"]).is_changed is False
