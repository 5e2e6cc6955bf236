"""evaluate.py tasks=[...]: lm-evaluation-harness gets the log-probabilities and answers of the model; unknown tasks and missing data are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from runner.inference.harness.tasks import run_tasks
from runner.inference.load import load_trained

pytest.importorskip("lm_eval", reason="part of the extra eval")
pytestmark = pytest.mark.slow

ROWS = [
    {"question": "Where does Tolo live?", "choices": [" In Hale.", " 在湖边。", " 🐐"], "answer": 0},
    {"question": "def f(x):", "choices": [" return x", " 12 goats"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n'
ROLLING = 'doc_to_target: "{{question}}"\nmetric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]\n'


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (data := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder := tmp_path / "tasks").mkdir()
    (folder / "choice.yaml").write_text(TASK.format(name="choice", data=data, kind="multiple_choice") + CHOICE)
    rolling = TASK.format(name="rolling", data=data, kind="loglikelihood_rolling").replace('"{{question}}"', '""')
    (folder / "rolling.yaml").write_text(rolling + ROLLING)
    return folder


def log_prob(trained, context: list[int], continuation: list[int]) -> float:
    log_probs = trained.model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    return sum(float(log_probs[len(context) - 1 + i, token]) for i, token in enumerate(continuation))


def test_tasks_have_the_log_probabilities_of_the_model(write_model, tmp_path: Path, tasks: Path) -> None:
    trained = load_trained(write_model(tmp_path / "model", seed=0, std=0.3), "cpu")
    encode = trained.tokenizer.encode
    results = run_tasks(trained, ["choice", "rolling"], str(tasks), None, None, is_chat=False, batch_size=4)
    right = 0
    for row in ROWS:
        scores = [log_prob(trained, encode(row["question"]), encode(row["question"] + choice)[len(encode(row["question"])) :]) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    assert results["choice/acc"] == right / len(ROWS)
    total = sum(log_prob(trained, trained.tokenizer.bos_ids, encode(row["question"])) for row in ROWS)
    length = sum(len(row["question"].encode()) for row in ROWS)
    assert results["rolling/byte_perplexity"] == pytest.approx(math.exp(-total / length), rel=1e-4)


def test_tasks_that_are_unknown_or_have_no_data_are_refused(hf_folder: Path, tmp_path: Path, tasks: Path) -> None:
    trained = load_trained(hf_folder, "cpu")
    with pytest.raises(UserError, match="has no task choise"):
        run_tasks(trained, ["choise"], str(tasks), None, None, is_chat=False, batch_size=4)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match="the harness cannot run the tasks"):
        run_tasks(trained, ["choice"], str(tasks), None, None, is_chat=False, batch_size=4)
    with pytest.raises(UserError, match="the folder of tasks does not exist"):
        run_tasks(trained, ["choice"], str(tmp_path / "missing"), None, None, is_chat=False, batch_size=4)
