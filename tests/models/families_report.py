"""Print a Markdown table of what each family of transformers_families.py does in training:

    PYTHONPATH=.:tests python tests/models/families_report.py [--steps 20] [--families qwen3_moe,gemma2]

The columns are fields of `FamilyResult`. Runs take several minutes; each is a run of the engine in this process, on the
CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import yaml
from engine_fixtures import DATA_FORMAT, SMALL_LORA, composed, stage_overrides, write_examples
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers_families import FAMILIES, write_family

from common.errors import UserError
from models.formats.json_files import read_model_config
from models.formats.load import load_model
from models.language_model import LanguageModel
from models.transformers_adapter.attention import IMPLEMENTATION
from models.transformers_adapter.model import TransformersModel
from runner.engine import evaluation
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.loop import train
from runner.engine.state import TrainState
from runner.engine.verify_resume import diff_run_dirs, train_to_step
from runner.inference.load import load_trained
from runner.run_dir.metadata import RunMetadata

ROWS = 12  # of the data: all of them are in each step, packed or not, so that both have the same loss
LORA = SMALL_LORA.replace("[q_proj,k_proj,v_proj,o_proj]", "[all-linear]")
PACKED = "data.packing=best_fit"
LOGIT_IDS = torch.arange(3, 60)[None]


@dataclass
class FamilyResult:
    """What a family does.

    Differences are the largest absolute ones; "refused" is a UserError before the first step.
    """

    family: str
    # where init_from=DIR loads it: decoder (of this program) or transformers; all other columns are of transformers
    path: str
    attention: str
    packing: str  # how packed rows are separated, or none: refused
    loss: str
    packed_difference: str  # of the losses of all SFT steps, packed and not packed
    # whether a run that is killed and stopped, and resumed after both, is bitwise equal to an uninterrupted one
    sft: str
    lora: str  # whether a run that is stopped and resumed is bitwise equal
    dpo: str
    # of the logits of model/, also where it has the best weights and not the last, of checkpoints/best, and of the
    # trained model
    export: str


class FamilyRuns:
    """Runs of one family in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.weights = name, folder, folder / "weights"
        write_family(self.weights, name)

    def config(self, stage: str, *overrides: str, steps: int) -> Config:
        """Return the config of a run that starts from the weights of the family, in a model of transformers."""
        settings = [
            *stage_overrides(stage),
            f"data.cache={self.folder / 'cache'}",
            f"train.max_steps={steps}",
            "train.save_every=3",
            f"train.batch_size={ROWS}",
        ]
        cfg = composed(*settings, *([LORA] if stage == "lora" else []), *overrides)
        data = dataclasses.replace(cfg.data, path=str(write_examples(self.folder, DATA_FORMAT[stage], ROWS)))
        return dataclasses.replace(
            cfg, model=read_model_config(self.weights, "transformers"), init_from=str(self.weights), data=data
        )

    def train(self, cfg: Config, run: str) -> TrainState:
        """Train to the end, and return the state of the run."""
        (run_dir := self.folder / run).mkdir()
        state = build_run(cfg, RunMetadata.detached(run_dir, 1))
        train(state)
        state.logger.finish("completed")
        return state

    def resumed(self, cfg: Config, run: str, kill_at: int | None, stop_at: int) -> Path:
        """Train with a stop at one step and, if `kill_at` is not None, a SIGKILL at an earlier one."""
        if kill_at is not None:
            self._train_until_killed(cfg, self.folder / run, kill_at)
            torch.manual_seed(1)
        train_to_step(cfg, self.folder / run, stop_at)
        torch.manual_seed(2)
        train_to_step(cfg, self.folder / run, None)
        return self.folder / run

    def _train_until_killed(self, cfg: Config, run_dir: Path, step: int) -> None:
        if (child := os.fork()) == 0:
            run_dir.mkdir()
            state = build_run(cfg, RunMetadata.detached(run_dir, 1))
            train(
                state,
                stop_requested=lambda: state.progress.step == step and os.kill(os.getpid(), signal.SIGKILL) is None,
            )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def compare_resumed(
        self, stage: str, *overrides: str, steps: int, kill_at: int | None = None
    ) -> tuple[str, TrainState]:
        """Return whether a resumed run is bitwise equal, and the state of the uninterrupted one."""
        cfg, run = self.config(stage, *overrides, steps=steps), "-".join([stage, *overrides])
        state = self.train(cfg, run)
        differences = diff_run_dirs(
            self.folder / run, self.resumed(cfg, f"{run} resumed", kill_at, stop_at=steps - steps // 4)
        )
        return ("equal" if not differences else "; ".join(differences)), state

    def best_difference(self) -> float:
        """Return the largest difference between the logits of the model at its best evaluation, of model/, and of
        checkpoints/best. The best step is not the last.
        """
        run, steps = self.folder / "best", 3
        cfg = self.config("sft", "data.val_fraction=0.2", "train.eval_every=1", "train.save_every=0", steps=steps)
        logits: dict[int, Tensor] = {}

        def evaluate_loss(state: TrainState) -> dict[str, float]:
            logits[state.progress.step] = family_logits(state.model)
            return {"loss": float(state.progress.step)}

        with mock.patch.object(evaluation, "evaluate_loss", evaluate_loss):
            state = self.train(cfg, run.name)
        assert (state.progress.best_step, state.progress.step) == (1, steps)
        write_settings(run, cfg)
        shutil.copytree(self.weights, run / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        loaded = load_trained(run / "checkpoints" / "best", "cpu").model
        again = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(LOGIT_IDS).logits.detach()
        return max(float((other - logits[1]).abs().max()) for other in (family_logits(loaded), again))

    def losses(self, stage: str, *overrides: str, steps: int) -> list[float | None]:
        return self.train(
            self.config(stage, *overrides, steps=steps), "-".join([stage, *overrides, "losses"])
        ).progress.recent_losses


def measure_family(name: str, folder: Path, steps: int, is_killed: bool) -> FamilyResult:
    """Train a family in `folder` in every way of the table, `steps` optimizer steps of SFT and as many of the others,
    at most 6.
    """
    runs = FamilyRuns(name, folder)
    refused, kill_at = "", steps // 2 if is_killed else None
    packed: list[float | None] = []
    try:
        sft, state = runs.compare_resumed("sft", PACKED, steps=steps, kill_at=kill_at)
        packed = state.progress.recent_losses
        unpacked = runs.losses("sft", steps=steps)
    except UserError as error:
        refused = f"refused: {error.message.partition(':')[0]}"
        sft, state = runs.compare_resumed("sft", steps=steps, kill_at=kill_at)
        unpacked = state.progress.recent_losses
    try:
        lora, _ = runs.compare_resumed("lora", steps=min(steps, 6))
    except UserError as error:
        lora = f"refused: {error.message}"
    dpo, _ = runs.compare_resumed("dpo", steps=min(steps, 6))
    model = state.model.eval()
    assert isinstance(model, TransformersModel)
    attention = "own" if model.kernels.attention == IMPLEMENTATION else model.kernels.attention
    return FamilyResult(
        family=name,
        path=read_model_config(runs.weights).family,
        attention=attention if model.kernels.is_called else "its layers",
        packing="none" if refused else model.kernels.packing,
        loss="chunked" if model.kernels.chunked_loss else "own logits",
        packed_difference=refused
        or f"{max(abs(a - b) for a, b in zip(packed, unpacked, strict=True) if a is not None and b is not None):.0e}",
        sft=sft,
        lora=lora,
        dpo=dpo,
        export=f"{max(export_difference(model, state.run_dir / 'model'), runs.best_difference()):.0e}",
    )


def write_settings(run: Path, cfg: Config) -> None:
    """Write the settings of a run as a command does: its checkpoints are read with them."""
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg)))


def family_logits(model: LanguageModel) -> Tensor:
    was_training = model.training
    with torch.no_grad():
        logits: Tensor = model.eval()(LOGIT_IDS).logits
    model.train(was_training)
    return logits


@torch.no_grad()
def export_difference(model: TransformersModel, exported: Path) -> float:
    """Return the largest difference between the logits of a trained model, of its folder in transformers, and of its
    folder in this program.
    """
    ids = LOGIT_IDS
    expected = model(ids, lengths=torch.full((len(ids),), ids.shape[1])).logits  # a run with packed rows needs them
    hf = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    return max(float((logits - expected).abs().max()) for logits in (hf(ids).logits, load_model(exported)(ids).logits))


def print_table(names: list[str], steps: int) -> None:
    """Print a row as soon as it is measured."""
    columns = [field.name for field in dataclasses.fields(FamilyResult)]
    print(
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |\n|" + "---|" * len(columns), flush=True
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(
                "| "
                + " | ".join(dataclasses.astuple(measure_family(name, Path(folder), steps, is_killed=True)))
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--families", default=",".join(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_table(arguments.families.split(","), arguments.steps)
