"""Which settings may change when a run is resumed: the rules of all settings, and runs that are resumed with changes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import safetensors.torch
import torch

from common.errors import Interrupted, UserError
from runner.checkpoint import atomic_dir
from runner.checkpoint.compatibility import diff_facts, fingerprint_parameters, rule_of, run_rules
from runner.checkpoint.format import STATE_FILE, TENSOR_FILES
from runner.config.compose import compose_config
from runner.engine.device.cpu import THREAD_VARIABLES
from runner.engine.loop import train

IGNORED_SETTINGS = {
    "model": {"name", "model_type"},
    "data": {
        "cache", "columns", "encoding", "max_bad_fraction", "name", "num_workers", "on_bad_row", "path", "schema", "text_unit", "tokenizer", "turns", "val_path",
        "worker_timeout",
    },
    "stage": {"init_from_stage"},
    "distributed": {"nproc", "nnodes", "timeout", "max_restarts"},
    "train": {
        "log_every", "eval_every", "save_every", "sample_every", "sample_prompts", "sample_tokens", "keep_checkpoints", "keep_every", "patience", "max_failed_saves", "verify_resume", "supervise",
        "final_eval_rows", "eval_metrics", "max_hours", "stop_at", "profile",
    },
    "run": {"name", "tags", "note"},
    "tracker": {"name", "page", "console"},
    "export": {"weights"},
    "supervise": {"max_restarts", "delay", "hang_timeout", "halve_batch"},
    "sweep": {"match_budget", "lr_scale", "zip", "seeds", "top", "budget", "transfer"},
    "": {"device", "init_from", "keep", "resume", "plugins", "written_by"},
}  # fmt: skip
TRAINING_SETTINGS = {
    "optimizer": {"lr", "weight_decay", "betas", "eps", "grad_clip", "layer_decay"},
    "schedule": {"name", "warmup_steps", "min_lr_ratio"},
    "train": {"max_steps", "epochs", "max_nonfinite_steps", "ema_decay"},
    "stage": {"label_smoothing", "z_loss", "neftune_alpha"},
}
ROUNDING_SETTINGS = {
    "model": {"attention"},
    "distributed": {"name", "backend", "shard", "replicate", "reshard_after_forward", "cpu_offload"},
    "train": {"compile", "activation_checkpointing", "batch_size", "accumulation_steps", "deterministic"},
    "": {"environment"},
}


def interrupted_run(make_run, stage: str, *overrides: str, **options):
    """Return a run that was interrupted and saved at step 3 of 6."""
    state = make_run(stage, "train.max_steps=6", *overrides, **options)
    with pytest.raises(Interrupted):
        train(state, lambda: state.progress.step == 3)
    return state


@pytest.mark.slow
def test_rules_of_all_settings_are_as_documented() -> None:
    config = compose_config(["stage=pretrain", "optimizer=adamw", "schedule=cosine"])
    settings = defaultdict(lambda: defaultdict(set))
    for key, rule in run_rules(config).items():
        section, _, name = key.rpartition(".")
        # train.supervise is no section, supervise is one
        if section or (name and not hasattr(getattr(config, name, None), "__dataclass_fields__")):
            settings[rule][section].add(name)
    assert settings["ignored"] == IGNORED_SETTINGS
    assert settings["changes_training"] == TRAINING_SETTINGS
    assert settings["changes_rounding"] == ROUNDING_SETTINGS


def test_rule_of_a_setting_that_another_class_has_is_that_of_its_section() -> None:
    rules = run_rules(compose_config(["stage=pretrain", "schedule=cosine"]))
    assert [rule_of(fact, rules) for fact in ("schedule.decay_fraction", "tracker.project", "environment.torch", "model.unknown", "rows_per_step")] == [
        "changes_training", "ignored", "changes_rounding", "incompatible", "incompatible",
    ]  # fmt: skip


def test_setting_newer_than_the_run_is_no_difference_where_it_is_empty() -> None:
    saved, rules = {"a": 1}, {"a": "ignored", "freeze": "incompatible"}
    assert not any(diff_facts(saved, {"a": 1, "freeze": []}, rules).values())
    assert diff_facts(saved, {"a": 1, "freeze": ["norm"]}, rules)["incompatible"] == ["freeze: None -> ['norm']"]


def test_diff_facts_lists_differences_by_rule() -> None:
    saved, current = {"a": 1, "b": 2, "c": 3, "same": 0}, {"a": 2, "b": 3, "d": 4, "same": 0}
    differences = diff_facts(saved, current, {"a": "ignored", "b": "changes_training", "c": "changes_rounding"})
    assert differences == {
        "ignored": ["a: 1 -> 2"],
        "changes_training": ["b: 2 -> 3"],
        "changes_rounding": ["c: 3 -> None"],
        "incompatible": ["d: None -> 4"],
    }


CHANGES = {
    "model.hidden_size=48": "model.hidden_size: 32 -> 48", "seed=7": "seed: 42 -> 7", "train.batch_size=8": "rows_per_step: 4 -> 8", "optimizer=muon": "optimizer.name: adamw -> muon",
    "precision=bf16": "precision.name: fp32 -> bf16", "data.val_fraction=0.1": "data.val_fraction: 0 -> 0.1",
}  # fmt: skip


@pytest.mark.slow
def test_precision_auto_of_a_resumed_run_is_that_of_its_checkpoint(make_run) -> None:
    assert interrupted_run(make_run, "sft", "precision=bf16").cfg.precision.name == "bf16"
    resumed = make_run("sft", "train.max_steps=6", "precision=auto")
    train(resumed)
    assert resumed.cfg.precision.name == resumed.precision.name == "bf16" and resumed.first_step > 0
    assert interrupted_run(make_run, "sft", "precision=auto", folder="auto").cfg.precision.name == "fp32"


@pytest.mark.slow
def test_resume_refuses_settings_that_make_another_run(make_run) -> None:
    interrupted_run(make_run, "pretrain")
    for override, difference in CHANGES.items():
        with pytest.raises(UserError, match="cannot resume") as caught:
            train(make_run("pretrain", "train.max_steps=6", override))
        assert difference in caught.value.message


def test_resume_refuses_changed_data_at_the_same_path(make_run) -> None:
    state = interrupted_run(make_run, "pretrain", rows=36)
    path = Path(state.cfg.data.path)
    path.write_text(path.read_text().replace("goats", "sheep"))
    with pytest.raises(
        UserError,
        match=r"data_fingerprint: \w+ -> \w+ \(the rows differ, or how they are encoded; the tokenizer is the same\)",
    ):
        train(make_run("pretrain", "train.max_steps=6", rows=30))


def test_resume_with_another_tokenizer_names_it() -> None:
    saved = {"data_fingerprint": "a", "tokenizer_fingerprint": "b"}
    assert diff_facts(saved, {"data_fingerprint": "c", "tokenizer_fingerprint": "d"}, {})["incompatible"] == [
        "data_fingerprint: a -> c (the tokens of the rows: the tokenizer differs)", "tokenizer_fingerprint: b -> d (the tokenizer or its chat template differs)",
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["lora", "dpo", pytest.param("dpo_lora", marks=pytest.mark.slow)])
def test_resume_refuses_other_frozen_weights(make_run, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_run(make_run, stage)
    monkeypatch.setattr("runner.engine.build.seed_all", lambda seed: torch.manual_seed(seed + 1))
    with pytest.raises(UserError, match=r"frozen_weights: .* \(the weights of init_from, which the run reads again"):
        train(make_run(stage, "train.max_steps=6"))


@pytest.mark.slow
def test_resume_with_another_lr_uses_it_and_records_the_change(make_run, logged) -> None:
    interrupted_run(make_run, "pretrain", "schedule=constant")
    state = make_run("pretrain", "train.max_steps=6", "schedule=constant", "optimizer.lr=5e-5")
    train(state)
    assert [record["lr"] for record in logged(state.run_dir)] == [1e-3] * 3 + [5e-5] * 3
    assert state.metadata.fields["changed"] == ["optimizer.lr: 0.001 -> 5e-05"] and state.metadata.fields["exact"]


@pytest.mark.slow
def test_resume_with_another_micro_batch_size_is_recorded_as_inexact(make_run) -> None:
    interrupted_run(make_run, "pretrain")
    state = make_run("pretrain", "train.max_steps=6", "train.batch_size=2", "train.accumulation_steps=2")
    train(state)
    assert state.metadata.fields["exact"] is False and state.metadata.fields["inexact_because"] == [
        "train.accumulation_steps: 1 -> 2",
        "train.batch_size: 4 -> 2",
    ]


@pytest.mark.slow
def test_resume_with_activation_checkpointing_ends_in_the_same_weights(make_run, tmp_path: Path) -> None:
    train(make_run("pretrain", "train.max_steps=6", folder="uninterrupted"))
    interrupted_run(make_run, "pretrain")
    state = make_run("pretrain", "train.max_steps=6", "train.activation_checkpointing=selective")
    train(state)
    assert state.metadata.fields["inexact_because"] == ["train.activation_checkpointing: none -> selective"]
    expected, weights = (
        safetensors.torch.load_file(folder / "model" / "model.safetensors")
        for folder in (tmp_path / "uninterrupted", state.run_dir)
    )
    assert all(torch.equal(expected[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_resume_does_not_need_the_folder_of_the_initial_weights(make_run, tmp_path: Path) -> None:
    first = make_run("pretrain", "train.max_steps=1", folder="first")
    train(first)
    # a command takes the copy in the run directory
    start = [f"init_from={first.run_dir}", f"data.tokenizer={first.tokenizer.folder}"]
    interrupted_run(make_run, "sft", *start, folder="second")
    first.run_dir.rename(tmp_path / "moved")
    train(make_run("sft", "train.max_steps=6", *start, folder="second"))


@pytest.mark.slow
def test_resume_from_the_previous_checkpoint_if_the_newest_is_damaged(make_run) -> None:
    state = interrupted_run(make_run, "pretrain", "train.save_every=1")
    (state.run_dir / "checkpoints" / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    train(make_run("pretrain", "train.max_steps=6", "train.save_every=1"))
    log = (state.run_dir / "train.log").read_text()
    assert "warning: checkpoint step-00000003 skipped" in log and "step 2" in log
    assert (state.run_dir / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.slow
def test_resume_behind_a_damaged_checkpoint_names_what_it_computes_with(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choices of the newest state.json apply, and are compared with the checkpoint that is loaded."""
    state = interrupted_run(make_run, "pretrain", "train.save_every=1")
    newest, files = state.run_dir / "checkpoints" / "step-00000003", {}
    for name in (*TENSOR_FILES.values(), STATE_FILE):
        files[name] = (newest / name).read_bytes()
    saved = json.loads(files[STATE_FILE])
    saved["compatibility"]["environment.threads"] = 2
    files[STATE_FILE] = json.dumps(saved).encode()
    atomic_dir.discard_dir(newest)
    atomic_dir.write_atomic_dir(newest.parent, newest.name, files, {})
    (newest / TENSOR_FILES["optimizer"]).write_bytes(b"")
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    resumed = make_run("pretrain", "train.max_steps=6", "train.save_every=1")
    assert torch.get_num_threads() == 2
    train(resumed)
    assert (resumed.first_step, resumed.metadata.fields["exact"]) == (2, False)
    assert resumed.metadata.fields["inexact_because"] == ["environment.threads: 1 -> 2"]


def test_fingerprint_of_weights_depends_on_every_number_and_on_their_names():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    changed = [{**weights, "a": weights["a"] + (torch.arange(6) == i).view(2, 3)} for i in range(6)]
    renamed = {"a": weights["b"], "b": weights["a"]}
    assert len({fingerprint_parameters(each) for each in (weights, renamed, *changed)}) == 8
