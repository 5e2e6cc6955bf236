"""Many ranks walk as one: the same steps, the same losses, the same checkpoints (gloo, on the CPU)."""

import dataclasses
import itertools
import json

import pytest
import safetensors.torch
import torch

from common.errors import Interrupted
from runner.checkpoint.manager import newest_checkpoint
from runner.config.compose import compose_config
from runner.engine.build import resolve_rows_per_step
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

ROWS = 38  # three steps of twelve and one of two: at the end of an epoch some ranks stand by
STEPS = 20
MOE = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32", "model.router_aux_loss_coef=0.01"]
FORMS = {
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


def cut(ranks: int, accumulation: int) -> list[str]:
    """Twelve rows a step, or four, however many ranks there are."""
    return [f"train.batch_size={4 // ranks}", f"train.accumulation_steps={accumulation}", f"train.max_steps={STEPS}"]


@pytest.fixture
def weights():
    return lambda folder: safetensors.torch.load_file(newest_checkpoint(folder) / "model.safetensors")


def compare(one, other, logged, weights, looser=1) -> None:
    lines, others = (logged(folder) for folder in (one, other))
    assert [(line["step"], line["loss_tokens"]) for line in lines] == [(line["step"], line["loss_tokens"]) for line in others]
    assert len(lines) == STEPS
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    apart = max(abs(line["loss"] - its["loss"]) for line, its in zip(lines, others, strict=True))
    moved = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    assert (apart < 2e-5 * looser, moved < 1e-4 * looser) == (True, True), f"{other.name}: losses are {apart:.1e} apart, weights {moved:.1e}"


def check_all(tmp_path, words_of, make_run, on_ranks, logged, weights, forms, sizes, accumulations, kinds) -> None:
    cells = list(itertools.product(forms, accumulations))
    for size in sizes:
        on_ranks(
            size,
            [
                {
                    "folder": str(tmp_path / f"{form} {a} {kind} {size}"),
                    "words": words_of(FORMS[form][0], *FORMS[form][1], *cut(size, a), f"distributed={kind}", rows=ROWS),
                }
                for kind in kinds
                for form, a in cells
            ],
        )
    for form, a in cells:
        stage, words = FORMS[form]
        train(make_run(stage, *words, *cut(1, a), folder=f"{form} {a}", rows=ROWS))
        for size, kind in itertools.product(sizes, kinds):
            looser = 20 if form == "muon" else 1  # it makes its updates orthogonal in bf16: what differs in the last bit of fp32 comes out larger
            compare(tmp_path / f"{form} {a}", tmp_path / f"{form} {a} {kind} {size}", logged, weights, looser)


def test_two_ranks_walk_as_one(tmp_path, words_of, make_run, on_ranks, logged, weights):
    check_all(tmp_path, words_of, make_run, on_ranks, logged, weights, ["packed moe", "dpo_lora"], [2], [3], ["ddp", "fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_two_ranks_and_four_walk_as_one_in_every_stage(tmp_path, words_of, make_run, on_ranks, logged, weights, size):
    check_all(tmp_path, words_of, make_run, on_ranks, logged, weights, list(FORMS), [size], [1, 3] if size == 2 else [1], ["ddp", "fsdp"])


RESTLESS = ["model.dropout=0.1", "train.max_steps=8", "train.batch_size=2", "train.accumulation_steps=2"]


def stopped(folder, words, at) -> list[dict]:
    return [{"folder": str(folder), "words": words, "stop_at": at}, {"folder": str(folder), "words": words, "attempt": 2}]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ["distributed=ddp"]),
        pytest.param(2, ["distributed=fsdp", "precision=bf16"], marks=pytest.mark.slow),
        pytest.param(3, ["distributed=ddp", *MOE], marks=pytest.mark.slow),
        pytest.param(3, ["distributed=fsdp", "data.packing=best_fit"], marks=pytest.mark.slow),
        pytest.param(4, ["distributed=fsdp", "distributed.shard=2", "distributed.replicate=2"], marks=pytest.mark.slow),
        pytest.param(2, ["distributed=ddp", "precision=fp16"], marks=pytest.mark.slow),
        pytest.param(2, ["distributed=fsdp", "precision=fp16"], marks=pytest.mark.slow),
        pytest.param(2, ["distributed=fsdp", "train.activation_checkpointing=true", "optimizer=muon"], marks=pytest.mark.slow),
        pytest.param(2, ["distributed=fsdp", "train.activation_checkpointing=selective", "precision=bf16"], marks=pytest.mark.slow),
    ],
)
def test_stopping_ranks_and_resuming_them_changes_no_bit(tmp_path, words_of, on_ranks, size, words):
    said = words_of("pretrain", *RESTLESS, *words, rows=ROWS)
    halves = [stopped(tmp_path / f"stopped{at}", said, at) for at in (1, 5)]
    on_ranks(size, [{"folder": str(tmp_path / "whole"), "words": said}, *(first for first, _ in halves)])
    on_ranks(size, [second for _, second in halves])
    for at in (1, 5):
        assert diff_run_dirs(tmp_path / "whole", tmp_path / f"stopped{at}") == []


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["ddp", "fsdp"], ["fsdp", "ddp"]])
def test_a_run_that_goes_over_one_two_four_and_one_rank_walks_as_if_it_had_not(tmp_path, words_of, make_run, on_ranks, logged, weights, kinds):
    words = ["train.max_steps=20", "train.batch_size=4", "train.accumulation_steps=2"]
    said = words_of("pretrain", *words, rows=ROWS)
    train(make_run("pretrain", *words, folder="whole", rows=ROWS))
    folder = tmp_path / "chain"
    with pytest.raises(Interrupted):
        train((state := make_run("pretrain", *words, folder="chain", rows=ROWS)), stop=lambda: state.progress.step == 5)
    on_ranks(2, [{"folder": str(folder), "words": [*said, f"distributed={kinds[0]}"], "attempt": 2, "stop_at": 10}])
    on_ranks(4, [{"folder": str(folder), "words": [*said, f"distributed={kinds[1]}"], "attempt": 3, "stop_at": 15}])
    train(make_run("pretrain", *words, folder="chain", rows=ROWS, attempt=4))
    compare(tmp_path / "whole", folder, logged, weights)


