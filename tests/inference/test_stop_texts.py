"""Generation up to a stop text gives what cutting the whole answer gives, with fewer steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data.tokenize.tokenizer import EOS, Tokenizer
from models.generate import Row, Sampler
from runner.inference.generation import Answer, compute_batch
from runner.inference.load import LoadedModel, load_trained

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


def greedy_answer(prompt: list[int], limit: int, tokenizer: Tokenizer, stops: Sequence[str]) -> Answer:
    sampler = Sampler(temperature=0, top_k=0, top_p=1, penalty=1)
    return Answer(prompt=prompt, limit=limit, sampler=sampler, stop_ids=(), tokenizer=tokenizer, stops=(*stops,))


def until(trained: LoadedModel, prompts: list[list[int]], *stops: str, tokens: int = 40) -> tuple[list[str], int]:
    """Return the answers up to a stop text, and the number of forward passes."""
    steps: list[None] = []
    answers = [greedy_answer(prompt, tokens, trained.tokenizer, stops) for prompt in prompts]
    compute_batch(trained, answers, len(answers), lambda: steps.append(None))
    return [answer.text for answer in answers], len(steps)


def test_answers_until_stop_texts_are_those_of_whole_answers_in_fewer_steps(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    trained = load_trained(write_model(tmp_path / "model", seed=3, std=0.3), "cpu")
    prompts = [trained.tokenizer.encode(text) for text in ("Where does Ludo live?", "8 + 7?", "def f(x):")]
    whole, steps = until(trained, prompts)
    assert steps == 40 and all(len(text) > 12 for text in whole)
    stops = (whole[0][7:10], whole[1][3:5], whole[2][5])
    cut, steps = until(trained, prompts, *stops)
    assert cut == [min((text.split(stop)[0] for stop in stops), key=len) for text in whole]
    assert steps < 40


def test_stop_texts_may_be_control_tokens_or_several_tokens(
    write_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_trained(write_model(tmp_path / "model", seed=3, std=0.3), "cpu")
    begin, rest = trained.tokenizer.encode("It is late"), trained.tokenizer.encode(" now, and dark")
    tokens = [*begin, trained.tokenizer.eos_id, *rest]

    def fake_generate(model: object, rows: list[Row], before_token: Callable[[], None], *_: object) -> None:
        for token in tokens:
            before_token()
            rows[0].add(token)
            if rows[0].has_ended:
                return
        rows[0].end()

    monkeypatch.setattr("runner.inference.generation.generate_rows", fake_generate)
    assert len(begin) >= 3 and len(rest) >= 3
    assert until(trained, [[1]]) == (["It is late now, and dark"], len(tokens))
    assert until(trained, [[1]], EOS) == (["It is late"], len(begin) + 1)
    assert until(trained, [[1]], f"late{EOS}") == (["It is late"], len(begin) + 1)
    assert until(trained, [[1]], " is late") == (["It"], len(begin))


class CountedText(str):
    """Counts its slices: the beginnings that are compared with the end of a text."""

    slices = 0

    def __getitem__(self, index: object) -> str:
        CountedText.slices += 1
        return super().__getitem__(index)  # type: ignore[index]  # an int or a slice, declared as object


@pytest.mark.slow
def test_stop_texts_hold_back_every_beginning_with_few_comparisons() -> None:
    """64 stop texts of 1,000 characters took 25 ms a token: every beginning of each was compared again."""
    draw, tokenizer = random.Random(0), Tokenizer.load(TOKENIZER)
    for trial in range(200):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(3)]
        text, sent = "", ""
        answer = greedy_answer([], 1, tokenizer, stops)
        while answer.finish_reason is None and len(text) < 40:
            new = "".join(draw.choices("ab", k=draw.randint(1, 3)))
            text += new
            answer.add_text(new)
            sent = answer.text[: answer._sent]
            if answer.finish_reason is None:
                held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
                assert sent == text[: len(text) - held], (trial, stops, text)
        assert answer.finish_reason is None or sent == min((text.split(stop)[0] for stop in stops), key=len)
    stops = [CountedText("a" * 990 + str(i)) for i in range(64)]
    CountedText.slices = 0
    answer = greedy_answer([], 1, tokenizer, stops)
    for piece in ["a" * 3, "b", "a" * 800, "b"] * 20:
        answer.add_text(piece)
    assert CountedText.slices < 64 * (2 * 20 * 805)  # 64 * 990 for each piece before
