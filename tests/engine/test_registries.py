"""An optimizer, an objective and a tracker are each added by one new file, in a copy of the program."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_fixtures import TINY_RUN

FILES = {
    "runner/engine/optim/lion.py": '''
"""Lion (https://arxiv.org/abs/2302.06675)."""

from dataclasses import dataclass, field

from runner.engine.optim.config import OptimizerConfig, ParamGroups, register_optimizer


@register_optimizer("lion")
@dataclass
class LionConfig(OptimizerConfig):
    lr: float = 1e-4
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    layer_decay: float = 1.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])  # of the interpolated gradient, and of the momentum

    def build(self, groups: ParamGroups):
        import torch

        class Lion(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(momentum.lerp(p.grad, 1 - self.betas[0]).sign_(), alpha=-group["lr"])
                        momentum.lerp_(p.grad, 1 - self.betas[1])

        Lion.betas = self.betas
        return [Lion(groups.decay + groups.no_decay, {"lr": self.lr})]
''',
    "runner/engine/objectives/ipo.py": '''
"""Identity preference optimization (https://arxiv.org/abs/2310.12036)."""

from dataclasses import dataclass
from typing import Optional

from models.config import LoraConfig
from runner.engine.objectives.config import StageConfig, register_objective
from runner.engine.objectives.objective import Objective, Reference


@register_objective("ipo")
@dataclass
class IpoConfig(StageConfig):
    name: str = "ipo"
    data_format: str = "preference"
    objective: str = "ipo"
    lora: Optional[LoraConfig] = None
    init_from_stage: Optional[str] = "sft"
    tau: float = 0.1  # strength of the regularization

    data_formats = ("preference",)
    needs_reference = True

    def build_objective(self, model):
        return Ipo(self.tau, Reference.of(model, self.lora))


class Ipo(Objective):
    def __init__(self, tau, reference):
        self.tau, self.reference = tau, reference

    def count(self, batch):
        return len(batch.names)

    def loss(self, model, batch):
        import torch

        def log_probs(nll):
            return -batch.sum_per_document(nll.double()).view(2, -1)

        with torch.no_grad(), self.reference.entered():
            reference = log_probs(self.reference.model(**batch.inputs).nll)
        chosen, rejected = (log_probs(model(**batch.inputs).nll) - reference).float()
        return {"loss": (chosen - rejected - 1 / (2 * self.tau)).square().sum()}
''',
    "runner/tracking/trackers/lines.py": '''
"""Writes the events to a text file."""

import sys
from dataclasses import dataclass

from runner.tracking.config import TRACKERS, TrackerConfig


@TRACKERS.register("lines")
@dataclass
class LinesConfig(TrackerConfig):
    page: bool = False
    console: str = "auto"
    path: str = "events.txt"  # file to write

    def command(self):
        program = "import sys; file = open(sys.argv[1], 'w'); [file.write(line) for line in sys.stdin if line.strip()]"
        return [sys.executable, "-c", program, self.path]
''',
}
IPO_STAGE = """# @package _global_
defaults:
  - override /data: dpo
stage: {name: ipo, data_format: preference, objective: ipo, lora: null, init_from_stage: sft, tau: 0.1}
"""
RUN = [
    "optimizer=lion",
    "optimizer.lr=1e-3",
    "stage=ipo",
    "data=dpo",
    "data.packing=none",
    "stage.tau=0.2",
    "tracker=lines",
    "train.log_every=1",
    "init_from=scratch",
    *TINY_RUN,
]


@pytest.fixture(scope="module")
def extended(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with the three new files."""
    copy = tmp_path_factory.mktemp("extended") / "program"
    shutil.copytree(checkout, copy)
    for name, source in FILES.items():
        (copy / name).write_text(source.lstrip())
    return copy


def execute(program: Path, *argv: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(program)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_registries_train_with_plugins_of_one_new_file_each(extended: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = execute(
        extended,
        str(extended / "runner" / "train.py"),
        *RUN,
        f"tracker.path={tmp_path / 'events.txt'}",
        f"hydra.run.dir={run_dir}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((run_dir / "run.json").read_text())["outcome"] == "completed"
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx((1 / (2 * 0.2)) ** 2, rel=1e-4)  # at the reference every margin is 0
    events = [json.loads(line) for line in (tmp_path / "events.txt").read_text().splitlines()]
    assert events[-1]["event"] == "finish" and "log" in {event.get("event") for event in events}


@pytest.mark.slow
def test_registries_show_and_refuse_settings_of_new_classes(extended: Path, tmp_path: Path) -> None:
    train = str(extended / "runner" / "train.py")
    shown = yaml.safe_load(
        execute(extended, train, "--cfg", "job", "optimizer=lion", "optimizer.lr=1e-3", cwd=tmp_path).stdout
    )
    assert shown["optimizer"] == {
        "name": "lion",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "layer_decay": 1.0,
        "betas": [0.9, 0.99],
        "mup_base_width": 0,
    }
    refused = execute(extended, train, "optimizer=lion", "optimizer.momentum=0.9", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.splitlines() == [
        "error: optimizer.momentum is not read by optimizer=lion",
        "  where: optimizer.momentum",
        "  fix:   optimizer=muon reads it",
    ]
    help_text = execute(extended, train, "--help", cwd=tmp_path).stdout
    assert "lion" in help_text and "ipo" in help_text


@pytest.mark.slow(long=True)
def test_registries_subject_new_classes_to_the_generic_tests(extended: Path, tmp_path: Path) -> None:
    """Exact resume and independence of accumulation are tested for every registered class, here for the new ones."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "tests", extended / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", extended)
    (extended / "conf" / "stage" / "ipo.yaml").write_text(IPO_STAGE)
    names = "any_registered_choice and (next_token-lion-cosine or ipo-adamw-cosine)"
    done = execute(
        extended,
        *"-m pytest -q -p no:cacheprovider tests/engine/test_loop.py tests/engine/test_resume.py -k".split(),
        names,
        cwd=extended,
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