def test_a_number_of_rows_that_ranks_cannot_keep_is_refused_with_those_they_could(tmp_path, make_run, monkeypatch):
    words = ["train.max_steps=2", "train.batch_size=4", "train.accumulation_steps=2"]
    train(make_run("pretrain", *words))
    state = make_run("pretrain", *words, attempt=2)
    dist = dataclasses.replace(state.dist, size=2)
    assert resolve_rows_per_step(state.cfg, dist, state.run_dir) == 8  # accumulation becomes 1
    other = dataclasses.replace(state.cfg, train=dataclasses.replace(state.cfg.train, batch_size=3))
    with pytest.raises(ValueError, match="a step of this run has 8 rows") as refusal:
        resolve_rows_per_step(other, dist, state.run_dir)
    assert "two whose product is 4" in refusal.value.args[2]
    with pytest.raises(ValueError, match="leaves ranks without work"):
        resolve_rows_per_step(state.cfg, dataclasses.replace(dist, size=9), state.run_dir)


def test_ranks_that_do_not_stand_at_the_same_place_are_refused(make_run, monkeypatch):
    state = make_run("pretrain")
    monkeypatch.setattr(type(state.dist), "gather", lambda dist, value: [value, ["step 7", *value[1:]]])
    with pytest.raises(ValueError, match="the ranks do not see the same run") as refusal:
        train(state)
    assert refusal.value.args[1] == "rank 1: step 7 (rank 0: step 0)"


@pytest.mark.parametrize(
    "words",
    [
        ["distributed=ddp", "distributed.backend=nccl", "device=cpu"],
        ["distributed=fsdp", "distributed.cpu_offload=true", "device=cpu"],
        ["distributed=fsdp", "distributed.nproc=4", "distributed.shard=3"],
        ["distributed=fsdp", "distributed.nproc=3", "distributed.replicate=2"],
        ["distributed.nproc=2"],
        ["distributed=ddp", "distributed.nproc=0"],
    ],
)
def test_words_that_cannot_go_together_are_refused_before_a_rank_starts(words_of, words):
    with pytest.raises(ValueError) as refusal:
        compose_config(words_of("pretrain", *words))
    assert len(refusal.value.args) == 3


