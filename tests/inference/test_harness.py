"""evaluate.py tasks=[...]: the numbers are those of lm-evaluation-harness on the same folder; unknown tasks and missing
data are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from runner.inference.evaluate import EVALUATIONS_FILE, EvaluateConfig, Record
from runner.inference.evaluation_data import EvaluationData
from runner.inference.harness.loading import load_tasks
from runner.inference.harness.tasks import evaluate_tasks, run_task
from runner.inference.load import load_trained
from runner.tracking.progress import EvaluationProgress

pytest.importorskip("lm_eval", reason="part of the extra eval")
pytestmark = pytest.mark.slow  # the import of the harness alone takes 3 seconds

ROWS = [
    {"question": "Where does Tolo live?", "choices": [" In Hale.", " 在湖边。", " 🐐"], "answer": 0},
    {"question": "def f(x):", "choices": [" return x", " 12 goats"], "answer": 1},
    # the space belongs to the choices
    {"question": "The capital of Sarro is ", "choices": ["Hale", "Ludo"], "answer": 1},
    {"question": "", "choices": [" nothing", " something"], "answer": 0},
    # more than the model takes
    {"question": "long context text " * 60, "choices": [" goat", " the lake is far away from here"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
output_type: {kind}
test_split: test
training_split: train
doc_to_text: "{question}"
target_delimiter: ""
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n'
LAST = 'doc_to_target: "{{choices[0]}}"\nmetric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n'
ROLLING = 'doc_to_target: "{{question}}{{choices[0]}}"\nmetric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]\n'
ANSWER = (
    'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: ["\\n\\n", "e"], max_gen_toks: 12, do_sample: false}\n'
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
)
KINDS = {
    "choice": ("multiple_choice", "{{question}}", CHOICE),
    "last": ("loglikelihood", "{{question}}", LAST),
    "rolling": ("loglikelihood_rolling", "", ROLLING),
    "answer": ("generate_until", "Q: {{question}}", ANSWER),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files, one of each kind, and a group of two."""
    folder = tmp_path_factory.mktemp("tasks")
    (data := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, (kind, question, rest) in KINDS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, question=question) + rest)
    (folder / "both.yaml").write_text("group: both\ntask: [choice, last]\n")
    return folder


def config(names: list[str], folder: Path | str, **changes: Any) -> EvaluateConfig:
    data = EvaluationData(
        None,
        columns=None,
        encoding=None,
        schema=None,
        on_bad_row=None,
        text_unit=None,
        turns=None,
        max_length=None,
        loss_on=None,
        cache="",
    )
    values = {
        "run": "here",
        "metric": "perplexity",
        "data": data,
        "batch_size": 2,
        "max_new_tokens": 8,
        "show": 0,
        "reference": None,
        "device": "cpu",
        "dtype": "fp32",
    }
    values |= {"tasks": names, "tasks_path": str(folder), "limit": None, "shots": None, "chat_template": False}
    return EvaluateConfig(**values | changes)


