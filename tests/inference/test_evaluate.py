"""Evaluation metrics against values computed by hand, and independent of the batch size."""

from __future__ import annotations

import ast
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_fixtures import TINY_RUN, Call
from transformers import AutoModelForCausalLM
from transformers_families import write_family

from common.errors import UserError
from data.tokenize.chat_template import ChatTemplate
from models.generate import generate
from runner.diagnostics.rows import TrainingOverlap
from runner.inference.evaluate import (
    METRICS,
    EvaluateConfig,
    evaluate,
    evaluation_label,
    exported_weights,
    record_results,
    register_metric,
)
from runner.inference.evaluation_data import EvaluationData
from runner.inference.load import LoadedModel, find_checkpoint, load_trained
from runner.inference.metrics import Dialogue

TEXTS = [
    "Ludo lives in Sarro.",
    "托洛最喜欢棕色。",
    "The opposite of loud is quiet, and the opposite of north is south.",
    "é 🙂",
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def evaluate_config(metric: str, data: Path, max_length: int = 128, **changes: object) -> EvaluateConfig:
    values = {
        "run": "here",
        "metric": metric,
        "data": EvaluationData(
            str(data),
            columns=None,
            encoding=None,
            schema=None,
            on_bad_row=None,
            text_unit=None,
            turns=None,
            max_length=max_length,
            loss_on=None,
            cache=str(data.parent / "cache"),
        ),
        "batch_size": 3,
    }
    values |= {"max_new_tokens": 8, "show": 5, "reference": None, "device": "cpu", "dtype": "fp32"}
    values |= {"tasks": [], "tasks_path": None, "limit": None, "shots": None, "chat_template": False}
    return EvaluateConfig(**values | changes)  # type: ignore[arg-type]  # values of many types in one dict


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@torch.inference_mode()
def test_perplexity_is_the_mean_of_token_losses(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    trained = load_trained(hf_folder, "cpu")
    tokenizer, loss, tokens = trained.tokenizer, 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]])
        chosen = trained.model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        loss, tokens = loss - chosen.sum().item(), tokens + ids.shape[1] - 1
    results = evaluate(evaluate_config("perplexity", data), hf_folder)
    assert results["loss_tokens"] == tokens
    assert results["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert results["bits_per_byte"] == pytest.approx(
        loss / math.log(2) / sum(len(text.encode()) for text in TEXTS), rel=1e-5
    )


def test_perplexity_does_not_depend_on_the_batch_size(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    one, four = (evaluate(evaluate_config("perplexity", data, batch_size=size), hf_folder) for size in (1, 4))
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-5) and one["loss_tokens"] == four["loss_tokens"]


def test_perplexity_of_an_untrained_model_is_the_vocabulary_size(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "chat.jsonl", [{"conversations": chat("Where does Ludo live?", text)} for text in TEXTS])
    results = evaluate(evaluate_config("perplexity", data), hf_folder)
    assert results["perplexity"] == pytest.approx(6400, rel=0.15)
    answer_bytes = sum(len(text.encode()) for text in TEXTS)
    assert results["bits_per_byte"] == pytest.approx(
        results["loss"] * results["loss_tokens"] / math.log(2) / answer_bytes, rel=1e-6
    )


