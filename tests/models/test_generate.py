"""Generation against transformers, and against generation of one row without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import TOP_TWO, YARN, lora_config, random_model, tokens

from common.errors import UserError
from models.decoder import Decoder
from models.generate import Row, Sampler, generate, generate_rows
from models.lora import adapter_state_dict, add_lora, disable_adapters

PROMPTS = [tokens(5).tolist(), tokens(17, seed=2).tolist(), tokens(1, seed=3).tolist()]
GREEDY: dict[str, Any] = {
    "max_new_tokens": 24,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "stop_ids": [],
}
SAMPLED = GREEDY | {"temperature": 1.0, "top_k": 200, "top_p": 0.95}


def one_by_one(model: Decoder, ids: list[int], count: int) -> list[int]:
    """Generate greedily without a cache, a batch or padding."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(changes, marks=pytest.mark.slow) for changes in (TOP_TWO, YARN))],
    ids=["dense", "moe", "yarn"],
)
def test_generate_in_a_batch_equals_each_prompt_alone(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    assert generate(model, PROMPTS, **GREEDY) == [one_by_one(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_generate_greedy_equals_transformers(penalty: float) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = random_model()
    reference = Qwen3ForCausalLM(Qwen3Config(**model.cfg.to_hf_config())).eval()
    reference.load_state_dict(model.state_dict())
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if penalty == 1.0:
        expected = reference.generate(ids, attention_mask=mask, **settings)[:, longest:].tolist()
    else:  # transformers penalizes padding tokens, too: generate each row alone
        expected = [
            reference.generate(torch.tensor([p]), repetition_penalty=penalty, **settings)[0, len(p) :].tolist()
            for p in PROMPTS
        ]
    assert generate(model, PROMPTS, **GREEDY | {"repetition_penalty": penalty}) == expected


def test_generate_ends_a_row_before_its_stop_token() -> None:
    model = random_model()
    free = generate(model, PROMPTS, **GREEDY)
    stop = free[1][7]
    stopped = generate(model, PROMPTS, **GREEDY | {"stop_ids": [stop]})
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[1]) <= 7


def generate_greedily(model: Decoder, stop_ids: list[int], **options: Any) -> tuple[list[Row], list[list[int]], dict]:
    """Return the rows of PROMPTS, the tokens reported for each, and how many it had at its end, with its stop token."""
    reported: list[list[int]] = [[] for _ in PROMPTS]
    ends: dict[int, tuple[int, int | None]] = {}

    class ReportingRow(Row):
        def is_complete(self) -> bool:
            reported[rows.index(self)].append(self.ids[-1])
            return super().is_complete()

        def end(self, stop_token: int | None = None) -> None:
            super().end(stop_token)
            ends[rows.index(self)] = (len(reported[rows.index(self)]), stop_token)

    rows: list[Row] = [ReportingRow(prompt, 24, Sampler(0.0, 0, 1.0, 1.0), stop_ids) for prompt in PROMPTS]
    generate_rows(model, rows, **options)
    return rows, reported, ends


def test_generate_asks_each_row_once_for_each_token() -> None:
    model = random_model()
    stop = generate(model, PROMPTS, **GREEDY)[0][3]
    rows, reported, _ = generate_greedily(model, [stop])
    assert reported == [row.ids for row in rows] == generate(model, PROMPTS, **GREEDY | {"stop_ids": [stop]})


@pytest.mark.slow
def test_generate_sampling_is_a_function_of_its_generator() -> None:
    model = random_model(std=0.02)

    def draw(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, **SAMPLED, generator=torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)], ids=["own", "given"])
def test_generate_does_not_change_the_global_random_state(generator: torch.Generator | None) -> None:
    model = random_model(dropout=0.5)
    before = torch.get_rng_state()
    generate(model.train(), PROMPTS, **SAMPLED, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_generate_restores_training_mode_after_an_exception() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    model = random_model(dropout=0.5).train()
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, **GREEDY, before_token=fail)
    assert all(module.training for module in model.modules())


def test_generate_under_autocast_leaves_no_gradient() -> None:
    model = random_model()
    with torch.autocast("cpu", torch.bfloat16):
        answers = generate(model, PROMPTS, **GREEDY)
    assert [len(answer) for answer in answers] == [24, 24, 24]
    assert all(p.grad is None for p in model.parameters())


def test_generate_uses_the_active_adapter() -> None:
    model = random_model()
    base = generate(model, PROMPTS, **GREEDY)
    add_lora(model, lora_config(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "down_proj"]))
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.3)
    assert generate(model, PROMPTS, **GREEDY) != base
    with disable_adapters(model):
        assert generate(model, PROMPTS, **GREEDY) == base


def test_generate_stops_at_max_position_embeddings() -> None:
    model = random_model(max_position_embeddings=20)
    assert [len(answer) for answer in generate(model, [*PROMPTS, tokens(20).tolist()], **GREEDY)] == [15, 3, 19, 0]
    with pytest.raises(UserError, match="model.max_position_embeddings=20 allows fewer"):
        generate(model, [tokens(21).tolist()], **GREEDY)
    with pytest.raises(UserError, match="the prompt is empty"):
        generate(model, [[]], **GREEDY)
    assert generate(model, [], **GREEDY) == []


