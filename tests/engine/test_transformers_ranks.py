"""Models of transformers on two ranks (gloo, on the CPU): the same losses as on one, resumed runs are bitwise equal,
and the number of ranks may change.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from engine_fixtures import DATA_FORMAT, composed, stage_overrides, write_examples
from transformers_families import random_family, write_family
from warm_programs import WarmPrograms

from models.formats.json_files import read_model_config
from models.formats.load import load_weights
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.device.mesh import has_unused_parameters
from runner.engine.verify_resume import diff_run_dirs, train_to_step

ROWS, STEPS, STOP = 22, 6, 3
FULL, SELECTIVE = ("train.activation_checkpointing=full", "train.activation_checkpointing=selective")
PACKED = "data.packing=best_fit"
TOLERANCE = 1e-5  # of losses: other sums of the same gradients


class Cell(NamedTuple):
    family: str
    changes: dict[str, Any]  # of its config
    overrides: list[str]
    equals_one_rank: bool = True  # False: random numbers or 16 bits


CELLS = {
    "tied weights and windows": Cell("gemma3_text", {}, ["distributed=fsdp", FULL, PACKED]),
    "experts": Cell("gpt_oss", {}, ["distributed=ddp", FULL, PACKED]),
    "frozen router bias": Cell("ernie4_5_moe", {}, ["distributed=fsdp"]),
    "parameters without gradient": Cell("blenderbot", {}, ["distributed=ddp", "train.accumulation_steps=2"]),
    "dropout in 16 bits": Cell(
        "gpt2",
        {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
        ["distributed=fsdp", SELECTIVE, "precision=bf16"],
        equals_one_rank=False,
    ),
}


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


class Trainings:
    """Trainings of all cells in a folder, on one rank in this process or as entries for `run_ranks`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = write_examples(folder, DATA_FORMAT["sft"], ROWS)
        self.shared = [
            *stage_overrides("sft"),
            f"data.path={data}",
            f"data.cache={folder / 'cache'}",
            f"train.max_steps={STEPS}",
        ]
        for name, cell in CELLS.items():
            write_family(folder / "weights" / name, cell.family, **cell.changes)

    def on_two_ranks(self, name: str, run: str, **fields: Any) -> dict[str, Any]:
        overrides = [*self.shared, "train.batch_size=2", *CELLS[name].overrides]
        return {
            "folder": str(self.folder / f"{name} {run}"),
            "overrides": overrides,
            "weights": str(self.folder / "weights" / name),
            **fields,
        }

    def on_one_rank(self, name: str, run: str, stop_at: int | None = None) -> Path:
        overrides = [override for override in CELLS[name].overrides if not override.startswith("distributed=")]
        weights = self.folder / "weights" / name
        cfg = composed(*self.shared, "train.batch_size=4", *overrides)
        train_to_step(
            dataclasses.replace(cfg, model=read_model_config(weights, "transformers"), init_from=str(weights)),
            self.folder / f"{name} {run}",
            stop_at,
        )
        return self.folder / f"{name} {run}"


@pytest.mark.slow(long=True)
def test_models_of_transformers_train_and_resume_on_two_ranks(
    tmp_path: Path, run_ranks: Callable[..., None], warm: WarmPrograms
) -> None:
    torch.set_num_threads(1)
    for family in {cell.family for cell in CELLS.values()}:
        name = family.removesuffix("_text")
        warm.call("importlib", "import_module", f"transformers.models.{name}.modeling_{name}")
    trainings, elastic = Trainings(tmp_path), "tied weights and windows"
    trainings.on_one_rank(elastic, "elastic", stop_at=2)
    first = [
        trainings.on_two_ranks(name, run, stop_at=stop)
        for name in CELLS
        for run, stop in (("uninterrupted", None), ("stopped", STOP))
    ]
    run_ranks(2, [*first, trainings.on_two_ranks(elastic, "elastic", attempt=2, stop_at=4)])
    run_ranks(2, [trainings.on_two_ranks(name, "stopped", attempt=2) for name in CELLS])
    trainings.on_one_rank(elastic, "elastic")
    for name, cell in CELLS.items():
        uninterrupted = tmp_path / f"{name} uninterrupted"
        assert diff_run_dirs(uninterrupted, tmp_path / f"{name} stopped") == []
        initial = load_weights(tmp_path / "weights" / name, "transformers")
        exported = load_weights(uninterrupted, "transformers")
        assert all(
            torch.equal(exported[key], tensor)
            for key, tensor in initial.items()
            if key.endswith("e_score_correction_bias")
        )
        if cell.equals_one_rank:
            assert losses(uninterrupted) == pytest.approx(
                losses(trainings.on_one_rank(name, "one rank")), abs=TOLERANCE
            )
    weights = safetensors.torch.load_file(
        newest_checkpoint(tmp_path / "dropout in 16 bits uninterrupted") / "model.safetensors"
    ).values()
    assert {tensor.dtype for tensor in weights} == {torch.float32} and any(
        (tensor != tensor.bfloat16()).any() for tensor in weights
    )
    assert losses(tmp_path / f"{elastic} elastic") == pytest.approx(
        losses(tmp_path / f"{elastic} one rank"), abs=TOLERANCE
    )


def test_parameters_without_gradient_are_found() -> None:
    model = random_family("mistral")
    assert not has_unused_parameters(model, torch.device("cpu"))
    model.hf.base_model.layers[0].never_called = torch.nn.Linear(2, 2)
    assert has_unused_parameters(model, torch.device("cpu"))
    assert all(parameter.grad is None for parameter in model.parameters())
