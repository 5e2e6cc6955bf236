"""Training steps on GPUs that compute nothing: where their tensors are, what makes the host wait, how many kernels they
launch.
"""

import itertools

import pytest
from engine_fixtures import composed, pairwise, stage_overrides
from fault_counts import only_full

from runner.planning.facts import BatchShape, model_facts
from runner.planning.memory import Execution, layer_memory

pytestmark = pytest.mark.slow  # the process that pretends to have GPUs takes seven seconds to start
STAGES, PRECISIONS, PACKINGS = ("pretrain", "sft", "lora", "dpo"), ("fp32", "bf16", "fp16"), ("none", "best_fit")
LAYERS = "model.num_hidden_layers"
ONE_STEP = [f"{LAYERS}=1", "train.max_steps=1"]
PACKED = "data.packing=best_fit"
EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32"]
WAITS = ["_local_scalar_dense"]  # for a number
# as documented: fp16 for the norm in each step, experts for their numbers of tokens
FIRST_VARIANTS = {
    "muon": (["pretrain", PACKED, "precision.name=bf16", "optimizer=muon"], []),
    "selective": (["pretrain", PACKED, "train.activation_checkpointing=selective"], []),  # precision=auto
    "efficient": (["pretrain", "precision.name=bf16", "model.attention=efficient"], []),
    "experts": (["pretrain", PACKED, "precision.name=bf16", *EXPERTS], [*WAITS, "bincount"]),
}
OTHER_VARIANTS = {
    "accumulation": (["pretrain", "precision.name=bf16", "train.accumulation_steps=2", "train.batch_size=2"], []),
    "full": (["sft", "precision.name=bf16", "train.activation_checkpointing=full"], []),
    "flash": (["pretrain", "precision.name=bf16", "model.attention=flash"], []),
    "dropout": (["pretrain", PACKED, "model.dropout=0.1"], []),
    "lora of dpo": (["dpo_lora", PACKED, "optimizer=muon"], []),
    "experts in fp16": (["sft", "precision.name=fp16", *EXPERTS], [*WAITS, "bincount"]),
}
MINIMIND_64M = ["model.hidden_size=768", "model.num_hidden_layers=8", "model.num_attention_heads=8", "model.num_key_value_heads=4", "model.head_dim=96", "model.intermediate_size=2432"]  # fmt: skip
LAUNCHES = {"muon": 160, "adamw": 30}  # of an update with clipping; Muon without batches has 1,600


def overrides_of(stage, precision, packing):
    return [stage, f"precision.name={precision}", f"data.packing={packing}"]


def expected(waits):
    return {"syncs": list(waits), "devices": ["cuda:0"], "state": ["cuda:0"], "pinned on": [0], "fetched after": [1]}


def facts(result):
    return {name: result[name] for name in expected([])}


PAIRS = pairwise(STAGES, PRECISIONS, PACKINGS)
COMBINATIONS = [
    pytest.param(stage, chosen, id=f"{stage}-{name}", marks=marks)
    for name, is_pair, marks in (("pairs", True, []), ("others", False, [only_full]))
    for stage in STAGES
    if (
        chosen := [
            each
            for each in itertools.product(STAGES, PRECISIONS, PACKINGS)
            if each[0] == stage and (each in PAIRS) == is_pair
        ]
    )
]


@pytest.mark.parametrize(("stage", "combinations"), COMBINATIONS)
def test_step_stays_on_its_gpu_and_waits_in_fp16_only(run_on_gpu, stage, combinations):
    cases = {" ".join(overrides_of(*each)): [*overrides_of(*each), *ONE_STEP] for each in combinations}
    results = run_on_gpu("steps", cases)
    assert {name: facts(result) for name, result in results.items()} == {
        name: expected(WAITS if "precision.name=fp16" in name else []) for name in cases
    }


@pytest.mark.parametrize("variants", [FIRST_VARIANTS, OTHER_VARIANTS], ids=["first", "others"])
def test_step_of_each_variant_stays_on_its_gpu(run_on_gpu, variants):
    results = run_on_gpu("steps", {name: [*overrides, *ONE_STEP] for name, (overrides, _) in variants.items()})
    assert {name: facts(result) for name, result in results.items()} == {
        name: expected(waits) for name, (_, waits) in variants.items()
    }


def test_numbers_are_fetched_at_log_lines_only(run_on_gpu):
    steps = ["train.max_steps=3", "train.log_every=2", "model.num_hidden_layers=1"]
    cases = {precision: ["sft", f"precision.name={precision}", *steps] for precision in ("bf16", "fp16")}
    results = run_on_gpu("steps", cases)
    assert [results[name]["fetched after"] for name in cases] == [[2, 3], [1, 2, 3]]


def test_second_gpu_has_all_tensors_and_pins_batches(run_on_gpu):
    """GPU 0 may be another user's: what names no device must not use it."""
    result = run_on_gpu("steps", {"second": ["pretrain", "device=cuda:1", "precision.name=fp16", *ONE_STEP]})["second"]
    assert [result[name] for name in ("devices", "state", "pinned on")] == [["cuda:1"], ["cuda:1"], [1]]


