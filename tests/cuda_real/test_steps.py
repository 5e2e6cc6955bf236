"""Steps on a GPU against the same steps on the CPU, for each stage: losses, and the norm of each gradient."""

import itertools

import pytest
import torch

from runner.engine import loop
from runner.engine.state import TrainState

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CI has none, type pytest tests/cuda_real on one"
)

# too narrow and short for FlexAttention, which test_kernels.py compares
WIDER = ["model.hidden_size=64", "model.head_dim=16", "train.batch_size=2", "train.accumulation_steps=2"]
EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32"]
PACKED = "data.packing=best_fit"
CASES = {  # without adapters, whose random matrices come from the generator of the device
    "pretrain": ("pretrain", []),
    "packed": ("pretrain", [PACKED]),
    "packed-muon": ("pretrain", [PACKED, "optimizer=muon"]),
    "compiled": ("pretrain", [PACKED, "train.compile=default"]),
    "compiled-rows": ("sft", ["train.compile=default"]),
    "recomputed": ("pretrain", [PACKED, "train.activation_checkpointing=full"]),
    "selective": ("pretrain", [PACKED, "train.activation_checkpointing=selective"]),
    "moe": ("pretrain", EXPERTS),
    "packed-moe": ("pretrain", [*EXPERTS, PACKED]),
    "sft": ("sft", []),
    "packed-dpo": ("dpo", [PACKED]),
    "dpo": ("dpo", []),
}
IN_16_BITS = ("packed", "compiled", "sft", "dpo", "packed-moe")
# torch adds up a norm on the CPU in fp32: 1.5e-4 for an embedding
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}


def first_steps(state: TrainState) -> tuple[list[float], dict[str, float]]:
    """Return the losses of three steps, and the norm of each gradient in the first."""
    losses, norms = [], {}
    for batches in itertools.islice(state.loader.iter_epoch(0), 3):
        output = loop.train_step(state, batches, 1e-3)
        losses.append(float(output.sums["loss"]))
        norms = norms or dict(zip(output.gradients.names, output.gradients.norms.tolist(), strict=True))
    return losses, norms


@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, precision) for case in CASES for precision in TOLERANCES if precision == "fp32" or case in IN_16_BITS],
)
def test_steps_are_those_of_the_cpu(make_run, case, precision):
    stage, overrides = CASES[case]
    on_cpu = [each for each in overrides if not each.startswith("train.compile")]
    expected, cpu_norms = first_steps(make_run(stage, *WIDER, *on_cpu, "device=cpu", folder="cpu"))
    state = make_run(stage, *WIDER, *overrides, "device=cuda", f"precision={precision}", folder="cuda")
    losses, norms = first_steps(state)
    tolerance = TOLERANCES[precision]
    assert losses == pytest.approx(expected, rel=tolerance)
    smallest = 1e-2 * max(cpu_norms.values())
    assert norms == pytest.approx(cpu_norms, rel=tolerance, abs=tolerance * smallest)


@pytest.mark.parametrize("compile", ["off", "default"])
@pytest.mark.parametrize("overrides", [[PACKED], [PACKED, "optimizer=muon"], []], ids=["packed", "muon", "rows"])
def test_step_has_no_host_sync(make_run, overrides, compile):
    state = make_run(
        "pretrain", *WIDER, "device=cuda", "precision=bf16", f"train.compile={compile}", *overrides,
        "train.accumulation_steps=1",
    )  # fmt: skip
    batches = list(itertools.islice(state.loader.iter_epoch(0), 5))
    for each in batches[:4]:
        loop.train_step(state, each, 1e-3)  # compiling may wait for the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.train_step(state, batches[4], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
