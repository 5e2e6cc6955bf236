"""Ten losses a stage. A change that claims not to touch the numbers leaves tests/golden/ alone; one that does, rewrites it
(`REWRITE_GOLDEN=1 pytest tests/engine/test_golden.py`) in the same commit, with the reason."""

import json
import os
from pathlib import Path

import pytest

from runner.engine.loop import train

STAGES = ("pretrain", "sft", "lora", "dpo", "dpo_lora")
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("stage, packing", [*((stage, "none") for stage in STAGES), *((stage, "best_fit") for stage in ("pretrain", "sft", "dpo"))])
def test_ten_losses_are_what_they_were(make_run, logged, stage, packing):
    state = make_run(stage, f"data.packing={packing}", "train.max_steps=10", "train.batch_size=2", "train.accumulation_steps=2", "optimizer.lr=3e-3")
    train(state)
    losses = [line["loss"] for line in logged(state.run_dir)]
    file = GOLDEN / (f"{stage}.json" if packing == "none" else f"{stage}_packed.json")
    if os.environ.get("REWRITE_GOLDEN"):
        file.write_text(json.dumps(losses, indent=1) + "\n")
    # 1e-5: another processor may add in another order; a changed formula shows long before that.
    assert losses == pytest.approx(json.loads(file.read_text()), abs=1e-5)
