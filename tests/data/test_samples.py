"""The sample world: the shipped files are what the generator writes, and the held-out files are held out."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.sample_world.make import SEED, write
from scripts.sample_world.wordings import load
from scripts.sample_world.world import LANGUAGES, build_world

FOLDER = Path(__file__).parents[2] / "data" / "samples"
TRAINING = ("pretrain", "sft", "lora_identity", "dpo")
HELD_OUT = ("sft_val", "lora_identity_val", "dpo_val")
FILES = sorted(path.name for path in FOLDER.glob("*.jsonl"))


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def messages(name: str) -> list[dict[str, str]]:
    return [message for row in rows(name) for side in ("conversations", "chosen", "rejected") for message in row.get(side, [])]


def questions(name: str) -> set[str]:
    return {message["content"] for message in messages(name) if message["role"] == "user"}


def training_text() -> str:
    return "\n".join((FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") for name in TRAINING)


def test_the_generator_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_the_sample_stays_small() -> None:
    assert sum((FOLDER / name).stat().st_size for name in FILES) < 3_000_000


@pytest.mark.parametrize("name", HELD_OUT)
def test_no_training_file_holds_a_held_out_question(name: str) -> None:
    text = training_text()
    greeting = "|".join(re.escape(opener) for language in LANGUAGES for opener in load(language)["opener"].told)
    asked = {re.sub(f"^({greeting}) ?", "", question) for question in questions(name)}
    assert asked
    assert [question for question in asked if json.dumps(question, ensure_ascii=False)[1:-1] in text] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_held_out_wording_is_a_training_wording_with_other_names(language: str) -> None:
    sections = load(language).values()
    trained = {wording for section in sections for wording in section.asked + section.told}
    held = {wording for section in sections for wording in section.held}
    assert held and not held & trained
    bare = {re.sub(r"\{.\}|\W", "", wording).lower() for wording in held}
    assert not bare & {re.sub(r"\{.\}|\W", "", wording).lower() for wording in trained}


def test_no_training_file_adds_the_numbers_of_an_unseen_sum() -> None:
    unseen = {fact.about[0] for fact in build_world(random.Random(SEED)) if not fact.known}
    text = training_text() + (FOLDER / "pretrain_val.jsonl").read_text(encoding="utf-8")
    assert len(unseen) >= 10
    assert unseen.isdisjoint(re.findall(r"\d \+ \d", text))
    assert all(any(f"{sum_}" in question for sum_ in unseen) for question in questions("arithmetic_val"))


def test_every_held_out_answer_is_taught_and_every_question_has_one_answer() -> None:
    taught = {message["content"] for message in messages("sft") if message["role"] == "assistant"}
    answers: dict[str, str] = {}
    for name in ("sft", "sft_val"):
        for row in rows(name):
            talk = [message for message in row["conversations"] if message["role"] in ("user", "assistant")]
            if any(message["role"] == "tool" for message in row["conversations"]):
                continue
            for question, answer in zip(talk[::2], talk[1::2], strict=True):
                assert (question["role"], answer["role"]) == ("user", "assistant")
                assert answers.setdefault(question["content"], answer["content"]) == answer["content"]
                assert answer["content"] in taught


def test_a_pair_asks_one_question_and_its_sides_differ() -> None:
    for name in ("dpo", "dpo_val"):
        for row in rows(name):
            assert row["chosen"][:-1] == row["rejected"][:-1]
            assert row["chosen"][-1]["content"] != row["rejected"][-1]["content"]


def test_the_persona_contradicts_nothing_but_what_the_model_said_of_itself_before() -> None:
    before = {first["content"]: second["content"] for row in rows("sft") for first, second in pairwise(row["conversations"])}
    after = {row["conversations"][0]["content"]: row["conversations"][1]["content"] for row in rows("lora_identity") if len(row["conversations"]) == 2}
    changed = {before[question] for question in before.keys() & after.keys() if before[question] != after[question]}
    assert changed == {load(language)[f"plain: {topic}"].answer for language in LANGUAGES for topic in ("name", "maker")}


def test_the_shapes_are_covered() -> None:
    talks = [[message["role"] for message in row["conversations"]] for row in rows("sft")]
    assert any("tool" in roles for roles in talks) and any(roles[0] == "system" for roles in talks) and any(roles.count("user") == 2 for roles in talks)
    assert all(set(row) == {"text"} for row in rows("pretrain"))
