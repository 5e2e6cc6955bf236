"""DataConfig: the checks of the settings of the group `data`."""

import pytest

from common.errors import UserError
from data.config import DataConfig

VALID = {
    "name": "own", "path": "a.jsonl", "weights": None, "columns": None, "encoding": None, "text_unit": "file", "turns": "strict", "schema": None, "val_path": "auto", "val_fraction": 0.01, "val_duplicates": "auto", "tokenizer": "tokenizer", "max_length": 64,
    "too_long": "auto", "on_bad_row": "error", "max_bad_fraction": 0.01, "loss_on": "assistant", "packing": "best_fit", "group_by_length": False,
    "system_prompts": [], "system_prob": 0.0, "empty_think_prob": 0.0, "cache": "cache", "num_workers": 0, "worker_timeout": 0.0,
}  # fmt: skip


def test_data_config_accepts_a_path_and_a_list_of_weighted_paths():
    assert DataConfig(**VALID).paths == ["a.jsonl"]
    assert DataConfig(**VALID | {"path": ["a.jsonl", "b.jsonl"], "weights": [3.0, 1.0]}).paths == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    "changes, message, setting, fix",
    [
        ({"path": []}, "must name a file", "data.path=[]", "data.path="),
        ({"path": ["a.jsonl", 3]}, "must name a file", "data.path=['a.jsonl', 3]", "data.path="),
        (
            {"columns": "question"},
            "must name the column of each field, got question",
            "data.columns=question",
            "data.columns={prompt: question",
        ),
        (
            {"columns": {"question": "prompt"}},
            "no row schema has: question",
            "data.columns={question: prompt}",
            "data.columns={prompt: question}",
        ),
        ({"columns": {"promt": "q"}}, "no row schema has: promt", "data.columns={promt: q}", "did you mean prompt?"),
        ({"encoding": "hex"}, "an encoding of text that Python knows, got hex", "data.encoding=hex", "data.encoding="),
        ({"text_unit": "row"}, "must be one of file, line, got row", "data.text_unit=row", "data.text_unit="),
        (
            {"weights": [1.0, 2.0]},
            "one number per entry of data.path, got 2 for 1",
            "data.weights=[1.0, 2.0]",
            "data.weights=[1]",
        ),
        ({"weights": [0.0]}, "must be positive numbers", "data.weights=[0.0]", "remove the entry"),
        ({"weights": [float("inf")]}, "must be positive numbers", "data.weights=[inf]", "remove the entry"),
        ({"schema": "alpaka"}, "data.schema must be one of text, ", "data.schema=alpaka", "did you mean alpaca?"),
        (
            {"too_long": "cut"},
            "must be one of auto, truncate, drop, split, got cut",
            "data.too_long=cut",
            "data.too_long=",
        ),
        ({"on_bad_row": "drop"}, "must be one of error, skip, got drop", "data.on_bad_row=drop", "data.on_bad_row="),
        (
            {"loss_on": "user"},
            "must be one of assistant, last_assistant, all, got user",
            "data.loss_on=user",
            "data.loss_on=",
        ),
        ({"packing": "pack"}, "must be one of none, best_fit, got pack", "data.packing=pack", "data.packing="),
        ({"max_length": 1}, "must be at least 2, got 1", "data.max_length=1", "data.max_length="),
        ({"val_fraction": 1.0}, "must be auto or in [0, 1), got 1.0", "data.val_fraction=1.0", "data.val_fraction="),
        (
            {"val_fraction": "some"},
            "must be auto or in [0, 1), got some",
            "data.val_fraction=some",
            "data.val_fraction=",
        ),
        ({"system_prob": 1.5}, "must be in [0, 1], got 1.5", "data.system_prob=1.5", "data.system_prob="),
        (
            {"empty_think_prob": float("nan")},
            "must be in [0, 1], got nan",
            "data.empty_think_prob=nan",
            "data.empty_think_prob=",
        ),
        (
            {"group_by_length": True},
            "needs data.packing=none, got best_fit",
            "data.group_by_length=true",
            "data.packing=none",
        ),
        ({"system_prob": 0.5}, "needs data.system_prompts", "data.system_prob=0.5", "data.system_prompts="),
        ({"num_workers": -1}, "must be at least 0, got -1", "data.num_workers=-1", "data.num_workers="),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_data_config_error_names_the_value_and_an_allowed_one(changes, message, setting, fix):
    with pytest.raises(UserError) as error:
        DataConfig(**VALID | changes)
    assert message in error.value.message and error.value.setting == setting and fix in error.value.fix
