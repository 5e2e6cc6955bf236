"""Ten losses of each stage, stored in tests/golden/.

A commit that changes numbers on purpose rewrites them (`REWRITE_GOLDEN=1 pytest tests/engine/test_golden.py`) and gives
the reason.
"""

import json
import os
from pathlib import Path

import pytest

from runner.engine.loop import train

STAGES = ("pretrain", "sft", "lora", "dpo", "dpo_lora")
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    "stage, packing",
    [*((stage, "none") for stage in STAGES), *((stage, "best_fit") for stage in ("pretrain", "sft", "dpo"))],
)
def test_golden_losses_of_ten_steps(make_run, logged, stage, packing):
    state = make_run(
        stage,
        f"data.packing={packing}",
        "train.max_steps=10",
        "train.batch_size=2",
        "train.accumulation_steps=2",
        "optimizer.lr=3e-3",
    )
    train(state)
    losses = [record["loss"] for record in logged(state.run_dir)]
    file = GOLDEN / (f"{stage}.json" if packing == "none" else f"{stage}_packed.json")
    if os.environ.get("REWRITE_GOLDEN"):
        file.write_text(json.dumps(losses, indent=1) + "\n")
    # Another CPU may sum in another order, which changes less than 1e-5; a changed formula changes more.
    assert losses == pytest.approx(json.loads(file.read_text()), abs=1e-5)
