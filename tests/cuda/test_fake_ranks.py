"""fsdp on GPUs that compute nothing, as one of two ranks whose collectives exchange nothing."""

import pytest

pytestmark = pytest.mark.slow
OFFLOAD = "distributed.cpu_offload=true"
STEPS = ["pretrain", "model.num_hidden_layers=1", "train.max_steps=1", "distributed.name=fsdp", "distributed.nproc=2"]
CASES = {
    "adamw": ["optimizer=adamw", "precision.name=bf16"],
    "muon": ["optimizer=muon", "precision.name=bf16", "data.packing=best_fit"],
}


@pytest.fixture
def run_as_rank(run_on_gpu, tmp_path):
    ranks = {"RUNNER_RENDEZVOUS": f"file://{tmp_path}/meeting", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    return lambda function, cases: run_on_gpu(function, cases, **ranks)


def test_sharded_step_stays_on_its_gpu_without_host_sync(run_as_rank):
    results = run_as_rank("steps", {name: [*STEPS, *overrides] for name, overrides in CASES.items()})
    for result in results.values():
        assert (result["devices"], result["state"], result["syncs"]) == (["cuda:0"], ["cuda:0"], [])


def test_offloaded_state_stays_in_host_memory_also_when_resumed(run_as_rank):
    """Weights and state of an optimizer are on the CPU, while the ranks share them over their GPUs."""
    cases = {name: [*STEPS, OFFLOAD, *overrides] for name, overrides in CASES.items()}
    assert run_as_rank("resumed_state", cases) == {name: [["cpu"], ["cpu"]] for name in cases}
