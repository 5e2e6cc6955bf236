"""Runs of models of transformers: packed rows, adapters and preference pairs train, resumed runs are bitwise equal, exports have the trained logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fixtures import SMALL_LORA, composed
from families_report import PACKED, FamilyResult, FamilyRuns, measure_family
from transformers_families import FAMILIES, write_family

from common.errors import UserError
from models.formats.load import load_model
from runner.engine.build import build_run
from runner.engine.objectives.config import prepare_stage
from runner.engine.verify_resume import diff_run_dirs, train_to_step

# One for each mechanism: eager attention with sinks and a mask for each type of layer; softcaps and own logits; a mask and learned positions;
# convolutions, not packed; layers of another class than Linear. All families: see families_report.py
SLOW = ("gpt_oss", "gemma2", "opt", "lfm2", "gpt2")
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_lora_on_layers_that_a_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with pytest.raises(UserError, match="unknown layers in stage.lora.targets: q_proj, .*; adapters can be added to c_attn, c_fc, c_proj"):
        prepare_stage(composed("stage=sft", SMALL_LORA).stage, load_model(tmp_path))


def test_resume_of_transformers_model_on_packed_rows_is_bitwise_equal(tmp_path: Path) -> None:
    runs = FamilyRuns("mistral_window", tmp_path)
    result, state = runs.compare_resumed("sft", PACKED, steps=STEPS)
    assert result == "equal"
    resumed = build_run(state.cfg, state.run_dir, 2, lambda **_: None)  # kernels are chosen with the weights that it resumes with
    assert all(map(torch.equal, resumed.model.parameters(), state.model.parameters()))


def check(result: FamilyResult) -> None:
    expected = FAMILIES[result.family]
    assert (result.attention == "own", result.packing, result.loss == "chunked") == (expected.own_attention, expected.packing, expected.chunked_loss)
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
@pytest.mark.parametrize("name", ["gemma3_text", "olmoe"])
def test_compiled_layer_of_other_families_resumes_bitwise_equal(name: str, tmp_path: Path) -> None:
    runs = FamilyRuns(name, tmp_path)
    write_family(runs.weights, name, num_hidden_layers=1)
    result, state = runs.compare_resumed("sft", "train.compile=default", steps=STEPS)
    assert result == "equal" and state.compile_decision.mode == "default"
    assert state.progress.recent_losses == pytest.approx(runs.losses("sft", steps=STEPS), abs=1e-5)


@pytest.mark.slow
def test_compiled_and_recomputed_layers_of_transformers_model_resume_bitwise_equal(tmp_path: Path) -> None:
    runs = FamilyRuns("mistral_window", tmp_path)
    batches = [PACKED, "train.batch_size=2"]  # of different shapes, with and without a mask
    cfg = runs.config("sft", *batches, "train.compile=default", "train.activation_checkpointing=full", steps=STEPS)
    compiled = runs.train(cfg, "compiled")
    for stop_at in (2, None):
        torch._dynamo.reset()  # as in another process
        train_to_step(cfg, tmp_path / "stopped", stop_at)
    assert diff_run_dirs(tmp_path / "compiled", tmp_path / "stopped") == []
    assert compiled.progress.recent_losses == pytest.approx(runs.losses("sft", *batches, steps=STEPS), abs=1e-5)
