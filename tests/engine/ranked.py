"""One rank of several, for tests: trains each of the trainings given as JSON: [{"folder": ..., "words": [...], "stop_at": null}]."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from runner.engine.loop import train  # noqa: E402  the repo root has to be on the path first
from runner.engine.run import Interrupted, build_run  # noqa: E402  as above
from runner.launch.compose import compose  # noqa: E402  as above

if __name__ == "__main__":
    torch.set_num_threads(1)
    for training in json.loads(sys.argv[1]):
        folder = Path(training["folder"])
        folder.mkdir(exist_ok=True)
        run = build_run(compose(training["words"]), folder, attempt=training.get("attempt", 1), note=lambda **facts: None)
        stop_at = training.get("stop_at")
        try:
            train(run, stop=lambda run=run, at=stop_at: run.world.leads and run.progress.step == at)
        except Interrupted:
            assert stop_at is not None
