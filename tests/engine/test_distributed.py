"""Several ranks train as one process does: the same steps, losses and checkpoints (gloo, on the CPU)."""

import dataclasses
import itertools
import json

import pytest
import safetensors.torch
import torch
from fault_counts import IS_FULL

from common.errors import Interrupted
from runner.checkpoint.manager import newest_checkpoint
from runner.config.compose import compose_config
from runner.engine.build import resolve_rows_per_step
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

ROWS = 38  # three steps of twelve rows and one of two: at the end of an epoch some ranks have dummy batches
EPOCH_ROWS, STEPS = 14, 4  # a step of twelve and one of two, twice; or three of four and one of two
MOE = [
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
    "model.router_aux_loss_coef=0.01",
]
CONFIGURATIONS = {
    "pretrain": ("pretrain", []),
    "packed": ("pretrain", ["data.packing=best_fit"]),
    "moe": ("pretrain", MOE),
    "packed moe": ("pretrain", ["data.packing=best_fit", *MOE]),
    "sft": ("sft", []),
    "lora": ("lora", []),
    "dpo": ("dpo", []),
    "dpo_lora": ("dpo_lora", []),
    "muon": ("pretrain", ["optimizer=muon"]),
}


def split(ranks: int, accumulation_steps: int) -> list[str]:
    """Return overrides for 4 * accumulation_steps rows per step."""
    return [
        f"train.batch_size={4 // ranks}",
        f"train.accumulation_steps={accumulation_steps}",
        f"train.max_steps={STEPS}",
    ]


def saved_weights(run_dir):
    return safetensors.torch.load_file(newest_checkpoint(run_dir) / "model.safetensors")


def assert_close(one, other, logged, tolerance=1.0):
    records, others = logged(one), logged(other)
    assert [(record["step"], record["loss_tokens"]) for record in records] == [
        (record["step"], record["loss_tokens"]) for record in others
    ]
    assert len(records) == STEPS
    weights, other_weights = saved_weights(one), saved_weights(other)
    assert weights.keys() == other_weights.keys()
    losses = max(abs(record["loss"] - other["loss"]) for record, other in zip(records, others, strict=True))
    largest = max((weights[name] - other_weights[name]).abs().max().item() for name in weights)
    assert losses < 2e-5 * tolerance and largest < 1e-4 * tolerance, (
        f"{other.name}: losses differ by {losses:.1e}, weights by {largest:.1e}"
    )


@pytest.fixture
def assert_ranks_equal_one_process(tmp_path, overrides_for, make_run, run_ranks, logged):
    def check(size, cells):
        """`cells`: (configuration, strategy, accumulation steps)."""
        trainings = []
        for name, strategy, steps in cells:
            stage, overrides = CONFIGURATIONS[name]
            overrides = overrides_for(
                stage, *overrides, *split(size, steps), f"distributed={strategy}", rows=EPOCH_ROWS
            )
            trainings.append({"folder": str(tmp_path / f"{name} {steps} {strategy}"), "overrides": overrides})
        run_ranks(size, trainings)
        for name, steps in {(name, steps) for name, _, steps in cells}:
            stage, overrides = CONFIGURATIONS[name]
            train(make_run(stage, *overrides, *split(1, steps), folder=f"{name} {steps}", rows=EPOCH_ROWS))
        for name, strategy, steps in cells:
            tolerance = 20 if name == "muon" else 1  # Muon orthogonalizes in bf16, which amplifies rounding differences
            assert_close(tmp_path / f"{name} {steps}", tmp_path / f"{name} {steps} {strategy}", logged, tolerance)

    return check


def cells_of(accumulations, every):
    """One in `every` combinations (all: FAULT_TESTS=full); in half of them every pair of configuration, strategy and
    accumulation occurs.
    """
    numbered = itertools.product(enumerate(CONFIGURATIONS), enumerate(["ddp", "fsdp"]), enumerate(accumulations))
    return [
        (name, strategy, steps)
        for (i, name), (j, strategy), (k, steps) in numbered
        if IS_FULL or (i + j + k) % every == 0
    ]