def draw_tokens(logits: list[float], draws: int = 400, **settings: Any) -> set[int]:
    sampler = Sampler(
        **{
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "penalty": 1.0,
            "generator": torch.Generator().manual_seed(0),
        }
        | settings
    )
    rows = torch.tensor([logits]).expand(draws, -1)
    return set(sampler(rows, []).tolist())


def test_sampler_draws_only_tokens_of_top_k_and_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert draw_tokens(logits) == {0, 1, 2, 3}
    assert draw_tokens(logits, top_k=2) == {0, 1}
    assert draw_tokens(logits, top_p=0.6) == {0, 1}
    assert draw_tokens(logits, top_p=0.75) == {0, 1, 2}
    assert draw_tokens(logits, top_p=0.0) == {0}


def test_sampler_applies_the_temperature_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()  # at temperature 0.5: 0.53, 0.3, 0.13, 0.03
    assert draw_tokens(logits, top_p=0.75, temperature=0.5) == {0, 1}
    assert draw_tokens(logits, top_p=0.85, temperature=2.0) == {0, 1, 2, 3}  # 0.33, 0.28, 0.23, 0.16


def test_sampler_is_greedy_where_a_temperature_would_overflow() -> None:
    assert draw_tokens([1.0, 20.0, 3.0], temperature=1e-40) == {1}


def test_sampler_repetition_penalty_makes_negative_logits_less_likely() -> None:
    sampler = Sampler(0.0, 0, 1.0, 1.3)
    rows = [Row([0], 1, sampler, ()) for _ in range(2)]
    assert sampler(torch.tensor([[-1.0, -1.1], [1.0, 0.9]]), rows).tolist() == [1, 1]


def test_generate_samples_rows_with_their_own_generators_as_alone() -> None:
    model = random_model()
    samplers = [Sampler(1.0, 200, 0.95, 1.0, torch.Generator().manual_seed(seed)) for seed in range(len(PROMPTS))]
    rows = [Row(prompt, 24, sampler, ()) for prompt, sampler in zip(PROMPTS, samplers, strict=True)]
    generate_rows(model, rows)
    assert [row.ids for row in rows] == [
        generate(model, [prompt], **SAMPLED, generator=torch.Generator().manual_seed(seed))[0]
        for seed, prompt in enumerate(PROMPTS)
    ]


def test_generate_goes_row_by_row_where_batches_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    expected = generate(model, PROMPTS, **GREEDY)
    sizes = []
    monkeypatch.setattr(Decoder, "generates_in_batches", lambda self, max_length: False)
    new_cache = Decoder.new_cache
    monkeypatch.setattr(
        Decoder, "new_cache", lambda self, rows, *rest: (sizes.append(rows), new_cache(self, rows, *rest))[1]
    )

    assert generate(model, PROMPTS, **GREEDY) == expected
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("is_together", [True, False])
def test_generate_reports_the_end_of_each_row(monkeypatch: pytest.MonkeyPatch, is_together: bool) -> None:
    model = random_model()
    stop = generate(model, PROMPTS, **GREEDY)[1][3]
    expected = [
        (len(answer), stop if len(answer) < 24 else None)
        for answer in generate(model, PROMPTS, **GREEDY | {"stop_ids": [stop]})
    ]
    monkeypatch.setattr(Decoder, "generates_in_batches", lambda self, max_length: is_together)
    _, _, ends = generate_greedily(model, [stop])
    assert [ends[row] for row in range(len(PROMPTS))] == expected and len(set(expected)) > 1


def joining(model: Decoder, steps: dict[int, list[Row]], first: list[Row]) -> list[int]:
    """Generate `first`, and the rows of `steps`, which join after that number of forward passes.

    Return the rows that were running at each token.
    """
    counts: list[int] = []

    def join(count: int) -> list[Row]:
        counts.append(count)
        return steps.pop(len(counts), [])

    generate_rows(model, first, join=join)
    assert not steps
    return counts


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(changes, marks=pytest.mark.slow) for changes in (TOP_TWO, YARN))],
    ids=["dense", "moe", "yarn"],
)
def test_generate_rows_that_join_a_batch_get_the_tokens_that_they_get_alone(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    # a longer and shorter prompts; one joins when another has ended, one ends at its first token
    settings = [(5, 24), (9, 3), (40, 20), (1, 1), (3, 12)]
    rows = [
        Row(tokens(length, seed=i).tolist(), limit, Sampler(0.0, 0, 1.0, 1.0), ())
        for i, (length, limit) in enumerate(settings)
    ]
    counts = joining(model, {2: [rows[2]], 8: rows[3:]}, rows[:2])
    assert [row.ids for row in rows] == [
        one_by_one(model, row.prompt, limit) for row, (_, limit) in zip(rows, settings, strict=True)
    ]
    assert counts[:4] == [2, 2, 3, 2] and counts[8] == 3, "rows of a batch, without those that have ended"


@pytest.mark.slow
def test_generate_rows_that_join_keep_their_samples_and_penalties() -> None:
    model = random_model(std=0.02)

    def row(seed: int) -> Row:
        sampler = Sampler(1.0, 200 * (seed == 1), 0.95, 1.0 + seed / 10, torch.Generator().manual_seed(seed))
        return Row(PROMPTS[seed], 20, sampler, ())

    alone = [row(seed) for seed in range(3)]
    for each in alone:
        generate_rows(model, [each])
    together = [row(seed) for seed in range(3)]
    joining(model, {1: [together[0]], 5: [together[2]]}, [together[1]])
    assert [each.ids for each in together] == [each.ids for each in alone]
