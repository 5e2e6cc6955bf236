"""Scores: the same whatever the batch size, and equal to what one would compute by hand."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.inference.evaluate import EvaluateConfig, EvaluationData, evaluate
from runner.inference.load import load_trained

TEXTS = ["Ludo lives in Sarro.", "托洛最喜欢棕色。", "The opposite of loud is quiet, and the opposite of north is south.", "é 🙂"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def words(metric: str, data: Path, max_length: int = 128, **changes: object) -> EvaluateConfig:
    given = {"run": "here", "metric": metric, "data": EvaluationData(str(data), max_length, str(data.parent / "cache")), "batch_size": 3}
    given |= {"max_new_tokens": 8, "show": 5, "reference": None, "device": "cpu"}
    return EvaluateConfig(**given | changes)  # type: ignore[arg-type]  # values of many types in one dict


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@torch.inference_mode()
def test_perplexity_is_that_of_a_hand_written_sum(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    trained = load_trained(hf_folder, "cpu")
    tokenizer, loss, tokens = trained.tokenizer, 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]])
        chosen = trained.model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        loss, tokens = loss - chosen.sum().item(), tokens + ids.shape[1] - 1
    numbers = evaluate(words("perplexity", data), hf_folder)
    assert numbers["tokens"] == tokens
    assert numbers["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert numbers["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert numbers["bits_per_byte"] == pytest.approx(loss / math.log(2) / sum(len(text.encode()) for text in TEXTS), rel=1e-5)


def test_the_batch_size_changes_no_score(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    one, four = (evaluate(words("perplexity", data, batch_size=size), hf_folder) for size in (1, 4))
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-5) and one["tokens"] == four["tokens"]


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "chat.jsonl", [{"conversations": chat("Where does Ludo live?", text)} for text in TEXTS])
    numbers = evaluate(words("perplexity", data), hf_folder)
    assert numbers["perplexity"] == pytest.approx(6400, rel=0.15) and "bits_per_byte" not in numbers


def test_text_longer_than_a_row_is_scored_to_its_last_token(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "long.jsonl", [{"text": "Ludo lives in Sarro. " * 100}])
    trained = load_trained(hf_folder, "cpu")
    assert evaluate(words("perplexity", data, max_length=32), hf_folder)["tokens"] == len(trained.tokenizer.encode("Ludo lives in Sarro. " * 100)) + 1


def test_exact_match_counts_answers_and_shows_the_wrong_ones(write_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "sure", seed=3, spread=0.3)
    questions = ["Where does Ludo live?", "托洛最爱什么颜色？", "8 + 7?", "Who?"]
    empty = write(tmp_path / "empty.jsonl", [{"conversations": chat(question, "x")} for question in questions])
    evaluate(words("exact_match", empty, show=9), folder)
    answers = [ast.literal_eval(line.partition("answered ")[2]) for line in capsys.readouterr().out.splitlines() if "answered" in line]
    right = write(tmp_path / "right.jsonl", [{"conversations": chat(q, f" {a.strip() or 'x'}\n")} for q, a in zip(questions, answers, strict=True)])
    blank = sum(not answer.strip() for answer in answers)
    assert evaluate(words("exact_match", right), folder) == {"exact_match": 1 - blank / 4, "right": 4 - blank, "rows": 4}
    assert blank == 0, "the made-up model should have something to say for this test"

    one_wrong = write(tmp_path / "wrong.jsonl", [{"conversations": chat(questions[0], "Nowhere.")}, {"conversations": chat(questions[1], answers[1])}])
    capsys.readouterr()
    assert evaluate(words("exact_match", one_wrong), folder)["exact_match"] == 0.5
    out = capsys.readouterr().out
    assert "wrong.jsonl:1" in out and "expected 'Nowhere.'" in out and "wrong.jsonl:2" not in out


def test_preferences_are_judged_against_the_reference(write_model: Callable[..., Path], tmp_path: Path) -> None:
    policy, reference = (write_model(tmp_path / name, seed, spread=0.2) for name, seed in (("policy", 1), ("reference", 2)))
    pairs = [{"chosen": chat("Who?", text), "rejected": chat("Who?", text[::-1])} for text in TEXTS[:3]]
    data = write(tmp_path / "pairs.jsonl", pairs)
    swapped = write(tmp_path / "swapped.jsonl", [{"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs])
    there, back = (evaluate(words("preference", path, reference=str(reference)), policy) for path in (data, swapped))
    assert there["reward_margin"] == pytest.approx(-back["reward_margin"], rel=1e-4) and there["reward_margin"] != 0
    assert there["reward_accuracy"] + back["reward_accuracy"] == pytest.approx(1) and there["rows"] == 3
    itself = evaluate(words("preference", data, reference=str(policy)), policy)
    assert itself["reward_margin"] == 0 and itself["reward_accuracy"] == 0


def test_a_reference_nobody_knows_has_to_be_named(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"chosen": chat("Who?", "Ludo."), "rejected": chat("Who?", "No.")}])
    with pytest.raises(ValueError) as refusal:
        evaluate(words("preference", data), hf_folder)
    assert "reference=DIR" in refusal.value.args[2]


@pytest.mark.parametrize("metric", ["preference", "exact_match"])
def test_a_file_of_another_shape_is_refused_with_the_metric_that_reads_it(hf_folder: Path, tmp_path: Path, metric: str) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError) as refusal:
        evaluate(words(metric, data, reference=str(hf_folder)), hf_folder)
    what, where, fix = refusal.value.args
    assert f"metric={metric} reads" in what and where == f"{data}:1" and fix == "such rows are for metric=perplexity"


def test_a_row_of_another_shape_is_refused_wherever_it_stands(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "mixed.jsonl", [{"conversations": chat("Who?", "Ludo.")}, {"text": "a"}])
    with pytest.raises(ValueError) as refusal:
        evaluate(words("exact_match", data), hf_folder)
    assert refusal.value.args[1] == f"{data}:2"


def test_a_file_without_rows_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("[]")
    for metric in ("perplexity", "exact_match", "preference"):
        with pytest.raises(ValueError) as refusal:
            evaluate(words(metric, tmp_path / "none.json", reference=str(hf_folder)), hf_folder)
        assert "no row" in refusal.value.args[0]


def test_every_evaluation_is_kept_beside_the_model(hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": "a b c"}])
    numbers = evaluate(words("perplexity", data), hf_folder)
    last = json.loads((hf_folder / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last == {"metric": "perplexity", "data": str(data), **numbers} == json.loads(capsys.readouterr().out.splitlines()[-1])
