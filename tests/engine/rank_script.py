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


def spoil(state, at, gradient):
    """The loss is not finite at that step, with its gradient or without."""
    honest = state.objective.loss

    def loss(model, batch):
        parts = honest(model, batch)
        return {name: part * float("nan") if gradient else part + float("inf") for name, part in parts.items()} if state.progress.step == at else parts

    state.objective = types.SimpleNamespace(loss=loss, count=state.objective.count, frozen={}, beside=[])


def main():
    torch.set_num_threads(1)
    for training in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(training["folder"])
        folder.mkdir(exist_ok=True)
        state = build_run(compose_config(training["words"]), folder, attempt=training.get("attempt", 1), update_metadata=lambda **facts: None)
        stop_at = training.get("stop_at")
        if poison := training.get("poison"):  # this rank's loss is not finite at that step
            spoil(state, poison["step"] if poison["rank"] == state.dist.rank else None, poison["gradient"])
        try:
            train(state, stop=lambda state=state, at=stop_at: state.dist.is_rank_zero and state.progress.step == at)
        except Interrupted:
            assert stop_at is not None


if __name__ == "__main__":
    run_then_hard_exit(main)
