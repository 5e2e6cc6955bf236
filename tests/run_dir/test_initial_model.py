"""init_from=DIR and init_from=RUN: the model is that of the weights, and a typed difference is refused by name."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_fixtures import TINY_RUN, Call
from omegaconf import OmegaConf

from common.errors import UserError
from common.settings import setting_values
from models.families.decoder import DecoderConfig
from models.families.hf_config import write_hf_config
from runner.config.compose import compose_tree, to_config, without_hydra
from runner.engine.config import UNNAMED_WEIGHTS, Config
from runner.launch import initial_weights
from runner.launch.initial_weights import adopt_model, check_model
from runner.sweep.grid import PointComposer

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA: dict[str, Any] = {
    **{
        "model_type": "llama",
        "vocab_size": 6400,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{
        "intermediate_size": 48,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
    },
}


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., str]:
    """llama(): override init_from with a folder that has the config.json of a Llama 3.1, with these changes."""

    def write(**changes: Any) -> str:
        (folder := tmp_path / f"{len(list(tmp_path.iterdir()))}" / "llama").mkdir(parents=True)  # each is read once
        (folder / "config.json").write_text(json.dumps(LLAMA | changes))
        return f"init_from={folder}"

    return write


def started(*typed: str) -> Config:
    """Return the config of a new run, checked against its weights."""
    tree = without_hydra(compose_tree(list(typed)))
    adopt_model(tree, list(typed))
    config = to_config(tree)
    if config.init_from not in UNNAMED_WEIGHTS:
        check_model(config)
    return config


def decoder(*typed: str) -> DecoderConfig:
    model = started(*typed).model
    assert isinstance(model, DecoderConfig)
    return model


def write_run(folder: Path, **changes: Any) -> Path:
    """Write the recorded config of a run with the default model and these changes."""
    config = json.loads(default_config())
    config["model"] |= changes
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text("{}")
    return folder


@functools.cache
def default_config() -> str:
    return json.dumps(OmegaConf.to_container(without_hydra(compose_tree([])), resolve=True))


def test_model_that_is_not_typed_is_that_of_the_folder(llama: Callable[..., str]) -> None:
    model = decoder(llama(), "stage=sft", "data.max_length=2048")  # the default model has 1,024 positions
    assert (model.rope_theta, model.rms_norm_eps, model.qk_norm, model.max_position_embeddings, model.name) == (
        5e5,
        1e-5,
        False,
        4096,
        "llama",
    )
    assert model.rope_scaling is not None and (model.rope_scaling.type, model.rope_scaling.factor) == ("llama3", 8.0)


@pytest.mark.parametrize(
    ("typed", "warns"),
    [
        (["stage=sft"], True),
        (["stage=sft", "optimizer.lr=2e-5"], False),
        (["stage=lora"], True),
        (["stage=lora", "optimizer.lr=2e-4"], False),
    ],
)
def test_learning_rate_of_small_models_is_warned_of_for_published_weights(
    typed: list[str], warns: bool, llama: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    initial_weights.warn_of_lr(started(llama(), *typed))
    assert ("is high for" in capsys.readouterr().err) == warns
    run = write_run(tmp_path / "run")
    initial_weights.warn_of_lr(started(f"init_from={run}", *typed))
    assert capsys.readouterr().err == ""


def test_typed_setting_without_influence_on_weights_stays_in_the_model(llama: Callable[..., str]) -> None:
    model = decoder(
        llama(), "model.dropout=0.1", "model.attention=math", "model.max_position_embeddings=128", "data.max_length=128"
    )
    assert (model.dropout, model.attention, model.max_position_embeddings, model.rope_theta) == (0.1, "math", 128, 5e5)


@pytest.mark.parametrize(
    "typed",
    [
        "model.rope_theta=1e4",
        "model.rms_norm_eps=1e-6",
        "model.qk_norm=true",
        "model.tie_word_embeddings=true",
        "model.attention_bias=true",
    ],
)
def test_typed_difference_is_refused_with_both_values(typed: str, llama: Callable[..., str]) -> None:
    key = typed.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key}=\S+, in the weights \S+") as error:
        decoder(llama(), typed)
    assert key in error.value.fix


@pytest.mark.parametrize(
    "choice", [["model=tiny"], ["experiment=minimind_pretrain", "data.path=rows.jsonl"]], ids=["group", "experiment"]
)
def test_chosen_model_is_compared_with_the_folder(choice: list[str], llama: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="these weights belong to another model") as error:
        decoder(llama(), *choice)
    assert "model.rope_theta=1000000.0, in the weights 500000.0" in error.value.message
    assert "model.rope_scaling=None, in the weights {'type': 'llama3', 'factor': 8.0" in error.value.message


def test_chosen_model_that_equals_the_folder_is_kept(tmp_path: Path) -> None:
    tiny = decoder("model=tiny")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(write_hf_config(_asdict(tiny))))
    assert decoder(f"init_from={tmp_path / 'tiny'}", "model=tiny") == tiny


def _asdict(model: DecoderConfig) -> dict[str, Any]:
    return {**setting_values(model), "rope_scaling": None}


def test_field_that_the_decoder_lacks_chooses_transformers(
    llama: Callable[..., str],
) -> None:
    source = llama(attention_multiplier=0.01)
    assert started(source).model.family == "transformers"
    with pytest.raises(UserError, match="attention_multiplier=0.01"):
        started(source, "model.family=decoder")


def test_choice_of_decoder_or_transformers_is_described_with_its_reason(llama: Callable[..., str]) -> None:
    for changes, described in (
        ({}, "computed by the decoder of this program; model.family=transformers chooses"),
        (
            {"model_type": "qwen3_moe", "output_router_logits": False},
            "computed by the decoder of this program without load-balancing loss, as config.json has",
        ),
        (
            {"model_type": "qwen3_moe"},
            "computed by the decoder of this program with the load-balancing loss times 0.001;",
        ),
        (
            {"hidden_act": "gelu"},
            "computed by the class of transformers: llama (LlamaForCausalLM) with hidden_act=gelu is not supported",
        ),
    ):
        override = llama(**changes)
        assert described in str(adopt_model(without_hydra(compose_tree([override])), [override]))


def test_model_of_a_run_is_the_one_that_it_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rope_theta=123.0, hidden_size=64, name="mine")
    (run / "checkpoints" / "step-00000100").mkdir(parents=True)
    for source in (run, run / "checkpoints" / "step-00000100"):
        model = decoder(f"init_from={source}", "stage=sft")
        assert (model.rope_theta, model.hidden_size, model.name) == (123.0, 64, "mine")
    with pytest.raises(
        UserError,
        match="model.family=transformers does not compute the weights of this run, which are those of decoder",
    ):
        decoder(f"init_from={run}", "stage=sft", "model.family=transformers")
    with pytest.raises(UserError, match="model.rope_theta=1000000.0, in the weights 123.0"):
        decoder(f"init_from={run}", "model=tiny", "model.hidden_size=64")


def test_model_of_a_run_of_an_older_version_gets_the_settings_that_are_newer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rope_theta=123.0)
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    del config["model"]["attention_bias"]
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    assert decoder(f"init_from={run}").attention_bias is False


def test_model_of_a_run_without_family_is_that_of_its_model_folder(llama: Callable[..., str], tmp_path: Path) -> None:
    """Runs of 0.1 have no model.family: KeyError."""
    llama()
    run = write_run(tmp_path / "run")
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    del config["model"]["family"]
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    checkpoint = run / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="config.json is missing"):
        decoder(f"init_from={run}")
    shutil.move(tmp_path / "0" / "llama", run / "model")
    for source in (run, checkpoint):
        assert decoder(f"init_from={source}", "stage=sft").rope_theta == 5e5
        with pytest.raises(UserError, match="model.rope_theta=1000000.0, in the weights 500000.0"):
            decoder(f"init_from={source}", "model=tiny")


def test_model_of_an_adapter_is_that_of_its_base_model(llama: Callable[..., str], tmp_path: Path) -> None:
    llama()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "0" / "llama")})
    )
    assert decoder(f"init_from={tmp_path / 'adapter'}").rope_theta == 5e5


def test_model_of_a_minimind_file_renormalizes_and_a_typed_one_must_too(tmp_path: Path) -> None:
    import torch

    from models.decoder import Decoder

    sizes = [
        "model.vocab_size=64",
        "model.hidden_size=16",
        "model.head_dim=4",
        "model.intermediate_size=8",
        "model.moe_intermediate_size=8",
    ]
    typed = ["model=minimind_moe", *sizes, f"init_from={tmp_path / 'moe.pth'}"]
    torch.save(Decoder(decoder(*typed[:-1])).state_dict(), tmp_path / "moe.pth")
    assert decoder(typed[-1]).norm_topk_prob
    with pytest.raises(UserError, match="model.norm_topk_prob=False, in the weights True") as error:
        decoder(*typed)
    assert "model.norm_topk_prob=True" in error.value.fix


def test_command_refuses_another_model_and_leaves_nothing(
    llama: Callable[..., str], call: Call, rows: str, workspace: Path
) -> None:
    result = call(rows, llama(), "model=tiny", "device=cpu", "tracker.console=quiet")
    assert result.returncode == 2 and "these weights belong to another model" in result.stderr
    assert not (workspace / "outputs").exists()


@pytest.mark.slow
def test_run_from_a_run_records_its_model_and_resumes_without_it(call: Call, rows: str, workspace: Path) -> None:
    common = [
        rows,
        "device=cpu",
        "train.compile=off",
        "data.max_length=32",
        "data.val_path=null",
        "train.sample_every=0",
    ]
    assert call(rows, *TINY_RUN, "model.rope_theta=77", "hydra.run.dir=first").returncode == 0
    assert (
        "model: the settings are those of the weights"
        in (second := call(*common, "train.max_steps=2", "init_from=first", "hydra.run.dir=second")).stderr
    )
    assert second.returncode == 0
    assert yaml.safe_load((workspace / "second" / ".hydra" / "config.yaml").read_text())["model"]["rope_theta"] == 77
    shutil.rmtree(workspace / "first")
    assert call("resume=second", "train.max_steps=4").returncode == 0
    assert json.loads((workspace / "second" / "model" / "config.json").read_text())["rope_theta"] == 77


def test_points_of_a_sweep_take_the_model_of_their_weights(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"theta{theta}", rope_theta=theta) for theta in (77.0, 88.0)]
    composer = PointComposer(["stage=sft"])
    configs = [composer.config({"init_from": str(run), "optimizer.lr": "1e-3"}) for run in runs]
    assert [config.model.rope_theta for config in configs] == [77.0, 88.0]
    for config in configs:
        check_model(config)