@torch.inference_mode()
def test_perplexity_counts_each_row_once_as_an_evaluation_of_a_run_does(hf_folder: Path, tmp_path: Path) -> None:
    weights = [3.0, 1.0, 1.0, 2.0]
    data = write(
        tmp_path / "text.jsonl", [{"text": text, "weight": weight} for text, weight in zip(TEXTS, weights, strict=True)]
    )
    trained = load_trained(hf_folder, "cpu")
    loss = tokens = num_bytes = 0.0
    for text in TEXTS:
        ids = torch.tensor([[trained.tokenizer.bos_id, *trained.tokenizer.encode(text), trained.tokenizer.eos_id]])
        loss -= trained.model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().item()
        tokens += ids.shape[1] - 1
        num_bytes += len(text.encode())
    results = evaluate(evaluate_config("perplexity", data), hf_folder)
    assert results["loss_tokens"] == tokens and results["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert results["bits_per_byte"] == pytest.approx(loss / math.log(2) / num_bytes, rel=1e-5)


@torch.inference_mode()
def test_perplexity_weighs_losses_and_bytes_of_messages_with_weights(hf_folder: Path, tmp_path: Path) -> None:
    weights = [3.0, 0.5, 1.0, 0.25]
    rows = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, "weight": weight}]
        for text, weight in zip(TEXTS, weights, strict=True)
    ]
    losses, alone = (
        [],
        [
            evaluate(evaluate_config("perplexity", write(tmp_path / f"{i}.jsonl", [{"messages": row}])), hf_folder)
            for i, row in enumerate(rows)
        ],
    )
    losses = sum(w * each["loss"] * each["loss_tokens"] for w, each in zip(weights, alone, strict=True))
    results = evaluate(
        evaluate_config("perplexity", write(tmp_path / "all.jsonl", [{"messages": row} for row in rows])), hf_folder
    )
    assert results["loss_tokens"] == sum(each["loss_tokens"] for each in alone)
    assert results["loss"] == pytest.approx(
        losses / sum(w * each["loss_tokens"] for w, each in zip(weights, alone, strict=True)), rel=1e-5
    )
    num_bytes = sum(w * len(text.encode()) for w, text in zip(weights, TEXTS, strict=True))
    assert results["bits_per_byte"] == pytest.approx(losses / math.log(2) / num_bytes, rel=1e-5)


def test_bits_per_byte_of_split_texts_is_that_of_the_whole_bytes(hf_folder: Path, tmp_path: Path) -> None:
    text = "托洛最喜欢棕色。é 🙂 " * 20
    results = evaluate(
        evaluate_config("perplexity", write(tmp_path / "long.jsonl", [{"text": text}]), max_length=16), hf_folder
    )
    assert results["bits_per_byte"] == pytest.approx(
        results["loss"] * results["loss_tokens"] / math.log(2) / len(text.encode()), rel=1e-6
    )


def test_evaluation_refuses_a_max_length_beyond_the_positions(hf_folder: Path, tmp_path: Path) -> None:
    """They would be cut at the positions, and recorded under the typed length."""
    cfg = evaluate_config("perplexity", write(tmp_path / "text.jsonl", [{"text": "Ludo"}]), max_length=10**6)
    with pytest.raises(UserError, match="data.max_length must be at most"):
        evaluate(cfg, hf_folder)


def test_perplexity_covers_all_tokens_of_a_split_text(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "long.jsonl", [{"text": "Ludo lives in Sarro. " * 100}])
    trained = load_trained(hf_folder, "cpu")
    assert (
        evaluate(evaluate_config("perplexity", data, max_length=32), hf_folder)["loss_tokens"]
        == len(trained.tokenizer.encode("Ludo lives in Sarro. " * 100)) + 1
    )


def test_exact_match_counts_answers_and_prints_wrong_ones(
    write_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "sure", seed=3, std=0.3)
    questions = ["Where does Ludo live?", "托洛最爱什么颜色？", "8 + 7?", "Who?"]
    empty = write(tmp_path / "empty.jsonl", [{"conversations": chat(question, "x")} for question in questions])
    evaluate(evaluate_config("exact_match", empty, show=9), folder)
    answers = [
        ast.literal_eval(line.partition("answered ")[2])
        for line in capsys.readouterr().out.splitlines()
        if "answered" in line
    ]
    right = write(
        tmp_path / "right.jsonl",
        [{"conversations": chat(q, f" {a.strip() or 'x'}\n")} for q, a in zip(questions, answers, strict=True)],
    )
    blank = sum(not answer.strip() for answer in answers)
    assert evaluate(evaluate_config("exact_match", right), folder) == {
        "exact_match": 1 - blank / 4,
        "right": 4 - blank,
        "rows": 4,
    }
    assert blank == 0, "the random model needs answers that are not empty"

    one_wrong = write(
        tmp_path / "wrong.jsonl",
        [{"conversations": chat(questions[0], "Nowhere.")}, {"conversations": chat(questions[1], answers[1])}],
    )
    capsys.readouterr()
    assert evaluate(evaluate_config("exact_match", one_wrong), folder)["exact_match"] == 0.5
    out = capsys.readouterr().out
    assert "wrong.jsonl:1" in out and "expected 'Nowhere.'" in out and "wrong.jsonl:2" not in out


