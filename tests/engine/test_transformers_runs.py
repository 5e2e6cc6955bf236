"""Runs of models of transformers: packed rows, adapters and preference pairs train, resumed runs are bitwise equal, exports have the trained logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fixtures import composed
from families_report import LORA, PACKED, FamilyResult, FamilyRuns, measure_family
from transformers_families import FAMILIES, write_family

from common.errors import UserError
from models.formats.load import load_model
from runner.engine.objectives.config import prepare_stage

# One for each mechanism: eager attention with sinks and a mask for each type of layer; softcaps and own logits; a mask and learned positions;
# convolutions, not packed; layers of another class than Linear. All families: see families_report.py
SLOW = ("gpt_oss", "gemma2", "opt", "lfm2", "gpt2")
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_lora_on_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with pytest.raises(UserError, match="adapters can be added to no layer of this model"):
        prepare_stage(composed("stage=sft", LORA).stage, load_model(tmp_path))


def test_resume_of_transformers_model_on_packed_rows_is_bitwise_equal(tmp_path: Path) -> None:
    runs = FamilyRuns("mistral_window", tmp_path)
    assert runs.compare_resumed("sft", PACKED, steps=STEPS)[0] == "equal"


def check(result: FamilyResult) -> None:
    expected = FAMILIES[result.family]
    assert (result.attention == "own", result.packing, result.loss == "chunked") == (expected.own_attention, expected.packing, expected.chunked_loss)
    assert (result.sft, result.dpo) == ("equal", "equal")
    assert result.lora == "equal" or (result.family == "gpt2" and result.lora.startswith("refused"))
    assert float(result.export) < 1e-5
    if expected.packing == "none":
        assert result.packed_difference == f"refused: packed rows of {result.family} would not be exact"
    else:
        assert float(result.packed_difference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_family_of_transformers_trains_resumes_and_exports(name: str, tmp_path: Path) -> None:
    check(measure_family(name, tmp_path, steps=STEPS, is_killed=False))