@pytest.fixture(scope="module")
def models(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, and the same one with a tokenizer that puts a bos_token before each text."""
    plain, with_bos = (
        write_model(tmp_path_factory.mktemp(name) / "model", seed=0, std=0.3) for name in ("plain", "bos")
    )
    tokenizer = json.loads((with_bos / "tokenizer.json").read_text())
    bos, text = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, text],
        "special_tokens": special,
    }
    (with_bos / "tokenizer.json").write_text(json.dumps(tokenizer))
    return [plain, with_bos]


@pytest.mark.parametrize("shots, is_chat", [(None, False), (2, True)])
def test_tasks_have_the_answers_of_the_harness_itself(
    models: list[Path], tasks: Path, shots: int | None, is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="the harness's own class for models of transformers needs it")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from runner.inference.harness.model import HarnessModel

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # seconds, and no part of the results
    monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)
    for folder in models:
        reference = HFLM(pretrained=str(folder), device="cpu", batch_size=1)
        model, cfg = (
            HarnessModel(load_trained(folder, "cpu"), 4, EvaluationProgress("")),
            config([*KINDS], tasks, shots=shots, chat_template=is_chat),
        )
        for name, loaded in load_tasks([*KINDS], str(tasks)).items():
            [record] = run_task(model, name, loaded, cfg)
            ours = [request.resps[0] for request in loaded["tasks"][name].instances]
            expected = lm_eval.simple_evaluate(
                reference,
                tasks=[*loaded["tasks"].values()],
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=shots,
                apply_chat_template=is_chat,
                fewshot_as_multiturn=is_chat,
                bootstrap_iters=1000,
            )
            assert expected is not None
            responses = [request.resps[0] for request in loaded["tasks"][name].instances]
            if name == "answer":
                assert ours == responses and any(responses)
            else:
                assert torch.tensor(ours) == pytest.approx(torch.tensor(responses), rel=1e-5), name
            numbers = {
                key.removesuffix(",none"): value
                for key, value in expected["results"][name].items()
                if isinstance(value, float)
            }
            assert record["results"] == pytest.approx(numbers, rel=1e-4)
            assert (record["n"], record["shots"], record["chat_template"]) == (len(ROWS), shots or 0, is_chat)


def evaluate(folder: Path, cfg: EvaluateConfig, **options: Any) -> tuple[list[Record], list[Record]]:
    """Return (records that were written, records that were returned)."""
    before = len(recorded(folder))
    returned = evaluate_tasks(cfg, folder, **options)
    return recorded(folder)[before:], returned


def recorded(folder: Path) -> list[Record]:
    file = folder / EVALUATIONS_FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def test_tasks_of_a_group_are_its_members_and_limit_takes_the_first_rows(models: list[Path], tasks: Path) -> None:
    written, _ = evaluate(models[0], config(["both", "choice"], tasks, limit=3))
    assert [(record["task"], record["n"], record["limit"]) for record in written] == [("both", 6, 3), ("choice", 3, 3)]
    assert written[0]["members"]["choice"] == {"n": 3, **written[1]["results"]} and set(written[1]["results"]) == {
        "acc",
        "acc_stderr",
    }


def test_tasks_that_are_stopped_give_the_result_of_their_first_documents(
    models: list[Path], tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(99))  # one for each document that is prepared, two for each request
    before = len(recorded(models[0]))
    with pytest.raises(KeyboardInterrupt):  # in the fourth document of the second task
        evaluate_tasks(
            config(["last", "choice"], tasks, shots=1, batch_size=1),
            models[0],
            listen=lambda: nullcontext(lambda: next(calls) >= 37),
        )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [record["task"] for record in recorded(models[0])[before:]] == ["last"]
    assert (last["task"], last["partial"], last["of"]) == ("choice", True, len(ROWS)) and last["n"] == 3
    whole, _ = evaluate(models[0], config(["choice"], tasks, shots=1, limit=last["n"]))
    assert last["results"] == whole[0]["results"]


def test_tasks_that_are_unknown_are_refused_with_the_nearest_name(tasks: Path) -> None:
    with pytest.raises(UserError, match="has no task choise") as error:
        load_tasks(["choise"], str(tasks))
    assert error.value.fix == "did you mean choice?"
    with pytest.raises(UserError, match="the folder of tasks does not exist"):
        load_tasks(["choice"], str(tasks / "missing"))


def test_tasks_without_their_data_name_the_data_set_and_what_to_type(tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(
        (tasks / "choice.yaml")
        .read_text()
        .replace("dataset_path: json", "dataset_path: owner/rows\ndataset_name: part")
    )
    (tmp_path / "all.yaml").write_text("group: all\ntask: [choice]\n")
    with pytest.raises(
        UserError, match=r"the data set owner/rows \(part\) of the task choice is not on this machine"
    ) as error:
        load_tasks(["all"], str(tmp_path))
    assert """python -c 'from lm_eval.tasks import TaskManager; TaskManager().load("all")'""" in error.value.fix
    with pytest.raises(UserError) as error:
        load_tasks(["choice"], str(tmp_path))
    assert """python -c 'import datasets; datasets.load_dataset("owner/rows", "part")'""" in error.value.fix


def test_tasks_with_damaged_files_or_rows_are_refused(models: list[Path], tasks: Path, tmp_path: Path) -> None:
    for old, new, message in (
        ("rows.jsonl", "none.jsonl", "the task choice cannot be loaded: FileNotFoundError"),
        ('"{{answer}}"', '"{{nothing.at.all}}"', "the task choice cannot be loaded: UndefinedError"),
        ("test_split: test", "test_split: tset", "the task choice cannot be loaded: KeyError"),
    ):
        (tmp_path / "choice.yaml").write_text((tasks / "choice.yaml").read_text().replace(old, new))
        with pytest.raises(UserError, match=message):
            load_tasks(["choice"], str(tmp_path))
    evaluate(models[0], config(["choice"], tasks, limit=1))


def test_tasks_whose_answers_do_not_fit_into_the_model_are_refused(
    models: list[Path], tasks: Path, tmp_path: Path
) -> None:
    for old, new, message in (
        ("max_gen_toks: 12", "max_gen_toks: 128", "generates up to 128 tokens, the model takes 128"),
        ("12,", "12, num_beams: 4,", "num_beams=4"),
    ):
        (tmp_path / "answer.yaml").write_text((tasks / "answer.yaml").read_text().replace(old, new))
        with pytest.raises(UserError, match=message):
            evaluate(models[0], config(["answer"], tmp_path))


def test_metric_and_data_settings_are_refused_with_tasks(tasks: Path) -> None:
    data = config(["letters"], tasks).data
    for changes in ({"metric": "exact_match"}, {"data": dataclasses.replace(data, max_length=64)}):
        with pytest.raises(UserError, match="two kinds of evaluation"):
            config(["letters"], tasks, **changes)
    with pytest.raises(UserError, match="what to evaluate is missing"):
        config([], tasks)