def test_a_checkpoint_is_the_same_files_and_names_however_many_ranks_wrote_it(tmp_path, words_of, make_run, on_ranks, weights):
    train(make_run("sft", "train.max_steps=2", folder="one"))
    said = words_of("sft", "train.max_steps=2", "train.batch_size=2")
    on_ranks(2, [{"folder": str(tmp_path / kind), "words": [*said, f"distributed={kind}"]} for kind in ("ddp", "fsdp")])
    one = newest_checkpoint(tmp_path / "one")
    for kind in ("ddp", "fsdp"):
        its = newest_checkpoint(tmp_path / kind)
        assert sorted(path.name for path in its.iterdir()) == sorted(path.name for path in one.iterdir())
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, theirs = (safetensors.torch.load_file(folder / file) for folder in (one, its))
            assert {name: tensor.shape for name, tensor in mine.items()} == {name: tensor.shape for name, tensor in theirs.items()}
        final = safetensors.torch.load_file(tmp_path / kind / "model" / "model.safetensors")
        assert all(torch.equal(final[name], tensor) for name, tensor in weights(tmp_path / kind).items())


@pytest.mark.slow
def test_ranks_judge_and_sample_as_one(tmp_path, words_of, make_run, on_ranks, logged, weights):
    words = ["train.max_steps=4", "train.eval_every=2", "train.sample_every=2", "train.sample_tokens=4", "data.val_fraction=0.2", "train.sample_prompts=[hello]"]
    train(make_run("pretrain", *words, folder="one"))
    said = words_of("pretrain", *words, "train.batch_size=2")
    cases = {kind: [f"distributed={kind}"] for kind in ("ddp", "fsdp")}
    cases |= {f"fsdp {name}": ["distributed=fsdp", f"precision={name}", "distributed.reshard_after_forward=false"] for name in ("bf16", "fp16")}
    on_ranks(2, [{"folder": str(tmp_path / case), "words": [*said, *more]} for case, more in cases.items()])
    for case in cases:
        for line, its in zip(logged(tmp_path / "one", "eval"), logged(tmp_path / case, "eval"), strict=True):
            assert line["loss"] == pytest.approx(its["loss"], abs=2e-5 if case in ("ddp", "fsdp") else 1e-2)
        assert len((tmp_path / case / "samples.jsonl").read_text().splitlines()) == 2
        # Saved right after an evaluation, whose forward pass leaves the weights gathered, and rounded.
        assert {tensor.dtype for tensor in weights(tmp_path / case).values()} == {torch.float32}
        assert any((tensor != tensor.bfloat16()).any() for tensor in weights(tmp_path / case).values())


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [True, False], ids=["gradients too", "only the loss"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path, words_of, on_ranks, logged, gradient):
    said = words_of("pretrain", "train.max_steps=6", "train.batch_size=2", rows=ROWS)
    poison = {"rank": 1, "step": 3, "gradient": gradient}
    cases = {f"{kind} {every}": [f"distributed={kind}", f"train.log_every={every}"] for kind in ("ddp", "fsdp") for every in (1, 4)}
    on_ranks(2, [{"folder": str(tmp_path / case), "words": [*said, *words], "poison": poison} for case, words in cases.items()])
    for kind in ("ddp", "fsdp"):
        often, seldom = (tmp_path / f"{kind} {every}" for every in (1, 4))
        lines = logged(often)
        assert [line["loss"] is None for line in lines] == [False, False, False, True, False, False]
        assert [line["loss"] for line in logged(seldom)] == [lines[3]["loss"], lines[5]["loss"]]
        assert lines[-1]["skipped_steps"] == 1
        found = json.loads((often / "diagnosis.json").read_text())
        assert (found["step"], len(found["rows"])) == (4, 4)
        assert found == json.loads((seldom / "diagnosis.json").read_text())
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (newest_checkpoint(often) / file).read_bytes() == (newest_checkpoint(seldom) / file).read_bytes()