@pytest.mark.slow
def test_conversation_prompts_contain_the_models_own_answers(
    write_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "sure", seed=3, std=0.3)
    questions = [["Who?", "托洛最爱什么颜色？", "8 + 7?"], ["Where does Ludo live?"]]
    session, own = load_trained(folder, "cpu"), []
    for turns in questions:  # one conversation after the other, as chat.py has them
        messages: list[dict[str, str]] = []
        for question in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _greedy(session, messages)})
        own.append({"conversations": messages})
    others = [
        {
            "conversations": [
                *own[0]["conversations"][:3],
                {"role": "assistant", "content": "x"},
                *own[0]["conversations"][4:],
            ]
        },
        own[1],
    ]
    # the expected answer of the second turn is not in the prompt of the third
    for rows, right in ((own, 4), (others, 3)):
        results = evaluate(evaluate_config("conversation", write(tmp_path / "chat.jsonl", rows)), folder)
        assert (results["right"], results["answers"], results["rows"]) == (right, 4, 2)
        assert results["exact_match"] == right / 4 and results["first_turn"] == results["last_turn"] == 1
    assert "chat.jsonl:1: turn 2: '托洛最爱什么颜色？'" in capsys.readouterr().out


def _greedy(trained: LoadedModel, messages: list[dict[str, str]]) -> str:
    template = ChatTemplate(trained.tokenizer)
    greedy: dict[str, Any] = {"temperature": 0, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "max_new_tokens": 8}
    [ids] = generate(trained.model, [template.encode_prompt(messages)], stop_ids=template.stop_ids, **greedy)
    return trained.tokenizer.decode(ids)


def test_conversation_refuses_rows_that_a_model_cannot_continue(hf_folder: Path, tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    for messages in ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}, call]):
        data = write(tmp_path / "chat.jsonl", [{"messages": messages}])
        with pytest.raises(UserError) as error:
            evaluate(evaluate_config("conversation", data), hf_folder)
        assert error.value.setting.startswith(f"{data}:1")


