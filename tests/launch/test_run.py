"""start(): what a launch leaves in the folder of its run."""

import dataclasses
import json

import pytest

from runner.config.compose import compose_config
from runner.launch.run import run
from runner.run_dir.initial_weights import resolve_init_from
from runner.run_dir.metadata import RunMetadata

WORDS = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=8", "model.intermediate_size=16", "train.max_steps=2",
         "train.eval_every=0", "train.sample_every=0", "train.save_every=0", "tracker.console=quiet", "data.val_path=null"]  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} goats sing"}) + "\n" for i in range(40)))

    def go(*words, name="run"):
        folder = tmp_path / name
        with RunMetadata.open(folder, resume=(folder / "run.json").exists()) as record:
            run(compose_config([f"data.path={rows}", *WORDS, *words]), record)
        return folder

    return go


def test_a_finished_run_says_so_with_all_its_fingerprints(launch):
    record = json.loads((launch() / "run.json").read_text())
    assert record["status"] == "completed" and record["step"] == 2 and record["stage"] == "pretrain"
    assert record["fingerprints"].keys() == {"model", "tokenizer", "data"}


@pytest.mark.parametrize("word", ["seed=7", "model.hidden_size=32", "train.batch_size=3", "train.max_steps=1"])
def test_a_refused_launch_leaves_every_byte_of_the_run_as_it_was(launch, word):
    folder = launch()

    def content():
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", ".owner.json")}

    before = content()
    with pytest.raises(ValueError):
        launch(word)
    assert content() == before


def test_a_proof_is_not_taken_for_a_trained_model(launch, tmp_path):
    launch("train.verify_resume=true", name="proof")
    record = json.loads((tmp_path / "proof" / "run.json").read_text())
    config = dataclasses.replace(compose_config(["stage=sft", "tracker.console=quiet"]), init_from="auto")
    assert resolve_init_from(config, tmp_path / "next", record["fingerprints"]) == "scratch"


def test_weights_that_were_moved_are_found_where_the_words_say(launch, tmp_path):
    base = launch(name="base")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(json.dumps({"conversations": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "goats"}]}) + "\n" for i in range(20))
    )
    adapters = ["stage=lora", f"data.path={chats}", "train.eval_every=0"]
    launch(*adapters, f"init_from={base}", name="run")
    base.rename(tmp_path / "moved")
    launch(*adapters, f"init_from={tmp_path / 'moved'}", "train.max_steps=3", name="run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["init_from"] == str(tmp_path / "moved")
