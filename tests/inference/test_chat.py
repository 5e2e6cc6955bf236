"""Talking to a model: whole characters, harmless ones, as its run was trained, and again the same with the same seed."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from data.tokenize.tokenizer import Tokenizer
from runner.inference.chat import ChatConfig, ChatSession, TokenStreamer, chat
from runner.inference.load import load_trained, weights_dir

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


def words(folder: Path, **changes: object) -> ChatConfig:
    given = {"run": str(folder), "prompt": None, "mode": "auto", "system": None, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    given |= {"repetition_penalty": 1.0, "max_new_tokens": 12, "seed": 0, "device": "cpu"}
    return ChatConfig(**given | changes)  # type: ignore[arg-type]  # values of many types in one dict


def speaker(folder: Path, **changes: object) -> ChatSession:
    return ChatSession(load_trained(folder, "cpu"), words(folder, **changes))


def as_run(hf_folder: Path, folder: Path, rows: str) -> Path:
    shutil.copytree(hf_folder, folder / "model")
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(f"stage:\n  rows: {rows}\n")
    (folder / "run.json").write_text('{"status": "completed"}')
    return folder


def test_a_character_of_several_tokens_is_said_whole() -> None:
    tokenizer, said = Tokenizer.load(TOKENIZER), []
    text = "龘 and 🦄, 托洛最喜欢棕色。"
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids), "a rare character has to be spread over tokens for this test"
    voice = TokenStreamer(tokenizer, said.append)
    for token in ids:
        voice.hear(token)
    assert voice.end() == text == "".join(said) and not any("\ufffd" in part for part in said)


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    tokenizer, said = Tokenizer.load(TOKENIZER), []
    voice = TokenStreamer(tokenizer, said.append)
    for token in tokenizer.encode("a\x1b[2Jb\nc"):
        voice.hear(token)
    assert voice.end() == "a\x1b[2Jb\nc" and "".join(said) == "a\\x1b[2Jb\nc"


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(hf_folder: Path) -> None:
    answers = [speaker(hf_folder, seed=seed).answer("Where does Ludo live?", lambda text: None) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(("rows", "chats"), [("text", False), ("chat", True), ("preference", True)])
def test_a_run_is_spoken_to_as_it_was_trained(hf_folder: Path, tmp_path: Path, rows: str, chats: bool) -> None:
    folder = as_run(hf_folder, tmp_path, rows)
    assert speaker(folder).chats is chats
    assert speaker(folder, mode="chat").chats and not speaker(folder, mode="text").chats


def test_a_folder_without_a_run_is_spoken_to_as_its_tokenizer_says(hf_folder: Path) -> None:
    assert speaker(hf_folder).chats


def test_a_long_conversation_loses_its_oldest_turns_and_keeps_its_system_message(hf_folder: Path) -> None:
    talking = speaker(hf_folder, system="Be brief.")
    for turn in range(12):
        talking.answer(f"Question number {turn}: where does Ludo live?", lambda text: None)
    said = [message["content"] for message in talking._turns]
    assert said[0] == "Be brief." and "number 11" in said[-2] and not any("number 0" in content for content in said)
    assert [message["role"] for message in talking._turns[1:3]] == ["user", "assistant"]


def test_a_question_longer_than_the_model_is_refused(hf_folder: Path) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        speaker(hf_folder).answer("word " * 200, lambda text: None)


def test_a_conversation_goes_on_after_a_refusal_and_ends_with_its_input(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 200 + "\nWhere does Ludo live?\n/new\n\nAnd Tami?\n"))
    chat(words(hf_folder), hf_folder)
    out = capsys.readouterr().out
    assert out.startswith("the text of") and out.count("\n") >= 3


def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError) as refusal:
        weights_dir(tmp_path)
    assert f"resume={tmp_path}" in refusal.value.args[2]
