"""Generation up to a stop text gives what cutting the whole answer gives, with fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data.tokenize.tokenizer import EOS
from runner.inference.harness.model import generate_until_stop
from runner.inference.load import load_trained


def test_answers_until_stop_texts_are_those_of_whole_answers_in_fewer_steps(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    trained = load_trained(write_model(tmp_path / "model", seed=3, std=0.3), "cpu")
    prompts = [trained.tokenizer.encode(text) for text in ("Where does Ludo live?", "8 + 7?", "def f(x):")]
    steps: list[None] = []
    settings = {"until": [], "max_gen_toks": 40, "do_sample": False, "temperature": 0.0}
    whole = generate_until_stop(trained, prompts, settings, [], lambda: steps.append(None))
    assert len(steps) == 40 and all(len(text) > 12 for text in whole)
    stops = [whole[0][7:10], whole[1][3:5], whole[2][5], ""]
    steps.clear()
    cut = generate_until_stop(trained, prompts, settings | {"until": stops}, [], lambda: steps.append(None))
    assert cut == [min((text.split(stop)[0] for stop in stops if stop), key=len) for text in whole]
    assert len(steps) < 40


def test_stop_texts_may_be_control_tokens_or_several_tokens(
    write_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_trained(write_model(tmp_path / "model", seed=3, std=0.3), "cpu")
    begin, rest = trained.tokenizer.encode("It is late"), trained.tokenizer.encode(" now, and dark")
    tokens = [*begin, trained.tokenizer.eos_id, *rest]
    steps: list[None] = []

    def fake_generate(
        *_: object, on_token: Callable[[int, int], None], before_token: Callable[[], None], **options: object
    ) -> None:
        for token in tokens:
            before_token()
            on_token(0, token)

    def until(stop: str) -> str:
        steps.clear()
        [text] = generate_until_stop(
            trained, [[1]], {"until": [stop], "max_gen_toks": 99}, [], lambda: steps.append(None)
        )
        return text

    monkeypatch.setattr("runner.inference.harness.model.generate", fake_generate)
    assert len(begin) >= 3 and len(rest) >= 3
    assert until("") == "It is late now, and dark" and len(steps) == len(tokens)
    assert until(EOS) == "It is late" and len(steps) == len(begin) + 2
    assert until(" is late") == "It" and len(steps) == len(begin) + 1
