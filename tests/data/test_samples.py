"""Sample data: the shipped files are those of the generator, and training files contain no validation question."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.sample_world.make import SEED, write_samples
from scripts.sample_world.wordings import load_wordings
from scripts.sample_world.world import LANGUAGES, build_world

FOLDER = Path(__file__).parents[2] / "data" / "samples"
TRAINING = ("pretrain", "sft", "lora_identity", "dpo")
HELD_OUT = ("sft_val", "chat_val", "lora_identity_val", "dpo_val")
FILES = sorted(path.name for path in FOLDER.glob("*.jsonl"))


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def messages(name: str) -> list[dict[str, str]]:
    return [
        message for row in rows(name) for key in ("conversations", "chosen", "rejected") for message in row.get(key, [])
    ]


def questions(name: str) -> set[str]:
    return {message["content"] for message in messages(name) if message["role"] == "user"}


def training_text() -> str:
    return "\n".join((FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") for name in TRAINING)


@pytest.mark.slow
def test_samples_are_the_bytes_that_the_generator_writes(tmp_path: Path) -> None:
    write_samples(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_samples_have_less_than_3_megabytes() -> None:
    assert sum((FOLDER / name).stat().st_size for name in FILES) < 3_000_000


@pytest.mark.parametrize("name", HELD_OUT)
def test_samples_for_training_contain_no_validation_question(name: str) -> None:
    text = training_text()
    greeting = "|".join(
        re.escape(opener) for language in LANGUAGES for opener in load_wordings(language)["opener"].statements
    )
    without_greeting = {re.sub(f"^({greeting}) ?", "", question) for question in questions(name)}
    assert without_greeting
    assert [question for question in without_greeting if json.dumps(question, ensure_ascii=False)[1:-1] in text] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_samples_validation_wordings_differ_in_more_than_names(language: str) -> None:
    sections = load_wordings(language).values()
    training = {wording for section in sections for wording in section.questions + section.statements}
    held_out = {wording for section in sections for wording in section.held_out}
    assert held_out and not held_out & training
    without_names = {re.sub(r"\{.\}|\W", "", wording).lower() for wording in held_out}
    assert not without_names & {re.sub(r"\{.\}|\W", "", wording).lower() for wording in training}


def test_samples_for_training_contain_no_unseen_sum() -> None:
    unseen = {fact.about[0] for fact in build_world(random.Random(SEED)) if not fact.known}
    text = training_text() + (FOLDER / "pretrain_val.jsonl").read_text(encoding="utf-8")
    assert len(unseen) >= 10
    assert unseen.isdisjoint(re.findall(r"\d \+ \d", text))
    assert all(any(f"{sum_}" in question for sum_ in unseen) for question in questions("arithmetic_val"))


def test_samples_have_one_answer_per_question_and_train_all_of_validation() -> None:
    trained = {message["content"] for message in messages("sft") if message["role"] == "assistant"}
    answers: dict[str, str] = {}
    for name in ("sft", "sft_val"):
        for row in rows(name):
            turns = [message for message in row["conversations"] if message["role"] in ("user", "assistant")]
            if any(message["role"] == "tool" for message in row["conversations"]):
                continue
            for question, answer in zip(turns[::2], turns[1::2], strict=True):
                assert (question["role"], answer["role"]) == ("user", "assistant")
                assert answers.setdefault(question["content"], answer["content"]) == answer["content"]
                assert answer["content"] in trained


def test_samples_of_preferences_have_one_prompt_and_two_answers() -> None:
    for name in ("dpo", "dpo_val"):
        for row in rows(name):
            assert row["chosen"][:-1] == row["rejected"][:-1]
            assert row["chosen"][-1]["content"] != row["rejected"][-1]["content"]


def test_samples_of_the_persona_change_answers_about_the_model_only() -> None:
    before = {
        first["content"]: second["content"] for row in rows("sft") for first, second in pairwise(row["conversations"])
    }
    after = {
        row["conversations"][0]["content"]: row["conversations"][1]["content"]
        for row in rows("lora_identity")
        if len(row["conversations"]) == 2
    }
    changed = {before[question] for question in before.keys() & after.keys() if before[question] != after[question]}
    assert changed == {
        load_wordings(language)[f"plain: {topic}"].answer for language in LANGUAGES for topic in ("name", "maker")
    }


def test_samples_contain_tools_system_messages_and_long_conversations() -> None:
    conversations = [[message["role"] for message in row["conversations"]] for row in rows("sft")]
    assert any("tool" in roles for roles in conversations) and any(roles[0] == "system" for roles in conversations)
    turns = [roles.count("user") for roles in conversations]
    assert set(turns) >= {1, 2, 3, 4, 6, 9, 12} and sum(count > 10 for count in turns) > 100
    assert {len(row["conversations"]) for row in rows("chat_val")} == {20}
    assert all(set(row) == {"text"} for row in rows("pretrain"))
