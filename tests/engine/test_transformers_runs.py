"""Runs of models of transformers: packed rows, adapters and preference pairs train, and a resumed run is bitwise equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_fixtures import SMALL_LORA, composed, stage_overrides, write_examples
from transformers_families import FAMILIES, write_family

from common.errors import Interrupted, UserError
from models.formats.json_files import read_model_config
from models.formats.load import load_model
from runner.engine.build import build_run
from runner.engine.loop import train
from runner.engine.objectives.config import prepare_stage
from runner.engine.verify_resume import diff_run_dirs

FAST = ("mistral_window",)
ALL_LINEAR = SMALL_LORA.replace("[q_proj,k_proj,v_proj,o_proj]", "[all-linear]")
STAGES = {"packed": ["data.packing=best_fit", "train.batch_size=1"], "lora": [], "dpo": []}

families = pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])


@pytest.fixture
def run_family(name: str, tmp_path: Path) -> Callable[..., Path]:
    write_family(tmp_path / "weights", name)

    def run(stage: str, folder: str, stops: list[int], *overrides: str) -> Path:
        torch.set_num_threads(1)
        (run_dir := tmp_path / folder).mkdir()
        lora = [ALL_LINEAR] if stage == "lora" else []
        cfg = composed(*stage_overrides(stage), *lora, f"data.cache={tmp_path / 'cache'}", "train.max_steps=4", "train.save_every=3", *overrides)
        model = read_model_config(tmp_path / "weights", "transformers")
        data = dataclasses.replace(cfg.data, path=str(write_examples(tmp_path, cfg.stage.data_format, 20)))
        cfg = dataclasses.replace(cfg, model=model, init_from=str(tmp_path / "weights"), data=data)
        for attempt, stop in enumerate([*stops, None], 1):
            state = build_run(cfg, run_dir, attempt=attempt, update_metadata=lambda **_: None)
            try:
                train(state, stop_requested=lambda stop=stop, state=state: state.progress.step == stop)  # type: ignore[misc]
            except Interrupted:
                state.logger.finish("interrupted", {})
            torch.manual_seed(attempt)
        state.logger.finish("completed", {})
        return run_dir

    return run


def test_lora_on_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with pytest.raises(UserError, match="adapters can be added to no layer of this model"):
        prepare_stage(composed("stage=sft", ALL_LINEAR).stage, load_model(tmp_path))


@families
@pytest.mark.parametrize("kind", STAGES)
def test_resume_of_transformers_model_is_bitwise_equal(name: str, kind: str, run_family: Callable[..., Path]) -> None:
    if kind == "packed" and FAMILIES[name].packing == "none":
        kind, overrides = "unpacked", []
    else:
        overrides = STAGES[kind]
    if (kind, name) == ("lora", "gpt2"):
        pytest.skip("its layers are of a class of transformers, Conv1D: refused, see above")
    stage = "sft" if kind.endswith("packed") else kind
    assert diff_run_dirs(run_family(stage, "uninterrupted", [], *overrides), run_family(stage, "stopped", [2], *overrides)) == []