def test_update_of_minimind_64m_launches_few_kernels(run_on_gpu):
    cases = {optimizer: ["pretrain", *MINIMIND_64M, f"optimizer={optimizer}"] for optimizer in LAUNCHES}
    for optimizer, launches in run_on_gpu("updates", cases).items():
        assert sum(launches.values()) <= LAUNCHES[optimizer], (optimizer, launches)


def test_statements_that_wait_for_a_gpu_are_seen(run_on_gpu):
    """What the other tests look for would be found."""
    seen = {
        "x.sum().item()": "_local_scalar_dense",
        "x.tolist()": "_local_scalar_dense",
        "bool(x.isfinite().all())": "_local_scalar_dense",
        "x.cpu()": "copy from cuda to cpu",
        "torch.tensor([1.0, 2.0], device='cuda')": "copy from cpu to cuda",
        "x.copy_(torch.zeros(3))": "copy from cpu to cuda",
        "x.nonzero()": "nonzero",
        "x[x > 1]": "index",
        "torch.zeros(3).to('cuda', non_blocking=True)": "",
        "torch.where(x > 1, x, 0.0).sum()": "",
    }
    assert run_on_gpu("syncs_of_statements", {"": list(seen)})[""] == list(seen.values())


def test_run_on_a_gpu_repeats_its_bits_unless_told_otherwise(run_on_gpu):
    cases = {"default": ["pretrain"], "off": ["pretrain", "train.deterministic=false"]}
    assert run_on_gpu("is_deterministic", cases) == {"default": True, "off": False}


def test_packed_batches_of_a_gpu_have_one_shape(run_on_gpu):
    """The last one of an epoch, too: a compiled program for one shape is faster than one for all."""
    packed, compiled = overrides_of("pretrain", "bf16", "best_fit"), "train.compile=default"
    cases = {
        "compiled": [*packed, compiled],
        "uncompiled": packed,
        "experts": [*packed, compiled, *EXPERTS],
        "rows": [*overrides_of("pretrain", "bf16", "none"), compiled],
    }
    shapes = run_on_gpu("shapes_of_batches", {name: [*case, "train.batch_size=5"] for name, case in cases.items()})
    assert shapes.pop("compiled") == [[5, 64]] and all(len(each) > 1 for each in shapes.values())


def test_mask_is_made_once_for_all_layers(run_on_gpu):
    """Each layer would save one for its backward pass: 8 GiB for eight of them and one row of 16,000 tokens in fp32."""
    saved = run_on_gpu(
        "saved_bytes",
        {
            f"{packing} {layers}": [*overrides_of("pretrain", "fp32", packing), f"{LAYERS}={layers}"]
            for packing, layers in itertools.product(PACKINGS, (1, 2))
        },
    )
    assert saved["best_fit 2"] - saved["none 2"] == saved["best_fit 1"] - saved["none 1"] > 4 * 4 * 64**2


def test_saved_tensors_of_a_layer_are_those_of_the_plan(run_on_gpu):
    """Packed layers share their mask, and keys are repeated for each query head where a kernel has no groups."""
    cases = {
        f"{precision} {packing} {layers}": [*overrides_of("pretrain", precision, packing), f"{LAYERS}={layers}"]
        for precision, packing, layers in itertools.product(("fp32", "bf16"), PACKINGS, (1, 2))
    }
    saved = run_on_gpu("saved_bytes", cases)
    for precision, packing in itertools.product(("fp32", "bf16"), PACKINGS):
        stage, *overrides = overrides_of("pretrain", precision, packing)
        cfg = composed(*stage_overrides(stage), *overrides, "data.path=none")
        shape = BatchShape(4, 64, is_packed=packing != "none")
        planned = layer_memory(cfg, model_facts(cfg), shape, Execution(on_cpu=False)).saved()
        one, two = (saved[f"{precision} {packing} {layers}"] for layers in (1, 2))
        assert planned == pytest.approx(two - one, rel=0.08), (precision, packing)


WIDE = ["model.hidden_size=256", "model.head_dim=64", "model.num_hidden_layers=1", "model.max_position_embeddings=1024"]
SHAPES = {  # (rows, tokens) of packed batches, and the number of programs after all of them
    "rows as long as the model is wide": ([[4, 512], [4, 256], [3, 504], [4, 264]], 1),
    "one row": ([[1, 256], [1, 504], [1, 136]], 1),
    "rows of a block": ([[4, 128], [4, 120], [4, 64]], 1),
    "short rows between long ones": ([[4, 504], [4, 128], [4, 64], [4, 256]], 2),
}


@pytest.mark.slow(long=True)
def test_packed_rows_of_all_lengths_share_a_program(run_on_gpu):
    """Rows without FlexAttention have another; which depends on their length, not on the order of batches."""
    numbers = run_on_gpu(
        "programs", {name: {"overrides": WIDE, "shapes": shapes} for name, (shapes, _) in SHAPES.items()}
    )
    assert {name: each[-1] for name, each in numbers.items()} == {name: each for name, (_, each) in SHAPES.items()}
