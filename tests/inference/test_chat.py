"""Chat: complete and harmless characters, the mode of the run's data, reproducible sampling, conversations that outgrow
the model.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.tokenizer import Tokenizer
from models.generate import Row, Sampler
from runner.inference.chat import ChatConfig, ChatSession, chat, repl, trained_length
from runner.inference.generation import Answer
from runner.inference.load import load_trained, weights_dir

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


def chat_config(folder: Path, **changes: object) -> ChatConfig:
    values = {
        "run": str(folder),
        "prompt": None,
        "mode": "auto",
        "system": None,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
    }
    values |= {
        "repetition_penalty": 1.0,
        "max_new_tokens": 12,
        "seed": 0,
        "device": "cpu",
        "dtype": "fp32",
    }
    return ChatConfig(**values | changes)  # type: ignore[arg-type]  # values of many types in one dict


def open_session(folder: Path, **changes: object) -> ChatSession:
    return ChatSession(load_trained(folder, "cpu"), chat_config(folder, **changes))


def write_run(hf_folder: Path, folder: Path, data_format: str) -> Path:
    shutil.copytree(hf_folder, folder / "model")
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(f"stage:\n  data_format: {data_format}\n")
    (folder / "run.json").write_text('{"status": "completed"}')
    return folder


def new_answer(tokenizer: Tokenizer) -> Answer:
    sampler = Sampler(temperature=0, top_k=0, top_p=1, penalty=1)
    return Answer(prompt=[1], limit=1000, sampler=sampler, stop_ids=(), tokenizer=tokenizer)


def stream(text: str) -> tuple[str, list[str]]:
    """The decoded text, and what was written."""
    tokenizer, written = Tokenizer.load(TOKENIZER), []
    answer = new_answer(tokenizer)
    answer.on_text = written.append
    for token in tokenizer.encode(text):
        answer.add(token)
    answer.end()
    return answer.text, written


def test_answer_is_written_in_complete_characters_only() -> None:
    text = "龘 and 🦄, 托洛最喜欢棕色。"
    tokenizer = Tokenizer.load(TOKENIZER)
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokenizer.encode(text)), (
        "the text needs a character of several tokens"
    )
    decoded, written = stream(text)
    assert decoded == text == "".join(written) and not any("\ufffd" in part for part in written)


def dropping_first_space(hf_folder: Path, folder: Path) -> Path:
    """Return a copy whose tokenizer drops the space at the beginning of a text."""
    file = shutil.copytree(hf_folder, folder) / "tokenizer.json"
    stored = json.loads(file.read_text())
    dropping = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    file.write_text(json.dumps(stored | {"decoder": {"type": "Sequence", "decoders": [stored["decoder"], dropping]}}))
    return folder


def test_chat_keeps_the_space_between_a_prompt_and_its_continuation(hf_folder: Path, tmp_path: Path) -> None:
    """Tokenizers of Llama 2 drop the space at the beginning of a text."""
    other = dropping_first_space(hf_folder, tmp_path / "other")
    sessions = [open_session(folder, mode="text", max_new_tokens=2) for folder in (hf_folder, other)]
    answers = [[session.answer("Ludo lives", lambda text: None) for _ in range(4)] for session in sessions]
    assert answers[1] == answers[0] and any(text.startswith(" ") for text in answers[0])


def test_answer_keeps_the_space_behind_a_token_without_text(hf_folder: Path, tmp_path: Path) -> None:
    """An unused id, or a control token, of a model whose tokenizer drops the space at the beginning of a text."""
    tokenizer = Tokenizer.load(dropping_first_space(hf_folder, tmp_path / "other"))
    answer = new_answer(tokenizer)
    for token in [*tokenizer.encode("Ludo"), tokenizer.pad_id, *tokenizer.encode(" lives")]:
        answer.add(token)
    assert answer.text == tokenizer.decode(answer.ids) == "Ludo lives"
    for _ in range(100):
        answer.add(tokenizer.pad_id)
    assert len(answer.before) < 20, "the time of an answer was quadratic in such tokens"


def test_chat_escapes_control_characters_of_an_answer(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2Jb\nc"

    def fake_generate(model: object, rows: list[Row], *_: object) -> None:
        for token in Tokenizer.load(TOKENIZER).encode(text):
            rows[0].add(token)

    monkeypatch.setattr("models.generate.generate_rows", fake_generate)
    assert open_session(hf_folder).answer("Who?", lambda piece: None) == text
    chat(chat_config(hf_folder, prompt="Who?"), hf_folder)
    assert capsys.readouterr().out == "a\\x1b[2Jb\nc\n"


def test_chat_answer_is_a_function_of_the_seed(hf_folder: Path) -> None:
    answers = [
        open_session(hf_folder, seed=seed).answer("Where does Ludo live?", lambda text: None) for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(("data_format", "is_chat"), [("text", False), ("chat", True), ("preference", True)])
def test_chat_mode_auto_follows_the_data_format_of_the_run(
    hf_folder: Path, tmp_path: Path, data_format: str, is_chat: bool
) -> None:
    folder = write_run(hf_folder, tmp_path, data_format)
    assert open_session(folder).is_chat is is_chat
    assert open_session(folder, mode="chat").is_chat and not open_session(folder, mode="text").is_chat


def test_chat_mode_auto_follows_the_tokenizer_without_a_run(hf_folder: Path) -> None:
    assert open_session(hf_folder).is_chat


@pytest.mark.slow
def test_chat_drops_the_oldest_turns_and_keeps_the_system_message(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, shown = open_session(hf_folder, system="Be brief."), []
    encode = ChatTemplate.encode_prompt
    monkeypatch.setattr(ChatTemplate, "encode_prompt", lambda *all: shown.append(all[1]) or encode(*all))
    for turn in range(12):
        session.answer(f"Question number {turn}: where does Ludo live?", lambda text: None)
    assert len(session.messages) == 25  # for /save
    contents = [message["content"] for message in shown[-1]]
    assert (
        contents[0] == "Be brief."
        and "number 11" in contents[-1]
        and not any("number 0" in content for content in contents)
    )
    assert [message["role"] for message in shown[-1][1:3]] == ["user", "assistant"]


def test_chat_goes_on_after_an_empty_answer(hf_folder: Path) -> None:
    session = open_session(hf_folder)
    session.messages += [{"role": "user", "content": "Where does Ludo live?"}, {"role": "assistant", "content": ""}]
    session.answer("And who is Ludo?", lambda text: None)
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2


def write_stage(folder: Path, init_from: object, **data: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"status": "completed", "init_from": str(init_from), "data": [data]}))


def test_chat_notes_once_that_a_conversation_is_longer_than_in_training(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(hf_folder, tmp_path, "preference")
    write_stage(tmp_path / "pretrain", "scratch", longest_conversation=0, most_answers=0)
    write_stage(tmp_path / "sft", tmp_path / "pretrain", longest_conversation=90, most_answers=2)
    # DPO pairs of one turn do not make the model forget two
    write_stage(run, tmp_path / "sft", longest_conversation=40, most_answers=1)
    session = open_session(run, max_new_tokens=2)
    notes = []
    for text in ("a", "b", "c", "d"):
        session.answer(text, lambda text: None)
        notes.append(capsys.readouterr().err)
    answers = "note: answer 3 of this conversation, those of the training have at most 2: answers may be wrong; /new starts a new conversation\n"
    assert notes == ["", "", answers, ""]
    session.clear()
    session.answer("a b c d " * 24, lambda text: None)
    assert "tokens, those of the training have at most 90" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["weights from outside", "deleted run", "older run", "circle"])
def test_chat_notes_nothing_where_the_length_of_the_training_is_not_known(
    hf_folder: Path, tmp_path: Path, case: str
) -> None:
    run = write_run(hf_folder, tmp_path, "chat")
    sources = {
        "weights from outside": hf_folder,
        "deleted run": tmp_path / "deleted",
        "older run": "scratch",
        "circle": run,
    }
    counts = {} if case == "older run" else {"longest_conversation": 9, "most_answers": 1}
    write_stage(run, sources[case], **counts)
    assert trained_length(run) is None


def test_chat_refuses_a_prompt_longer_than_the_model(hf_folder: Path) -> None:
    with pytest.raises(UserError, match="the model of 128 positions takes 116"):
        open_session(hf_folder).answer("text " * 200, lambda text: None)


def test_chat_continues_after_a_refused_prompt_until_its_input_ends(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("text " * 200 + "\nWhere does Ludo live?\n/new\n\nAnd Tami?\n"))
    chat(chat_config(hf_folder), hf_folder)
    out = capsys.readouterr().out
    assert out.startswith("error: the prompt has") and out.count("\n") >= 3


def type_lines(monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> None:
    """Let a terminal deliver these lines; lines of one text are there together, as a paste is without readline."""
    lines = [line for text in typed for line in (text.split("\n") if isinstance(text, str) else [text])]
    pasted = [i for text in typed for i in range(text.count("\n") if isinstance(text, str) else 0, -1, -1)]
    waiting = [0]

    def read(prompt: str = "") -> str:
        line = lines.pop(0) if lines else EOFError
        if not isinstance(line, str):
            raise line
        waiting[0] = pasted[-1 - len(lines)]
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("select.select", lambda *_: ([sys.stdin] if waiting[0] else [], [], []))


def chat_typing(folder: Path, monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> ChatSession:
    type_lines(monkeypatch, *typed)
    repl(session := open_session(folder, max_new_tokens=3))
    return session


def user_messages(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.messages if message["role"] == "user"]


def test_chat_names_unknown_commands_with_the_nearest(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat_typing(hf_folder, monkeypatch, "Hello", "/nwe", "/clear all", " /tmp?", "/usr/bin is what?")
    assert user_messages(session) == ["Hello", "/tmp?", "/usr/bin is what?"]
    out = capsys.readouterr().out
    assert "unknown command /nwe: did you mean /new?\nType a message" in out
    assert "unknown command /clear: begin a message with a space\nType a message" in out


def test_chat_shows_its_commands_where_their_arguments_are_wrong(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat_typing(hf_folder, monkeypatch, "/help", "/save", "/exit now", "/new one")
    assert not session.messages and capsys.readouterr().out.count("Type a message") == 5


def test_chat_obeys_no_command_of_a_pipe_but_new_and_exit(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of unknown origin would write files of the user."""
    lines = ["Hello", "/new", f"/save {tmp_path / 'a.jsonl'}", "/help me", "/exit", "more"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    repl(session := open_session(hf_folder, max_new_tokens=3))
    assert user_messages(session) == [f"/save {tmp_path / 'a.jsonl'}", "/help me"] and not list(tmp_path.glob("a.*"))
    assert "Type a message" not in capsys.readouterr().out


def test_chat_takes_lines_that_go_on_and_pasted_lines_as_one_message(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = chat_typing(hf_folder, monkeypatch, "one\\", "two", "three\n  four\n", "five")
    assert user_messages(session) == ["one\ntwo", "three\n  four", "five"]


def test_chat_keeps_the_conversation_after_ctrl_c(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from models import generate

    compute, calls = generate.generate_rows, iter(range(9))

    def interrupt_the_second(model: object, rows: list[Row], *rest: object) -> None:
        if next(calls) == 1:
            rows[0].add(65)
            raise KeyboardInterrupt
        compute(model, rows, *rest)  # type: ignore[arg-type]  # *rest: the callbacks of the call, as objects

    monkeypatch.setattr(generate, "generate_rows", interrupt_the_second)
    session = chat_typing(hf_folder, monkeypatch, "one", KeyboardInterrupt, "two", "thr\\", KeyboardInterrupt, "four")
    assert user_messages(session) == ["one", "two", "four"]
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 3
    partial = session.messages[3]["content"]
    assert partial == session.trained.tokenizer.decode([65])


def test_chat_refused_message_leaves_the_conversation_as_it_was(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_messages(chat_typing(hf_folder, monkeypatch, "one", "text " * 200, "two")) == ["one", "two"]


def test_chat_saves_conversations_as_training_data(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jsonl"
    (tmp_path / "folder.jsonl").mkdir()
    others = [f"/save {tmp_path}/folder.jsonl", f"/save {tmp_path}/victim.sh", "/new", f"/save {file}"]
    typed = ["Hello", f"/save {file}", "/new", "Ciao", f"/save {file}", *others]
    session = chat_typing(hf_folder, monkeypatch, *typed)
    first, second = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [row[0] for row in (first, second)] == [{"role": "user", "content": text} for text in ("Hello", "Ciao")]
    out = capsys.readouterr().out
    assert not session.messages and not (tmp_path / "victim.sh").exists()
    assert "error: [Errno 21] Is a directory" in out and "error: there is no answer to save" in out
    assert f"{tmp_path}/victim.sh is no JSON Lines file; type /save FILE.jsonl" in out


def test_chat_saves_no_question_without_an_answer(hf_folder: Path, tmp_path: Path) -> None:
    session = open_session(hf_folder, system="Be brief.")
    turns = [("user", "one"), ("assistant", ""), ("user", "two"), ("assistant", "2")]
    session.messages += [{"role": role, "content": content} for role, content in turns]
    session.save(tmp_path / "chat.jsonl")
    saved = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    assert [message["content"] for message in saved] == ["Be brief.", "two", "2"]


def test_model_of_a_run_that_is_a_link_is_not_loaded(tmp_path: Path, hf_folder: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(hf_folder)
    with pytest.raises(UserError, match="this is a link"):
        load_trained(tmp_path / "run", "cpu")


def test_load_refuses_an_unfinished_run_and_names_what_works(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError) as error:
        weights_dir(tmp_path)
    # a run that still trains refuses a resume
    assert f"resume={tmp_path}; " in error.value.fix and f"run={tmp_path}@last" in error.value.fix


def test_tokenizer_with_an_id_beyond_the_model_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(hf_folder, tmp_path / "model")) / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["vocab"]["\u0120the"] = 6400
    file.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="a token with the id 6,400, the model has ids below 6,400"):
        load_trained(tmp_path / "model", "cpu")


@pytest.mark.parametrize("changes", [{"seed": 10**20}, {"repetition_penalty": 1e-40}])
def test_chat_refuses_numbers_that_torch_cannot_sample_with(hf_folder: Path, changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(changes))} must be in"):
        chat_config(hf_folder, **changes)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of a UTF-8 locale, of the locale C
def test_chat_names_a_message_that_is_not_utf8(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xd6\xd0\n"), "utf-8", errors))
    try:
        repl(open_session(hf_folder))
        problem = capsys.readouterr().out
    except UserError as error:
        problem = error.message
    assert "UTF-8" in problem or "utf-8" in problem