@pytest.mark.slow
def test_preference_rewards_are_relative_to_the_reference(write_model: Callable[..., Path], tmp_path: Path) -> None:
    policy, reference = (
        write_model(tmp_path / name, seed, std=0.2) for name, seed in (("policy", 1), ("reference", 2))
    )
    pairs = [{"chosen": chat("Who?", text), "rejected": chat("Who?", text[::-1])} for text in TEXTS[:3]]
    data = write(tmp_path / "pairs.jsonl", pairs)
    swapped = write(
        tmp_path / "swapped.jsonl", [{"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    )
    forward, backward = (
        evaluate(evaluate_config("preference", path, reference=str(reference)), policy) for path in (data, swapped)
    )
    assert (
        forward["reward_margin"] == pytest.approx(-backward["reward_margin"], rel=1e-4)
        and forward["reward_margin"] != 0
    )
    assert forward["reward_accuracy"] + backward["reward_accuracy"] == pytest.approx(1) and forward["rows"] == 3
    itself = evaluate(evaluate_config("preference", data, reference=str(policy)), policy)
    assert itself["reward_margin"] == 0 and itself["reward_accuracy"] == 0


@pytest.mark.parametrize("family", ["decoder", "gpt2"])
def test_bf16_computes_as_transformers_with_rounded_weights(
    write_model: Callable[..., Path], tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    if family == "decoder":
        write_model(folder, seed=1, std=0.2)
    else:
        write_family(folder, family)
    loaded = load_trained(folder, "cpu").compute_in("bf16")
    assert "computes in bf16" in capsys.readouterr().err
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert all(b.dtype != torch.bfloat16 for b in loaded.model.buffers())
    ids = torch.tensor([loaded.encode_text(TEXTS[2])])
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found, rounded, full = (model(ids).logits.float().log_softmax(-1) for model in (loaded.model, expected, exact))
    rounding = (rounded - full).abs().max()
    assert 0 < rounding and (found - full).abs().max() < 2 * rounding
    answer = generate(
        loaded.model, [ids[0].tolist(), ids[0, 3:].tolist()], max_new_tokens=4, temperature=0, top_k=0, top_p=1.0,
        repetition_penalty=1.0, stop_ids=[],
    )  # fmt: skip
    assert [len(row) for row in answer] == [4, 4]


def test_dtype_that_the_device_does_not_compute_in_is_refused_by_its_name(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
    loaded = replace(load_trained(hf_folder, "cpu"), device=torch.device("mps"))  # none before macOS 14
    with pytest.raises(UserError, match="no bf16") as error:
        loaded.compute_in("bf16")
    assert (error.value.setting, error.value.fix) == ("dtype=bf16", "dtype=fp32")


@pytest.mark.parametrize("metric", ["perplexity", "exact_match", "preference"])
def test_result_in_bf16_is_recorded_beside_the_one_in_fp32(
    write_model: Callable[..., Path], tmp_path: Path, metric: str
) -> None:
    folder, rows = write_model(tmp_path / "model", seed=1, std=0.2), {
        "perplexity": [{"text": text} for text in TEXTS],
        "exact_match": [{"conversations": chat("Who?", text)} for text in TEXTS],
        "preference": [{"chosen": chat("Who?", text), "rejected": chat("Who?", text[::-1])} for text in TEXTS[:3]],
    }  # fmt: skip
    reference = str(write_model(tmp_path / "reference", seed=2)) if metric == "preference" else None
    data = write(tmp_path / "rows.jsonl", rows[metric])
    fp32, bf16 = (
        evaluate(evaluate_config(metric, data, reference=reference, dtype=name), folder) for name in ("fp32", "bf16")
    )
    records = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [record.get("dtype") for record in records] == [None, "bf16"]
    assert evaluation_label(records[1]) != evaluation_label(records[0])
    assert bf16 == pytest.approx(fp32, rel=0.05, abs=0.5 if metric == "exact_match" else 0) and (
        metric == "exact_match" or bf16 != fp32
    )


def test_preference_loads_a_reference_whose_gradients_can_be_probed(hf_folder: Path) -> None:
    with torch.inference_mode():
        reference = load_trained(hf_folder, "cpu")
    assert not any(weight.is_inference() for weight in reference.model.parameters())


def test_preference_without_a_known_reference_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"chosen": chat("Who?", "Ludo."), "rejected": chat("Who?", "No.")}])
    with pytest.raises(UserError) as error:
        evaluate(evaluate_config("preference", data), hf_folder)
    assert "reference=DIR" in error.value.fix


@pytest.mark.parametrize("metric", ["preference", "exact_match"])
def test_metric_refuses_another_data_format_and_names_one_that_reads_it(
    hf_folder: Path, tmp_path: Path, metric: str
) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(UserError) as error:
        evaluate(evaluate_config(metric, data, reference=str(hf_folder) if metric == "preference" else None), hf_folder)
    assert (
        f"metric={metric} reads" in error.value.message
        and error.value.setting == f"{data}:1"
        and error.value.fix == "metric=perplexity reads this file"
    )


def test_metric_refuses_a_row_of_another_schema_with_its_line(hf_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "mixed.jsonl", [{"conversations": chat("Who?", "Ludo.")}, {"text": "a"}])
    with pytest.raises(UserError) as error:
        evaluate(evaluate_config("exact_match", data), hf_folder)
    assert error.value.setting == f"{data}:2"


def test_metric_refuses_a_file_without_rows(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("[]")
    for metric in ("perplexity", "exact_match", "preference"):
        with pytest.raises(UserError) as error:
            reference = str(hf_folder) if metric == "preference" else None
            evaluate(evaluate_config(metric, tmp_path / "none.json", reference=reference), hf_folder)
        assert "no row" in error.value.message


def test_evaluate_appends_its_record_to_the_model_folder(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "text.jsonl", [{"text": "a b c"}])
    results = evaluate(evaluate_config("perplexity", data), hf_folder)
    last = json.loads((hf_folder / "evaluations.jsonl").read_text().splitlines()[-1])
    assert (
        last
        == {"metric": "perplexity", "data": str(data), "max_length": 128, **results}
        == json.loads(capsys.readouterr().out.splitlines()[-1])
    )


def test_evaluate_warns_of_rows_in_training_files_held_out_or_not(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.jsonl", [{"text": TEXTS[0]}])
    overlap = TrainingOverlap(1, 1, f"{data}:1")
    monkeypatch.setattr("runner.inference.evaluate.training_overlap", lambda *_: overlap)
    evaluate(evaluate_config("perplexity", data), hf_folder)
    assert "warning: 1 of 1 rows are in the training files of this run" in capsys.readouterr().err


def test_evaluate_names_json_rows_that_are_named_as_text(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, text = (write(tmp_path / name, [{"text": "a b c"}] * 3) for name in ("rows.jsonl", "rows.txt"))
    assert (
        evaluate(evaluate_config("perplexity", text), hf_folder)["loss"]
        == evaluate(evaluate_config("perplexity", lines), hf_folder)["loss"]
    )
    assert capsys.readouterr().err.count("rows.txt: read as JSON Lines, which its content is") == 1


def test_evaluation_of_a_checkpoint_is_recorded_in_its_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000040"
    for folder in (checkpoint, tmp_path / "run" / ".hydra"):
        folder.mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("seed: 0\n")
    (checkpoint.parent / "best").write_text(checkpoint.name)
    for folder in (checkpoint, checkpoint.parent / "best"):
        record_results(folder, {"metric": "perplexity", **exported_weights(folder)})
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == 2 * [
        {"metric": "perplexity", "weights": "step-00000040", "step": 40}
    ]
    assert list(checkpoint.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff", b"../step-00000040", b"step-00000040\0", b"s" * 5000, None])
def test_checkpoint_file_that_names_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    (pointer := tmp_path / "run" / "checkpoints" / "latest").parent.mkdir(parents=True)
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("seed: 0\n")
    if content is None:  # a link
        pointer.symlink_to(tmp_path / "run" / ".hydra" / "config.yaml")
    else:
        pointer.write_bytes(content)
    with pytest.raises(UserError, match="names no checkpoint") as raised:
        find_checkpoint(pointer)
    assert "doctor.py" in raised.value.fix


@pytest.mark.parametrize("metric, rows", [("perplexity", 6), ("exact_match", 6), ("conversation", 3)])
def test_evaluate_that_is_stopped_prints_the_result_of_the_rows_so_far(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, rows: int
) -> None:
    data = write(tmp_path / "chat.jsonl", [{"conversations": chat("Who?", f"Ludo {i}.")} for i in range(9)])
    checks = iter(range(99))
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluate_config(metric, data), hf_folder, lambda: nullcontext(lambda: next(checks) >= rows / 3))
    partial = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (partial["partial"], partial["n"], partial["of"]) == (True, rows, 9)
    assert partial.get("rows", rows) == rows
    with pytest.raises(KeyboardInterrupt):  # nothing is done yet: there is no result
        evaluate(evaluate_config(metric, data), hf_folder, lambda: nullcontext(lambda: True))
    assert "partial" not in capsys.readouterr().out


def test_evaluate_of_a_folder_takes_and_names_its_validation_files(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: one loss over the training, validation and test files."""
    folder = tmp_path / "set"
    folder.mkdir()
    train, dev = (
        write(folder / f"{name}.jsonl", [{"text": text}])
        for name, text in (("train", "a b c d e f"), ("dev", "one two"))
    )
    alone = evaluate(evaluate_config("perplexity", dev), hf_folder)
    assert (
        evaluate(evaluate_config("perplexity", folder), hf_folder)
        == alone
        != evaluate(evaluate_config("perplexity", train), hf_folder)
    )
    printed = capsys.readouterr()
    assert f"{folder}: by their names, evaluates on dev.jsonl, leaves out train.jsonl" in printed.err
    assert json.loads(printed.out.splitlines()[1])["files"] == [str(dev)]


def test_evaluate_refuses_answers_with_a_verdict_by_name(hf_folder: Path, tmp_path: Path) -> None:
    """Before: refused as rows that are no texts, with the fix stage=sft, which evaluate.py does not have."""
    data = write(tmp_path / "kto.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(UserError, match="tells good answers from bad ones"):
        evaluate(evaluate_config("perplexity", data), hf_folder)


def test_evaluate_warns_about_a_column_that_the_file_does_not_have(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: the loss of the field text, without a message."""
    cfg = evaluate_config("perplexity", write(tmp_path / "text.jsonl", [{"text": "a b c"}]))
    evaluate(replace(cfg, data=replace(cfg.data, columns={"text": "body"})), hf_folder)
    assert "warning: data.columns names body" in capsys.readouterr().err


def test_metric_of_a_plugin_is_found_by_its_name(
    hf_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: METRICS.remove("rows"))
    register_metric("rows", reads=("text",))(
        lambda trained, examples, cfg: {"rows": float(len(list(examples.examples())))}
    )
    data = write(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    assert evaluate(evaluate_config("rows", data), hf_folder) == {"rows": 4.0}
    with pytest.raises(
        UserError, match="metric must be one of conversation, exact_match, perplexity, preference, rows, got rouge"
    ):
        evaluate_config("rouge", data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=sft", "data.loss_on=all", "data.max_length=24"],
        ["stage=sft", "data.too_long=drop", "data.max_length=96", "data.on_bad_row=skip", "data.max_bad_fraction=0.5"],
        ["stage=pretrain", "data.text_unit=line", "data.max_length=24", "data.too_long=truncate"],
        ["stage=sft", 'data.schema="prompt completion"', "data.max_length=64"],
    ],
    ids=["labels", "dropped rows", "lines", "schema"],
)
def test_evaluate_reads_validation_rows_as_the_run_did(
    overrides: list[str], call: Call, call_command: Call, workspace: Path
) -> None:
    """With the settings of evaluate.py alone, the number was another one than in run.json and the leaderboard."""
    rows: list[dict[str, Any]] = [
        {
            "conversations": chat(f"Where does Ludo live in {year}?", " ".join(TEXTS[: year % 4]) + str(year)),
            "weight": 2,
        }
        for year in range(1990, 2000)
    ]
    if 'data.schema="prompt completion"' in overrides:  # the conversation would be preferred
        rows = [{**row, "prompt": "Who?", "completion": TEXTS[number % 4]} for number, row in enumerate(rows)]
    if "data.on_bad_row=skip" in overrides:
        rows[7]["conversations"][0]["role"] = "unknown"
    train, validation = write(workspace / "train.jsonl", rows[:6]), write(workspace / "val.jsonl", rows[6:])
    if "data.text_unit=line" in overrides:
        train, validation = (path.rename(path.with_suffix(".txt")) for path in (train, validation))
        for path in (train, validation):
            path.write_text("".join(f"{text} It is far from here, as they say.\n" for text in TEXTS * 5))
    overrides = [*overrides, f"data.path={train}", f"data.val_path={validation}", "train.eval_every=2"]
    sizes = [override for override in TINY_RUN if not override.startswith(("data.", "train.eval_every"))]
    trained = call(*sizes, "init_from=scratch", *overrides, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    exported = json.loads((workspace / "run" / "run.json").read_text())["export"]
    evaluated = call_command("evaluate.py", "run=run", f"data.path={validation}", "device=cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout.splitlines()[-1])["loss"] == pytest.approx(exported["loss"], rel=1e-5)
    assert ("left out: " in evaluated.stderr) == ("data.on_bad_row=skip" in overrides)
    if "data.on_bad_row=skip" in overrides:
        answers = "metric=exact_match", "max_new_tokens=2", "show=0"
        evaluated = call_command("evaluate.py", "run=run", f"data.path={validation}", "device=cpu", *answers)
        assert json.loads(evaluated.stdout.splitlines()[-1])["rows"] == 3 and "left out: 1 bad rows" in evaluated.stderr


def test_evaluation_with_other_settings_replaces_no_record(call: Call, call_command: Call, workspace: Path) -> None:
    data = write(workspace / "val.jsonl", [{"conversations": chat("Who?", text)} for text in TEXTS])
    assert call(*TINY_RUN, "stage=sft", f"data.path={data}", "init_from=scratch", "hydra.run.dir=run").returncode == 0
    for typed in ([], ["data.loss_on=all"], []):
        assert call_command("evaluate.py", "run=run", f"data.path={data}", "device=cpu", *typed).returncode == 0
    records = json.loads((workspace / "run" / "run.json").read_text())["evaluations"]
    assert [record.get("loss_on") for record in records] == ["all", None]
    assert evaluation_label(records[0]) == "perplexity val.jsonl, loss_on=all"


@pytest.mark.parametrize("damaged", [{"max_length": "abc"}, {"loss_on": {"a": 1}}, {"columns": "x"}, {"text_unit": 5}])
def test_settings_of_a_run_that_cannot_be_used_are_refused(
    damaged: dict[str, Any], hf_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(json.dumps({"data": damaged}))
    config = evaluate_config("perplexity", write(tmp_path / "a.jsonl", [{"text": "a"}]))
    with pytest.raises(UserError, match=next(iter(damaged)) + "|saved config of the run cannot be read"):
        evaluate(replace(config, data=replace(config.data, max_length=None)), tmp_path / "run")


def test_expected_answer_has_its_reasoning_and_tool_calls(hf_folder: Path) -> None:
    """Their text was not in the expected answer, and right ones counted as wrong."""
    trained = load_trained(hf_folder, "cpu")
    call_of_tool = [{"type": "function", "function": {"name": "w", "arguments": {"a": 1}}}]
    for message, expected in (
        ({"content": "red", "weight": 0}, "red"),
        ({"content": "red", "reasoning_content": "sky", "weight": 0}, "<think>\nsky\n</think>\n\nred"),
        (
            {"content": "", "tool_calls": call_of_tool},
            '<tool_call>\n{"name": "w", "arguments": {"a": 1}}\n</tool_call>',
        ),
    ):
        messages = [{"role": "user", "content": "color?"}, {"role": "assistant", **message}]
        assert Dialogue("here", messages, None, [1], False).expected(trained).strip() == expected
    # a template that begins every answer with an empty think block, or drops reasoning
    for name in ("minimind", "chatml"):
        template = (Path(__file__).parents[1] / "data" / "templates" / f"{name}.jinja").read_text()
        other = replace(trained, tokenizer=replace(trained.tokenizer, chat_template=template))
        messages = [
            {"role": "user", "content": "color?"},
            {"role": "assistant", "content": "red", "reasoning_content": "sky"},
        ]
        assert Dialogue("here", messages, None, [1], False).expected(other) == "red", name


def test_preference_refuses_a_reference_with_another_tokenizer(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    policy, reference = (write_model(tmp_path / name, seed=1, std=0.2) for name in ("policy", "reference"))
    stored = json.loads((reference / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (reference / "tokenizer.json").write_text(json.dumps(stored))
    pair = {"chosen": chat("Who?", "Ludo."), "rejected": chat("Who?", "Tolo.")}
    with pytest.raises(UserError, match="the reference has another tokenizer"):
        evaluate(evaluate_config("preference", write(tmp_path / "p.jsonl", [pair]), reference=str(reference)), policy)


def test_preference_with_a_moved_reference_proposes_no_other_run(hf_folder: Path, tmp_path: Path) -> None:
    pair = {"chosen": chat("Who?", "a"), "rejected": chat("Who?", "b")}
    config = evaluate_config("preference", write(tmp_path / "p.jsonl", [pair]), reference=str(tmp_path / "moved"))
    with pytest.raises(UserError, match="the folder does not exist") as error:
        evaluate(config, hf_folder)
    assert "last" not in error.value.fix


def test_preference_margin_is_that_of_the_log_probabilities_in_nats(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    policy, reference = (
        write_model(tmp_path / name, seed, std=0.2) for name, seed in (("policy", 1), ("reference", 2))
    )
    data = write(
        tmp_path / "pairs.jsonl", [{"chosen": chat("Who?", "Ludo lives here."), "rejected": chat("Who?", "Mara does.")}]
    )

    def log_probability(folder: Path, answer: str) -> float:
        trained = load_trained(folder, "cpu")
        template = ChatTemplate(trained.tokenizer)
        [(ids, spans)] = template.encode_segments([template.segments(chat("Who?", answer), None, "row")])
        with torch.inference_mode():
            log_probs = trained.model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        return sum(log_probs[t - 1, ids[t]].item() for start, stop, _ in spans for t in range(start, stop))

    ratios = [
        log_probability(policy, answer) - log_probability(reference, answer)
        for answer in ("Ludo lives here.", "Mara does.")
    ]
    margin = evaluate(evaluate_config("preference", data, reference=str(reference)), policy)["reward_margin"]
    assert margin == pytest.approx(ratios[0] - ratios[1], rel=1e-4) and abs(margin) > 0.1


@pytest.mark.parametrize("wrong, first, last", [(None, 1, 1), (0, 0, 1), (1, 1, 0)])
def test_conversation_counts_first_and_last_turns(
    write_model: Callable[..., Path], tmp_path: Path, wrong: int | None, first: int, last: int
) -> None:
    folder = write_model(tmp_path / "sure", seed=3, std=0.3)
    session, messages = load_trained(folder, "cpu"), list[dict[str, str]]()
    for question in ("Who?", "8 + 7?"):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _greedy(session, messages)})
    if wrong is not None:
        messages[2 * wrong + 1] = {"role": "assistant", "content": "Nowhere."}
    results = evaluate(
        evaluate_config("conversation", write(tmp_path / "chat.jsonl", [{"conversations": messages}])), folder
    )
    assert (results["first_turn"], results["last_turn"]) == (first, last)


def test_conversation_of_merged_turns_has_no_answer_before_a_question(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "sure", seed=3, std=0.3)
    begin = [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "Who?\n\n8 + 7?"}]
    answer = {"role": "assistant", "content": _greedy(load_trained(folder, "cpu"), begin)}
    questions = [{"role": "user", "content": text} for text in ("Who?", "8 + 7?")]
    data = write(tmp_path / "chat.jsonl", [{"messages": [begin[0], *questions, answer]}])
    with pytest.raises(UserError, match="assistant comes first"):
        evaluate(evaluate_config("conversation", data), folder)
    for metric, counts in (("conversation", {"right": 1, "answers": 1}), ("exact_match", {"right": 1, "rows": 1})):
        config = evaluate_config(metric, data)
        results = evaluate(replace(config, data=replace(config.data, turns="merge")), folder)
        assert results | counts == results


def test_preference_refuses_a_reference_that_changed_since_the_run_began(
    call: Call, workspace: Path, tmp_path: Path
) -> None:
    """`resume=SFT train.max_steps=N` writes other weights: rewards were measured against those, without an error."""
    pairs = [{"chosen": chat("Who?", text), "rejected": chat("Who?", text[::-1])} for text in TEXTS[:3]]
    data = write(workspace / "pairs.jsonl", pairs)
    for folder, *overrides in (
        ("sft", "stage=sft", f"data.path={write(workspace / 'chats.jsonl', [{'messages': pairs[0]['chosen']}])}"),
        ("dpo", "stage=dpo", f"data.path={data}", "init_from=sft"),
    ):
        overrides += ["init_from=scratch"] * (folder == "sft")
        done = call(*TINY_RUN, *overrides, "train.max_steps=2", "data.val_fraction=0", f"hydra.run.dir={folder}")
        assert done.returncode == 0, done.stderr
    run = workspace / "dpo"
    margin = evaluate(evaluate_config("preference", data), run)["reward_margin"]
    assert call("resume=sft", "train.max_steps=3").returncode == 0
    with pytest.raises(UserError, match="the weights that the run started from have changed") as caught:
        evaluate(evaluate_config("preference", data), run)
    assert f"reference={workspace / 'sft'} takes the changed ones" in caught.value.fix
    assert (
        evaluate(evaluate_config("preference", data, reference=str(workspace / "sft")), run)["reward_margin"] != margin
    )


def test_adapter_of_a_run_whose_base_was_trained_on_is_refused(call: Call, workspace: Path) -> None:
    data = write(workspace / "chats.jsonl", [{"messages": chat("Who?", TEXTS[0])}])
    for folder, *overrides in (("sft", "init_from=scratch"), ("adapter", "init_from=sft")):
        stage = "sft" if folder == "sft" else "lora"
        shared = (f"stage={stage}", f"data.path={data}", "train.max_steps=2", "data.val_fraction=0")
        assert call(*TINY_RUN, *overrides, *shared, f"hydra.run.dir={folder}").returncode == 0
    run = workspace / "adapter"
    for weights in (workspace / "sft" / "model").glob("*.safetensors"):
        os.utime(weights, (time.time() + 10,) * 2)  # a newer copy of the same weights
    load_trained(run, "cpu")
    assert call("resume=sft", "train.max_steps=3").returncode == 0
    for folder in (run, next((run / "checkpoints").glob("step-*"))):
        with pytest.raises(UserError, match="the weights under this adapter have changed since it was trained"):
            load_trained(folder, "cpu")
    assert load_trained(run / "model", "cpu").has_adapter
