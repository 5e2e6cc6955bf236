"""Columns of rows beside those that training reads: what must not be ignored, and which columns a user may have meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from data.types import BadRowError

HIDE_MEDIA = "; or train on their text without it: 'data.columns={{{name}: null}}'"
FIELD_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
MEDIA_FIELDS = ("image", "images", "audio", "audios", "video", "videos")
LOSS_TERM = re.compile(
    r"(no|skip)?loss(es|mask|weight)?|(un)?train(s|ed|ing|able)?|(un)?mask(s|ed|ing)?|ignored?|skip(ped)?|learn(ed|able)?|(un)?supervised?|weights?|weighted|exclude[ds]?",
    re.IGNORECASE,
)  # of the name of a field: whether tokens have loss
VERDICT_FIELDS = ("label", "kto_tag")  # of KTO: whether the answer is a good one
VERDICTS = ((True, False), (1, 0), ("true", "false"), ("True", "False"), ("1", "0"))  # (good, bad)
CHAT_TYPES, TEXT_TYPES = (str, list, int, float), (str,)  # a number is refused by the schema
QUESTIONS = "prompt question query instruction input problem user human request q 问题 提问 指令 输入".split()
ANSWERS = "completion answer response output reply solution target assistant gpt bot a 答案 回答 回复 输出".split()
# By data format: the fields of a schema, and the columns that may be meant by each.
SYNONYMS: dict[str, list[dict[str, list[str]]]] = {
    "preference": [
        {
            "prompt": QUESTIONS,
            "chosen": "chosen accepted preferred preferred_response response_chosen chosen_response good win better".split(),
            "rejected": "rejected dispreferred rejected_response response_rejected bad lose worse".split(),
        },
        {"chosen": ["chosen_messages"], "rejected": ["rejected_messages"]},
    ],
    "chat": [
        {"messages": "messages conversation conversations dialog dialogue chat turns".split()},
        {"instruction": ["instruction"], "output": ANSWERS},
        {"prompt": QUESTIONS, "completion": ANSWERS},
    ],
    "text": [
        {
            "text": "text content body document article passage raw_content raw_text page_content story sentence code 文本 内容 正文".split()
        }
    ],
}


def check_no_ignored_content(row: dict, data_format: str, where: str) -> None:
    """Raise BadRowError for a field that says what the model is to learn and that training cannot use: images, audio,
    video, a verdict on the answer.
    """
    check_no_media(row, where, HIDE_MEDIA)
    if data_format == "chat" and (name := has_verdict(row)):
        good = _good_verdict(row[name])
        keep = f"jq -c '{'.[] | ' * where.endswith(']')}select(.{name} == {json.dumps(good)}) | del(.{name})' FILE"
        # a table, probably
        keep = f"leave out rows whose {name} is not {good}, and this column" if isinstance(good, str) else keep
        fix = f"keep the good answers, without the field: {keep}; or learn all of them as if they were good: 'data.columns={{{name}: null}}'"
        message = f"the field {name} tells good answers from bad ones (KTO), and this stage would learn both"
        raise BadRowError("answer with a verdict", message, f"{where} {name}", fix)


def check_no_media(fields: dict, where: str, other_fix: str = "") -> None:
    """Raise BadRowError if a row or a message has images, audio or video."""
    for name in MEDIA_FIELDS:
        if fields.get(name):
            message = f"the field {name} cannot be trained on: models of this program read and write text"
            raise BadRowError(
                "not only text", message, f"{where} {name}", f"use rows of text only{other_fix.format(name=name)}"
            )


def check_no_loss_mask(fields: dict, where: str) -> None:
    """Raise BadRowError if a message, or a part of one, has a field whose name says which tokens have loss; those that
    are read must be removed before.
    """
    for name, value in fields.items():
        if value not in (None, "", []) and any(map(LOSS_TERM.fullmatch, FIELD_PART.findall(str(name)))):
            message = (
                f"the field {name} seems to say what has loss, and it is not read: all answers would be trained on"
            )
            fix = f'write "weight": 0 in a message without loss, which is read (also loss_weight: 0, train: false); and remove {name}'
            raise BadRowError("loss mask that is not read", message, f"{where}.{name}", fix)


def has_verdict(row: dict) -> str:
    """Return the field that says whether the answer of the row is a good one, "" if there is none."""
    return next((name for name in VERDICT_FIELDS if name in row and _good_verdict(row[name]) is not None), "")


def _good_verdict(verdict: Any) -> Any:
    """Return what a good answer has in place of `verdict`; None if that is no verdict."""
    return next((good for good, bad in VERDICTS if type(verdict) is type(good) and verdict in (good, bad)), None)


def columns_override(row: dict, data_format: str) -> str:
    """Return the quoted override of data.columns by which `row` may get the fields of a schema of `data_format`, ""
    without a guess.
    """
    from data.sources.files import HIDDEN

    row = {name: value for name, value in row.items() if not str(name).endswith(HIDDEN)}
    for fields in SYNONYMS[data_format]:
        if columns := _guess(row, fields, TEXT_TYPES if data_format == "text" else CHAT_TYPES):
            return columns_setting(columns)
    known = SYNONYMS["text"][0]["text"]
    texts = [name for name, value in row.items() if isinstance(value, str) and any(part in str(name) for part in known)]
    return columns_setting({"text": texts[0]}) if data_format == "text" and len(texts) == 1 else ""


def _guess(row: dict, fields: dict[str, list[str]], types: tuple[type, ...]) -> dict[str, str]:
    """Return the column of each field, without those of the same name; {} if a field has none."""
    by_name = {
        str(name).strip().lower().replace(" ", "_"): name
        for name, value in reversed(row.items())
        if isinstance(value, types)
    }
    guess: dict[str, str] = {}
    for field, names in fields.items():
        column = next(
            (by_name[name] for name in names if name in by_name and by_name[name] not in guess.values()), None
        )
        if column is None or (field == "messages" and not isinstance(row[column], list)):
            return {}
        guess[field] = column
    return {field: column for field, column in guess.items() if field != column}


def columns_setting(columns: Mapping[str, str | None]) -> str:
    """Return `'data.columns={prompt: question}'`, quoted for a shell; a name with special characters is quoted for
    Hydra, too.
    """
    items = (f"{field}: {'null' if column is None else _quoted(column)}" for field, column in columns.items())
    return f"'data.columns={{{', '.join(items)}}}'"


def _quoted(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in (
        "true",
        "false",
        "null",
        "nan",
        "inf",
    )
    return name if plain else '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''") + '"'


def unused_fields(row: dict, fields: Iterable[str]) -> list[str]:
    """Return the names of the fields of a row, or of a message, that are not null and not in `fields`."""
    return [str(name) for name in row.keys() - fields if row[name] is not None]
