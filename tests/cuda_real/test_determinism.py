"""A run on a GPU that is stopped and resumed has the bits of one that is not, with the default settings."""

import pytest
import torch
from engine_fixtures import composed

from runner.engine.verify_resume import verify_resume

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CI has none, type pytest tests/cuda_real on one"
)

LONG = ["model.hidden_size=256", "model.head_dim=64", "data.max_length=512", "train.batch_size=8", "train.max_steps=6"]
PACKED = "data.packing=best_fit"
EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=64"]
CASES = {
    "packed-fp32": ("pretrain", [PACKED, "precision=fp32"]),
    "packed-bf16": ("pretrain", [PACKED, "precision=bf16"]),
    "compiled-bf16": ("pretrain", [PACKED, "precision=bf16", "train.compile=default"]),
    "rows-bf16": ("sft", ["precision=bf16"]),
    "muon": ("pretrain", [PACKED, "optimizer=muon", "precision=bf16"]),
    "moe": ("pretrain", [*EXPERTS, PACKED, "precision=bf16"]),
    "dpo": ("dpo", [PACKED, "precision=bf16"]),
}


@pytest.mark.parametrize(("stage", "overrides"), CASES.values(), ids=CASES)
def test_resumed_run_on_a_gpu_has_the_same_bits(overrides_for, tmp_path, stage, overrides):
    arguments = overrides_for(stage, *LONG, "model.max_position_embeddings=512", "device=cuda", *overrides, rows=400)
    assert verify_resume(composed(*arguments), tmp_path) == []
