"""Generation against transformers, and against itself one row at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import BEST_TWO, YARN, random_model, tokens

from models.config import LoraConfig
from models.decoder import Decoder
from models.generate import Sampler, generate
from models.lora import adapter_state_dict, add_lora, disable_adapters

PROMPTS = [tokens(5).tolist(), tokens(17, seed=2).tolist(), tokens(1, seed=3).tolist()]
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "stop_ids": []}
SAMPLED = GREEDY | {"temperature": 1.0, "top_k": 200, "top_p": 0.95}


def one_by_one(model: Decoder, ids: list[int], count: int) -> list[int]:
    """Greedy without a cache, a batch or padding."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize("changes", [{}, BEST_TWO, YARN], ids=["dense", "moe", "yarn"])
def test_a_batch_of_unequal_prompts_is_each_prompt_by_itself(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    assert generate(model, PROMPTS, **GREEDY) == [one_by_one(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_transformers_greedy_token_for_token(penalty: float) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    

    model = random_model()
    theirs = Qwen3ForCausalLM(Qwen3Config(**model.cfg.to_hf_config())).eval()
    theirs.load_state_dict(model.state_dict())
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if penalty == 1.0:
        expected = theirs.generate(ids, attention_mask=mask, **asked)[:, longest:].tolist()
    else:  # theirs counts padding among the tokens of the row, so each row goes by itself
        expected = [theirs.generate(torch.tensor([p]), repetition_penalty=penalty, **asked)[0, len(p) :].tolist() for p in PROMPTS]
    assert generate(model, PROMPTS, **GREEDY | {"repetition_penalty": penalty}) == expected


def test_a_row_ends_at_its_stop_token_and_does_not_hold_it() -> None:
    model = random_model()
    free = generate(model, PROMPTS, **GREEDY)
    stop = free[1][7]
    stopped = generate(model, PROMPTS, **GREEDY | {"stop_ids": [stop]})
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[1]) <= 7


def test_each_token_is_told_as_it_comes() -> None:
    heard: list[list[int]] = [[] for _ in PROMPTS]
    model = random_model()
    stop = generate(model, PROMPTS, **GREEDY)[0][3]
    answers = generate(model, PROMPTS, **GREEDY | {"stop_ids": [stop]}, on_token=lambda row, token: heard[row].append(token))
    assert heard == answers


def test_sampling_is_a_function_of_its_generator() -> None:
    model = random_model(std=0.02)

    def draw(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, **SAMPLED, generator=torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)], ids=["own", "given"])
def test_the_global_random_state_stays_where_it_was(generator: torch.Generator | None) -> None:
    model = random_model(dropout=0.5)
    before = torch.get_rng_state()
    generate(model.train(), PROMPTS, **SAMPLED, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mode_of_the_model_comes_back_even_if_the_listener_fails() -> None:
    def fail(row: int, token: int) -> None:
        raise KeyboardInterrupt

    model = random_model(dropout=0.5).train()
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, **GREEDY, on_token=fail)
    assert all(module.training for module in model.modules())


def test_generation_works_under_autocast_and_leaves_no_gradient() -> None:
    model = random_model()
    with torch.autocast("cpu", torch.bfloat16):
        answers = generate(model, PROMPTS, **GREEDY)
    assert [len(answer) for answer in answers] == [24, 24, 24]
    assert all(p.grad is None for p in model.parameters())


def test_an_adapter_is_heard_and_can_be_switched_off() -> None:
    model = random_model()
    bare = generate(model, PROMPTS, **GREEDY)
    add_lora(model, LoraConfig(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "down_proj"]))
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.3)
    assert generate(model, PROMPTS, **GREEDY) != bare
    with disable_adapters(model):
        assert generate(model, PROMPTS, **GREEDY) == bare


def test_no_row_outgrows_the_positions_of_the_model() -> None:
    model = random_model(max_position_embeddings=20)
    assert [len(answer) for answer in generate(model, [*PROMPTS, tokens(20).tolist()], **GREEDY)] == [15, 3, 19, 0]
    with pytest.raises(ValueError, match="more than model.max_position_embeddings=20"):
        generate(model, [tokens(21).tolist()], **GREEDY)
    with pytest.raises(ValueError, match="nothing to continue"):
        generate(model, [[]], **GREEDY)
    assert generate(model, [], **GREEDY) == []


def drawn(logits: list[float], draws: int = 400, **settings: Any) -> set[int]:
    sampler = Sampler(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "generator": torch.Generator().manual_seed(0)} | settings)
    rows = torch.tensor([logits]).expand(draws, -1)
    return set(sampler(rows, torch.zeros_like(rows, dtype=torch.bool)).tolist())


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert drawn(logits) == {0, 1, 2, 3}
    assert drawn(logits, top_k=2) == {0, 1}
    assert drawn(logits, top_p=0.6) == {0, 1}
    assert drawn(logits, top_p=0.75) == {0, 1, 2}
    assert drawn(logits, top_p=0.0) == {0}
