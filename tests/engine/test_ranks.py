"""Many ranks walk as one: the same steps, the same losses, the same checkpoints (gloo, on the CPU)."""

import itertools

import pytest
import safetensors.torch

from runner.engine.checkpoint import newest_of
from runner.engine.loop import train

ROWS = 38  # three steps of twelve and one of two: at the end of an epoch some ranks stand by
STEPS = 20
MOE = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32", "model.router_aux_loss_coef=0.01"]
FORMS = {
    "pretrain": ("pretrain", []),
    "packed": ("pretrain", ["data.packing=pack"]),
    "moe": ("pretrain", MOE),
    "packed moe": ("pretrain", ["data.packing=pack", *MOE]),
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
    return lambda folder: safetensors.torch.load_file(newest_of(folder) / "model.safetensors")


def compare(one, other, logged, weights) -> None:
    lines, others = (logged(folder) for folder in (one, other))
    assert [(line["step"], line["tokens"]) for line in lines] == [(line["step"], line["tokens"]) for line in others]
    assert len(lines) == STEPS
    for line, its in zip(lines, others, strict=True):
        assert line["loss"] == pytest.approx(its["loss"], abs=2e-5)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-4


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
            compare(tmp_path / f"{form} {a}", tmp_path / f"{form} {a} {kind} {size}", logged, weights)


def test_two_ranks_walk_as_one(tmp_path, words_of, make_run, on_ranks, logged, weights):
    check_all(tmp_path, words_of, make_run, on_ranks, logged, weights, ["packed moe", "dpo_lora"], [2], [3], ["ddp", "fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_two_ranks_and_four_walk_as_one_in_every_stage(tmp_path, words_of, make_run, on_ranks, logged, weights, size):
    check_all(tmp_path, words_of, make_run, on_ranks, logged, weights, list(FORMS), [size], [1, 3], ["ddp", "fsdp"])
