"""run(): what a launch leaves in the run directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN

from common.errors import UserError
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.launch.initial_weights import resolve_init_from
from runner.launch.run import run
from runner.run_dir.metadata import RunMetadata

Launch = Callable[..., Path]


@pytest.fixture
def config(rows: str) -> Config:
    return compose_config([*TINY_RUN, rows, "tracker.console=quiet"])


@pytest.fixture
def launch(workspace: Path) -> Launch:
    """`launch(config, name)` runs `config` in the directory `name`, resumed if it holds a run."""

    def launch(config: Config, name: str = "run") -> Path:
        folder = workspace / name
        with RunMetadata.open(folder, resume=(folder / "run.json").exists()) as metadata:
            run(config, metadata)
        return folder

    return launch


def fields_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    names = (".lock", ".owner.json")
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in names}


def with_train(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.mark.slow
def test_completed_run_records_step_stage_and_fingerprints(launch: Launch, config: Config) -> None:
    fields = fields_of(launch(config))
    assert (fields["status"], fields["outcome"], fields["step"], fields["stage"]) == (
        "completed",
        "completed",
        2,
        "pretrain",
    )
    assert fields["fingerprints"].keys() == {"model", "tokenizer", "data"}


@pytest.mark.slow
def test_completed_run_ends_with_the_next_commands_but_a_job_does_not(
    launch: Launch, config: Config, workspace: Path
) -> None:
    last = (launch(config) / "train.log").read_text().split("completed after")[1]
    assert (
        "\nsteps " in last
        and "2 of 2\n" in last
        and "run/model (" in last
        and "\n  # train longer\n" in last
        and " train.max_steps=4\n" in last
    )
    (workspace / "sweep").mkdir()
    (workspace / "sweep" / "sweep.json").write_text("{}")
    job = launch(config, "sweep/job")
    assert (job / "train.log").read_text().splitlines()[-1].startswith("completed after")


@pytest.mark.slow
def test_refused_launch_leaves_every_byte_of_the_run(launch: Launch, config: Config) -> None:
    folder = launch(config)
    before = contents(folder)
    wider = dataclasses.replace(config.model, hidden_size=64)
    for changed in (
        dataclasses.replace(config, seed=7),
        dataclasses.replace(config, model=wider),
        with_train(config, max_steps=1),
    ):
        with pytest.raises(UserError):
            launch(changed)
        assert contents(folder) == before


@pytest.mark.slow
def test_verified_resume_is_not_taken_for_a_trained_model(launch: Launch, config: Config, workspace: Path) -> None:
    launch(with_train(config, verify_resume=True), "verified")
    sft = dataclasses.replace(compose_config(["stage=sft"]), model=config.model)
    assert resolve_init_from(sft, workspace / "next") == "scratch"


@pytest.mark.slow
def test_moved_initial_weights_are_found_under_the_typed_path(launch: Launch, config: Config, workspace: Path) -> None:
    base = launch(config, "base")
    chats = [
        {"conversations": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "goats"}]}
        for number in range(20)
    ]
    (workspace / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    lora = compose_config(
        [
            *TINY_RUN,
            "stage=lora",
            f"data.path={workspace / 'chats.jsonl'}",
            f"init_from={base}",
            "tracker.console=quiet",
        ]
    )
    launch(lora)
    base.rename(workspace / "moved")
    folder = launch(dataclasses.replace(with_train(lora, max_steps=3), init_from=str(workspace / "moved")))
    assert fields_of(folder)["init_from"] == str(workspace / "moved")