@pytest.mark.slow(long=True)
@pytest.mark.parametrize("size, accumulations, every", [(2, [1, 3], 2), (4, [1], 8)], ids=["2", "4"])
def test_ranks_train_as_one_process_in_every_configuration(assert_ranks_equal_one_process, size, accumulations, every):
    assert_ranks_equal_one_process(size, cells_of(accumulations, every))


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, overrides",
    [
        (2, ["distributed=ddp"]),
        (2, ["distributed=fsdp", "precision=bf16", "stage.z_loss=1e-3", "train.ema_decay=0.9"]),
        (3, ["distributed=ddp", *MOE]),
        (3, ["distributed=fsdp", "data.packing=best_fit"]),
        (4, ["distributed=fsdp", "distributed.shard=2", "distributed.replicate=2"]),
        (2, ["distributed=ddp", "precision=fp16"]),
        (2, ["distributed=fsdp", "precision=fp16"]),
        (2, ["distributed=fsdp", "train.activation_checkpointing=full", "optimizer=muon"]),
        (2, ["distributed=fsdp", "train.activation_checkpointing=selective", "precision=bf16"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_ranks_resume_is_bitwise_equal(tmp_path, overrides_for, run_ranks, size, overrides):
    shared = ["model.dropout=0.1", "train.max_steps=8", "train.batch_size=2", "train.accumulation_steps=2"]
    overrides = overrides_for("pretrain", *shared, *overrides, rows=ROWS)
    whole, stopped = ({"folder": str(tmp_path / name), "overrides": overrides} for name in ("whole", "stopped"))
    run_ranks(size, [whole, stopped | {"stop_at": 1}])
    run_ranks(size, [stopped | {"attempt": 2, "stop_at": 5}, stopped | {"attempt": 3}])
    assert diff_run_dirs(tmp_path / "whole", tmp_path / "stopped") == []


# relative difference to one rank; Muon orthogonalizes in bf16, which amplifies rounding differences
ELASTIC_BOUNDS = {"adamw": 1e-5, "muon": 1e-3}


def relative_difference(one, other, logged):
    """Return the largest relative difference of a loss, and that of all weights as one vector."""
    pairs = zip(logged(one), logged(other), strict=True)
    losses = max(abs(record["loss"] - other["loss"]) / other["loss"] for record, other in pairs)
    first, second = (
        torch.cat([tensor.flatten() for _, tensor in sorted(saved_weights(run).items())]).double()
        for run in (one, other)
    )
    return losses, ((first - second).norm() / second.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [["ddp", "fsdp"], ["fsdp", "ddp"]], ids=["ddp-fsdp", "fsdp-ddp"])
def test_ranks_may_change_in_number_on_resume(tmp_path, overrides_for, make_run, run_ranks, logged, strategies):
    """1 rank to step 2, 2 ranks to step 4, 4 ranks to step 6, 1 rank to step 8: compared with 1 rank throughout."""
    split = ["train.max_steps=8", "train.batch_size=4", "train.accumulation_steps=2"]
    settings = {name: [*split, f"optimizer={name}"] for name in ELASTIC_BOUNDS}
    for name, overrides in settings.items():
        train(make_run("pretrain", *overrides, folder=f"{name} on one rank", rows=ROWS))
        with pytest.raises(Interrupted):
            state = make_run("pretrain", *overrides, folder=name, rows=ROWS)
            train(state, stop_requested=lambda state=state: state.progress.step == 2)
    for attempt, (ranks, strategy) in enumerate(zip((2, 4), strategies, strict=True), start=2):
        trainings = [
            {"folder": str(tmp_path / name), "overrides": [*overrides_for("pretrain", *overrides, rows=ROWS), f"distributed={strategy}"], "attempt": attempt, "stop_at": 2 * attempt}
            for name, overrides in settings.items()
        ]  # fmt: skip
        run_ranks(ranks, trainings)
    for name, overrides in settings.items():
        train(make_run("pretrain", *overrides, folder=name, rows=ROWS, attempt=4))
        losses, weights = relative_difference(tmp_path / f"{name} on one rank", tmp_path / name, logged)
        print(
            f"{name} on 1, 2, 4 and 1 ranks ({'-'.join(strategies)}): relative difference of losses {losses:.1e}, of weights {weights:.1e}"
        )
        assert max(losses, weights) < ELASTIC_BOUNDS[name]


def test_rows_per_step_are_kept_on_another_number_of_ranks():
    config = compose_config(["train.batch_size=4", "train.accumulation_steps=2"])
    saved = {"rows_per_step": 8, "train.batch_size": 4, "train.accumulation_steps": 2}
    assert resolve_rows_per_step(config, 2, saved) == 8  # accumulation becomes 1
    with pytest.raises(ValueError, match="cannot resume: the run has 8 rows per step") as error:
        resolve_rows_per_step(
            dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=3)), 2, saved
        )
    assert "two whose product is 4" in error.value.args[2]
    with pytest.raises(ValueError, match="8 rows per step are fewer than 9 ranks"):
        resolve_rows_per_step(config, 9, saved)


def test_ranks_that_see_different_runs_are_refused(make_run, monkeypatch):
    state = make_run("pretrain")
    monkeypatch.setattr(type(state.dist), "gather", lambda dist, value: [value, ["step 7", *value[1:]]])
    with pytest.raises(ValueError, match="the ranks see different runs") as error:
        train(state)
    assert error.value.args[1] == "rank 1: step 7 (rank 0: step 0)"


@pytest.mark.parametrize(
    "overrides, setting",
    [
        (["distributed=ddp", "distributed.backend=nccl", "device=cpu"], "distributed.backend=nccl"),
        (["distributed=fsdp", "distributed.cpu_offload=true", "device=cpu"], "distributed.cpu_offload=true"),
        (
            ["distributed=fsdp", "distributed.nproc=4", "distributed.shard=3"],
            "distributed.shard=3 distributed.replicate=1",
        ),
        (
            ["distributed=fsdp", "distributed.nproc=3", "distributed.replicate=2"],
            "distributed.shard=0 distributed.replicate=2",
        ),
        (["distributed.nproc=2"], "distributed.nproc=2 distributed.nnodes=1"),
        (["distributed=ddp", "distributed.nproc=0"], "distributed.nproc=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_distributed_settings_that_do_not_fit_are_refused(overrides, setting):
    with pytest.raises(ValueError) as error:
        compose_config(overrides)
    assert error.value.args[1] == setting


@pytest.mark.slow
def test_ranks_write_the_same_checkpoint_files_as_one_process(tmp_path, overrides_for, make_run, run_ranks):
    train(make_run("sft", "train.max_steps=2", folder="one"))
    overrides = overrides_for("sft", "train.max_steps=2", "train.batch_size=2")
    run_ranks(
        2,
        [
            {"folder": str(tmp_path / strategy), "overrides": [*overrides, f"distributed={strategy}"]}
            for strategy in ("ddp", "fsdp")
        ],
    )
    one = newest_checkpoint(tmp_path / "one")
    for strategy in ("ddp", "fsdp"):
        other = newest_checkpoint(tmp_path / strategy)
        assert sorted(path.name for path in other.iterdir()) == sorted(path.name for path in one.iterdir())
        for file in ("model.safetensors", "optimizer.safetensors"):
            shapes, other_shapes = (
                {name: t.shape for name, t in safetensors.torch.load_file(folder / file).items()}
                for folder in (one, other)
            )
            assert shapes == other_shapes
        exported = safetensors.torch.load_file(tmp_path / strategy / "model" / "model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in saved_weights(tmp_path / strategy).items())


@pytest.mark.slow
def test_ranks_evaluate_and_sample_as_one_process(tmp_path, overrides_for, make_run, run_ranks, logged):
    shared = [
        "train.max_steps=4",
        "train.eval_every=2",
        "train.sample_every=2",
        "train.sample_tokens=4",
        "data.val_fraction=0.2",
        "train.sample_prompts=[hello]",
    ]
    train(make_run("pretrain", *shared, folder="one"))
    overrides = overrides_for("pretrain", *shared, "train.batch_size=2")
    cases = {strategy: [f"distributed={strategy}"] for strategy in ("ddp", "fsdp")}
    cases |= {
        f"fsdp {name}": ["distributed=fsdp", f"precision={name}", "distributed.reshard_after_forward=false"]
        for name in ("bf16", "fp16")
    }
    run_ranks(2, [{"folder": str(tmp_path / case), "overrides": [*overrides, *more]} for case, more in cases.items()])
    for case in cases:
        for record, other in zip(logged(tmp_path / "one", "eval"), logged(tmp_path / case, "eval"), strict=True):
            assert record["loss"] == pytest.approx(other["loss"], abs=2e-5 if case in ("ddp", "fsdp") else 1e-2)
        assert len((tmp_path / case / "samples.jsonl").read_text().splitlines()) == 2
        # Saved right after an evaluation, whose forward pass leaves the weights gathered and rounded.
        weights = saved_weights(tmp_path / case).values()
        assert {tensor.dtype for tensor in weights} == {torch.float32} and any(
            (tensor != tensor.bfloat16()).any() for tensor in weights
        )


@pytest.mark.slow
@pytest.mark.parametrize("with_gradients", [True, False], ids=["gradients-too", "loss-only"])
def test_ranks_all_skip_a_step_that_is_nonfinite_on_one(tmp_path, overrides_for, run_ranks, logged, with_gradients):
    overrides = overrides_for("pretrain", "train.max_steps=6", "train.batch_size=2", rows=ROWS)
    fault = {"rank": 1, "step": 3, "with_gradients": with_gradients}
    cases = {
        f"{strategy} {every}": [f"distributed={strategy}", f"train.log_every={every}"]
        for strategy in ("ddp", "fsdp")
        for every in (1, 4)
    }
    run_ranks(
        2,
        [
            {"folder": str(tmp_path / case), "overrides": [*overrides, *more], "nonfinite": fault}
            for case, more in cases.items()
        ],
    )
    for strategy in ("ddp", "fsdp"):
        often, seldom = (tmp_path / f"{strategy} {every}" for every in (1, 4))
        records = logged(often)
        assert [record["loss"] is None for record in records] == [False, False, False, True, False, False]
        assert [record["loss"] for record in logged(seldom)] == [records[3]["loss"], records[5]["loss"]]
        assert records[-1]["skipped_steps"] == 1
        diagnosis = json.loads((often / "diagnosis.json").read_text())
        assert (diagnosis["step"], len(diagnosis["rows"])) == (4, 2)  # the rows of the rank whose loss is not finite
        assert diagnosis == json.loads((seldom / "diagnosis.json").read_text())
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (newest_checkpoint(often) / file).read_bytes() == (newest_checkpoint(seldom) / file).read_bytes()
