"""One rank of several, for tests: trains each of the trainings in a JSON file: [{"folder": ..., "words": [...], "stop_at": null}]."""

import json
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.errors import Interrupted  # noqa: E402  as above
from runner.config.compose import compose_config  # noqa: E402  as above
from runner.engine.build import build_run  # noqa: E402  the repo root has to be on the path first
from runner.engine.loop import train  # noqa: E402  as above
from runner.launch.subprocesses import run_then_hard_exit  # noqa: E402  as above


def spoil(run, at, gradient):
    """The loss is not finite at that step, with its gradient or without."""
    honest = run.objective.loss

    def loss(model, batch):
        parts = honest(model, batch)
        return {name: part * float("nan") if gradient else part + float("inf") for name, part in parts.items()} if run.progress.step == at else parts

    run.objective = types.SimpleNamespace(loss=loss, count=run.objective.count, frozen={}, beside=[])


def main():
    torch.set_num_threads(1)
    for training in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(training["folder"])
        folder.mkdir(exist_ok=True)
        run = build_run(compose_config(training["words"]), folder, attempt=training.get("attempt", 1), note=lambda **facts: None)
        stop_at = training.get("stop_at")
        if poison := training.get("poison"):  # this rank's loss is not finite at that step
            spoil(run, poison["step"] if poison["rank"] == run.world.rank else None, poison["gradient"])
        try:
            train(run, stop=lambda run=run, at=stop_at: run.world.leads and run.progress.step == at)
        except Interrupted:
            assert stop_at is not None


if __name__ == "__main__":
    run_then_hard_exit(main)
