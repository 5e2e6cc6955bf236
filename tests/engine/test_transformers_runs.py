"""Runs of models of transformers: packed rows, adapters and preference pairs train, resumed runs are bitwise equal,
exports have the trained logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from engine_fixtures import SMALL_LORA, composed
from families_report import PACKED, FamilyResult, FamilyRuns, measure_family
from fault_counts import only_full
from transformers_families import FAMILIES, write_family

from common.errors import UserError
from models.formats.load import load_model
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.build import build_run
from runner.engine.loop import train
from runner.engine.objectives.config import prepare_stage
from runner.engine.verify_resume import diff_run_dirs, train_to_step
from runner.run_dir.metadata import RunMetadata

# One for each mechanism: eager attention with sinks and a mask for each type of layer; softcaps and own logits; a mask
# and learned positions;
# convolutions, not packed; layers of another class than Linear; a router bias as a buffer, and as a frozen parameter.
# All families: see families_report.py
SLOW = ("gpt_oss", "gemma2", "opt", "lfm2", "gpt2", "deepseek_v3", "ernie4_5_moe")
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_lora_on_layers_that_a_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with pytest.raises(
        UserError,
        match="unknown layers in stage.lora.targets: q_proj, .*; adapters can be added to c_attn, c_fc, c_proj",
    ):
        prepare_stage(composed("stage=sft", SMALL_LORA).stage, load_model(tmp_path))


@pytest.mark.slow
def test_resume_of_transformers_model_on_packed_rows_is_bitwise_equal(tmp_path: Path) -> None:
    runs = FamilyRuns("mistral_window", tmp_path)
    result, state = runs.compare_resumed("sft", PACKED, steps=STEPS)
    assert result == "equal"
    # kernels are chosen with the weights that it resumes with
    resumed = build_run(state.cfg, RunMetadata.detached(state.run_dir, 2))
    assert all(map(torch.equal, resumed.model.parameters(), state.model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe"])
def test_router_bias_that_is_not_trained_is_resumed_and_exported(name: str, tmp_path: Path) -> None:
    """Without it in the checkpoint the resumed run routed tokens with a bias of zero, and was called exact."""
    runs = FamilyRuns(name, tmp_path)
    stored = {
        key: tensor
        for key, tensor in load_model(runs.weights, "transformers").state_dict().items()
        if key.endswith("e_score_correction_bias")
    }
    assert stored and all(tensor.abs().min() > 0 for tensor in stored.values())
    result, state = runs.compare_resumed("sft", steps=STEPS)
    assert result == "equal" and runs.best_difference() < 1e-5
    resumed = build_run(state.cfg, RunMetadata.detached(state.run_dir, 2)).model.state_dict()
    assert all(
        torch.equal(resumed[key], tensor) and torch.equal(state.model.state_dict()[key], tensor)
        for key, tensor in stored.items()
    )


@pytest.mark.slow
def test_adapters_of_another_router_bias_are_not_resumed(tmp_path: Path) -> None:
    """A checkpoint of adapters has no tensor of the base model: its buffers are compared by checksum, too."""
    runs = FamilyRuns("deepseek_v3", tmp_path)
    result, state = runs.compare_resumed("lora", steps=STEPS)
    names = safetensors.torch.load_file(newest_checkpoint(state.run_dir) / "model.safetensors").keys()
    assert result == "equal" and all(".lora." in name for name in names)
    weights = safetensors.torch.load_file(runs.weights / "model.safetensors")
    changed = {name: tensor + name.endswith("e_score_correction_bias") for name, tensor in weights.items()}
    safetensors.torch.save_file(changed, runs.weights / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="frozen_weights"):
        train(build_run(state.cfg, RunMetadata.detached(state.run_dir, 2)))


def check(result: FamilyResult) -> None:
    expected = FAMILIES[result.family]
    assert (result.attention == "own", result.packing, result.loss == "chunked") == (
        expected.own_attention,
        expected.packing,
        expected.chunked_loss,
    )
    assert (result.sft, result.lora, result.dpo) == ("equal", "equal", "equal")
    assert float(result.export) < 1e-5
    if expected.packing == "none":
        assert result.packed_difference == f"refused: packed rows of {result.family} would not be exact"
    else:
        assert float(result.packed_difference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_family_of_transformers_trains_resumes_and_exports(name: str, tmp_path: Path) -> None:
    check(measure_family(name, tmp_path, steps=STEPS, is_killed=False))


@pytest.mark.slow
def test_fp16_run_of_transformers_model_resumes_bitwise_equal_after_a_kill(tmp_path: Path) -> None:
    runs, overrides = FamilyRuns("gemma3_text", tmp_path), [PACKED, "precision=fp16"]
    result, state = runs.compare_resumed("sft", *overrides, steps=STEPS, kill_at=2)
    assert result == "equal" and {p.dtype for p in state.model.parameters()} == {torch.float32}
    losses = runs.losses("sft", PACKED, steps=STEPS)  # of fp32
    assert state.progress.recent_losses != losses and state.progress.recent_losses == pytest.approx(losses, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gemma3_text", marks=only_full), "olmoe"])
def test_compiled_layer_of_other_families_resumes_bitwise_equal(name: str, tmp_path: Path) -> None:
    runs = FamilyRuns(name, tmp_path)
    write_family(runs.weights, name, num_hidden_layers=1)
    result, state = runs.compare_resumed("sft", "train.compile=default", steps=STEPS)
    assert result == "equal" and state.compile_decision.mode == "default"
    assert state.progress.recent_losses == pytest.approx(runs.losses("sft", steps=STEPS), abs=1e-5)


@only_full
@pytest.mark.slow
def test_compiled_recomputed_transformers_layers_resume_bitwise_equal(tmp_path: Path) -> None:
    runs = FamilyRuns("mistral_window", tmp_path)
    batches = [PACKED, "train.batch_size=2"]  # of different shapes, with and without a mask
    cfg = runs.config("sft", *batches, "train.compile=default", "train.activation_checkpointing=full", steps=STEPS)
    compiled = runs.train(cfg, "compiled")
    for stop_at in (2, None):
        torch._dynamo.reset()  # as in another process
        train_to_step(cfg, tmp_path / "stopped", stop_at)
    assert diff_run_dirs(tmp_path / "compiled", tmp_path / "stopped") == []
    assert compiled.progress.recent_losses == pytest.approx(runs.losses("sft", *batches, steps=STEPS), abs=1e-5)
