"""The HTTP interface, in this process: answers are those of the model, what is not supported or hostile is refused in
the form of OpenAI's errors.
"""

from __future__ import annotations

import http.client
import json
import queue as threads
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenize.chat_template import ChatTemplate
from models.generate import generate
from runner.inference.load import LoadedModel, load_trained

pytest.importorskip("starlette", reason="part of the extra serve")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Where does Tolo live? 托洛 🐐"},
]


def ask(http: Any, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    fields = (
        ({"messages": MESSAGES} if path == CHAT else {"prompt": "Tolo"}) | {"temperature": 0, "max_tokens": 12} | fields
    )
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: Any, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    fields = (
        ({"messages": MESSAGES} if path == CHAT else {"prompt": "Tolo"})
        | {"temperature": 0, "max_tokens": 12, "stream": True}
        | fields
    )
    lines = [line for line in http.post(path, json=fields).text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def greedy(trained: LoadedModel, ids: list[int], tokens: int = 12) -> list[int]:
    stop_ids = list(trained.tokenizer.stop_ids)
    return generate(
        trained.model,
        [ids],
        max_new_tokens=tokens,
        temperature=0,
        top_k=0,
        top_p=1,
        repetition_penalty=1,
        stop_ids=stop_ids,
    )[0]


def test_serve_answers_chats_as_the_model_does(http: Any, trained: LoadedModel) -> None:
    prompt = ChatTemplate(trained.tokenizer).encode_prompt(MESSAGES)
    expected = greedy(trained, prompt)
    answer = ask(http, CHAT)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": trained.tokenizer.decode(expected),
        "refusal": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(expected),
        "total_tokens": len(prompt) + len(expected),
    }
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["small"] and http.get(
        "/v1/models/small"
    ).json()["id"] == "small"


def test_serve_streams_the_text_and_usage_of_the_whole_answer(http: Any) -> None:
    whole, chunks = ask(http, CHAT), events(http, CHAT, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["usage"] == whole["usage"]
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        == whole["choices"][0]["message"]["content"]
    )
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    texts = [chunk["choices"][0] for chunk in events(http, prompt=["Tolo", "Mina"])]
    for i, choice in enumerate(ask(http, prompt=["Tolo", "Mina"])["choices"]):
        assert "".join(each["text"] for each in texts if each["index"] == i) == choice["text"]


TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call>", "b": {"c": 2}}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        f"Let me see.\n{CALL}",
        f"\n{CALL}\n{CALL}",
        f"{CALL} and {CALL}",
        " no call < at all <tool",
        'broken <tool_call>{"name": 1}</tool_call>',
        f"open {CALL[:-1]}",
    ],
)
def test_serve_streams_calls_of_tools_as_the_whole_answer_has_them(
    http: Any, trained: LoadedModel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    from runner.inference import generation

    def report_text(model: object, rows: Any, *_: object) -> None:
        rows[0].limit = 1000
        for token in trained.tokenizer.encode(text):
            rows[0].add(token)
        rows[0].end(stop_token=next(iter(rows[0].stop_ids)))

    monkeypatch.setattr(generation, "generate_rows", report_text)
    expected = ask(http, CHAT, tools=TOOLS)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(http, CHAT, tools=TOOLS)]
    deltas = [chunk["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    content = "".join(delta.get("content", "") for delta in deltas)
    whole = expected["message"].get("tool_calls", [])
    assert [call["function"] for call in calls] == [call["function"] for call in whole]
    assert [call["index"] for call in calls] == list(range(len(whole)))
    assert len({call["id"] for call in calls}) == len(calls) and {call["type"] for call in calls} <= {"function"}
    assert content.strip() == (expected["message"]["content"] or "").strip()
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [expected["finish_reason"]]
    assert expected["finish_reason"] == ("tool_calls" if calls else "stop")


def test_serve_streams_text_before_a_call_at_once_and_a_call_never_in_parts(trained: LoadedModel) -> None:
    from runner.serving.protocol import ChatRequest, Responder

    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": TOOLS, "stream": True})
    responder = Responder(body, "small", trained.tokenizer)
    sent = [responder.text_event(0, c) for c in f"Sum. {CALL}"]
    assert "".join(sent[:4]).count("data: ") == 4, "each character"
    assert [i for i, event in enumerate(sent) if event] == [0, 1, 2, 3, len(sent) - 1]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tolo", "Mina"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_serve_answers_with_json_of_the_schema(http: Any, is_stream: bool, temperature: float) -> None:
    pytest.importorskip("llguidance", reason="part of the extra json")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    settings = {"response_format": form, "temperature": temperature, "seed": 3, "n": 3, "max_tokens": 100}
    texts = [""] * 3
    if is_stream:
        for chunk in events(http, CHAT, **settings):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    else:
        texts = [choice["message"]["content"] for choice in ask(http, CHAT, **settings)["choices"]]
    for text in texts:
        person = json.loads(text)
        assert list(person) == ["name", "age"] and person["name"] in ("Tolo", "Mina") and type(person["age"]) is int


def test_serve_begins_a_json_object_whatever_else_is_generated_with_it(http: Any) -> None:
    pytest.importorskip("llguidance", reason="part of the extra json")
    alone = ask(http, CHAT, max_tokens=40)["choices"][0]["message"]["content"]
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(ask, http, CHAT, max_tokens=40)
        forced = pool.submit(ask, http, CHAT, response_format={"type": "json_object"}, max_tokens=40)
        assert plain.result()["choices"][0]["message"]["content"] == alone
        choice = forced.result()["choices"][0]
    assert choice["message"]["content"].startswith('{"') and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"not": {}}, "not"),
        ({"$ref": "http://localhost/x"}, "does not fetch"),
        ({"type": "string", "format": "foo"}, "Unknown format: foo"),
        ({"$ref": "#"}, "NoExtension"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "NoExtension"),
        ({"enum": [f"value {i}" for i in range(60_000)]}, "too big"),
        ({"type": "integer", "multipleOf": 10**30}, "multipleOf is too large"),
        ({"allOf": [{"type": "number", "multipleOf": m} for m in (9.973, 9967)]}, "multipleOf is too large"),
        ({"anyOf": [{"type": "integer", "multipleOf": 999}] * 1000}, "multipleOf is too large"),
        ({"anyOf": [{"const": {"multipleOf": 0}}, {"multipleOf": 10**30}]}, "multipleOf is too large"),
    ],
)
def test_serve_refuses_schemas_that_it_cannot_enforce(http: Any, schema: Any, reason: str) -> None:
    pytest.importorskip("llguidance", reason="part of the extra json")
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = http.post(CHAT, json={"messages": MESSAGES, "response_format": form})
    error = answer.json()["error"]
    assert answer.status_code == 400 and reason in error["message"] and error["param"] == "response_format"


OPTIONAL = {f"p{i}": {"type": "string", "maxLength": 20} for i in range(500)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": OPTIONAL},
        {
            "anyOf": [
                {"type": "object", "properties": {f"{i}{c}": {"type": "string"} for c in "abc"}} for i in range(200)
            ]
        },
        {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.01}, "b": {"multipleOf": 100}}},
        {"enum": [f"value {i}" for i in range(5000)]},
    ],
    ids=["optional", "alternatives", "multiples", "enum"],
)
def test_serve_enforces_large_schemas(http: Any, schema: Any) -> None:
    pytest.importorskip("llguidance", reason="part of the extra json")
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert ask(http, CHAT, response_format=form)["choices"][0]["message"]["content"][:1] in ("{", '"')


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_serve_ends_an_answer_alone_where_its_schema_fails(http: Any, is_stream: bool) -> None:
    pytest.importorskip("llguidance", reason="part of the extra json")
    schema = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields = {"messages": MESSAGES, "response_format": form, "n": 3, "stream": is_stream, "max_tokens": 40}
    alone = ask(http, CHAT, max_tokens=40)["choices"]
    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(ask, http, CHAT, max_tokens=40) for _ in range(2)]
        answer = pool.submit(http.post, CHAT, json=fields).result()
        assert [other.result()["choices"] for other in plain] == [alone] * 2
    error = json.loads(answer.text.split("data: ")[-1])["error"]
    assert error["message"].startswith("response_format cannot be enforced: lexer error: too many expressions")
    assert is_stream or answer.status_code == 400


def test_serve_compiles_the_schema_of_a_request_once(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance = pytest.importorskip("llguidance", reason="part of the extra json")
    compiled: list[str] = []

    class Matcher:
        grammar_from_json_schema = staticmethod(llguidance.LLMatcher.grammar_from_json_schema)

        def __new__(cls, tokens: Any, grammar: str, **options: Any) -> Any:
            compiled.append(grammar)
            return llguidance_matcher(tokens, grammar, **options)

    llguidance_matcher = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", Matcher)
    choices = ask(http, CHAT, response_format={"type": "json_object"}, n=5)["choices"]
    assert len(compiled) == 1 and len({choice["message"]["content"] for choice in choices}) == 1


def test_serve_names_the_package_that_json_needs(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = http.post(CHAT, json={"messages": MESSAGES, "response_format": {"type": "json_object"}})
    assert answer.status_code == 400 and "pip install llguidance" in answer.json()["error"]["message"]


def test_serve_ends_at_stop_texts_across_tokens_and_streams_none_of_them(http: Any) -> None:
    whole = ask(http)["choices"][0]["text"]
    stop = whole[4:9]
    choice = ask(http, stop=[stop, "never"])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert "".join(chunk["choices"][0]["text"] for chunk in events(http, stop=stop)) == choice["text"]


def test_serve_samples_each_choice_by_its_seed_whatever_is_generated_with_it(http: Any) -> None:
    def sample(**fields: Any) -> list[str]:
        return [choice["text"] for choice in ask(http, temperature=1.5, top_p=0.95, **fields)["choices"]]

    first = sample(seed=1, n=2)
    assert first == sample(seed=1, n=2) and first[0] != first[1] and first[1] == sample(seed=2)[0]
    assert sample(seed=1, prompt=["Where does Mina live?", "Tolo"])[1] == first[0]


def test_serve_gives_log_probabilities_of_the_model(http: Any, trained: LoadedModel) -> None:
    ids = trained.tokenizer.encode("Tolo lives in Hale. 托洛 🐐")
    log_probs = trained.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    expected = [float(log_probs[i, token]) for i, token in enumerate(ids[1:])]
    scored = ask(http, prompt=ids, max_tokens=1.0, logprobs=7, echo=True)["choices"][0]["logprobs"]
    assert (
        scored["token_logprobs"][0] is None
        and len(scored["tokens"]) == len(ids) + 1
        and len(scored["top_logprobs"][1]) == 7
    )
    assert scored["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert max(scored["top_logprobs"][1].values()) == pytest.approx(float(log_probs[0].max()), abs=1e-4)
    answer = ask(http, CHAT, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content), (
        "greedy decoding takes the likeliest token"
    )


REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    (COMPLETIONS, {"presence_penalty": 1.0}, "presence_penalty=1.0 is not supported", "presence_penalty"),
    (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
    (COMPLETIONS, {"frobnicate": "x"}, "frobnicate", "frobnicate"),
    (COMPLETIONS, {"max_tokens": 1000}, "this model has 256 positions", None),
    (COMPLETIONS, {"max_tokens": -1}, "greater than or equal to 0", "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, "valid integer", "max_tokens"),
    (COMPLETIONS, {"temperature": "1"}, "valid number", "temperature"),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": "yes"}}, "valid boolean", "stream_options"),
    (COMPLETIONS, {"prompt": [6400]}, "token ids must be in", "prompt"),
    (COMPLETIONS, {"prompt": []}, "at least 1 item", "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "at least 1 item", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "at most 1024 items", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 600, "n": 2}, "at most 1,024", None),
    (COMPLETIONS, {"top_p": 0}, "greater than 0", "top_p"),
    (COMPLETIONS, {"temperature": -1}, "greater than or equal to 0", "temperature"),
    (COMPLETIONS, {"repetition_penalty": 1e-40}, "greater than or equal to", "repetition_penalty"),
    (COMPLETIONS, {"seed": 2**64}, "less than", "seed"),
    (COMPLETIONS, {"stop": ""}, "at least 1 character", "stop"),
    (COMPLETIONS, {"stop": [""]}, "at least 1 character", "stop"),
    (COMPLETIONS, {"stop": ["x"] * 65}, "at most 64 items", "stop"),
    (COMPLETIONS, {"stream": True, "echo": True}, "echo and logprobs are not supported with stream=true", None),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "with stream=true only", None),
    (CHAT, {"messages": [{"role": "visitor", "content": "a"}]}, "role must be one of", "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "only text",
        "messages",
    ),
    (CHAT, {"messages": []}, "at least 1 item", "messages"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format must have the type", "response_format"),
    (CHAT, {"response_format": {"type": "json"}}, "response_format must have the type", "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "tools": [{}]}, "not supported with", "response_format"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "not supported by this server", "response_format"),
    (CHAT, {"add_generation_prompt": False}, "not supported by this server", "add_generation_prompt"),
    (COMPLETIONS, {"add_special_tokens": False}, "not supported by this server", "add_special_tokens"),
    (COMPLETIONS, {"skip_special_tokens": False}, "not supported by this server", "skip_special_tokens"),
    (CHAT, {"tools": [{"type": "x"}]}, "the type function", "tools"),
    (CHAT, {"tools": [{}] * 1025}, "at most 1024 items", "tools"),
    (CHAT, {"tool_choice": "required"}, "'auto' or 'none'", "tool_choice"),
    (CHAT, {"max_completion_tokens": 3}, "differ", None),
]


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"), REFUSED, ids=[f"{next(iter(row[1]))}-{i}" for i, row in enumerate(REFUSED)]
)
def test_serve_refuses_what_it_does_not_answer(
    http: Any, path: str, fields: dict[str, Any], message: str, param: str | None
) -> None:
    fields = ({"messages": MESSAGES} if path == CHAT else {"prompt": "Tolo"}) | {"max_tokens": 2} | fields
    answer = http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]


def test_serve_accepts_fields_that_ask_for_nothing(http: Any) -> None:
    neutral = {
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
        "seed": None,
        "top_p": None,
        "n": 1,
    }
    assert ask(http, CHAT, **neutral)["choices"] == ask(http, CHAT)["choices"]


HOSTILE: list[tuple[bytes, dict[str, str], int]] = [
    (b"{", {}, 400),
    (b"[1]", {}, 400),
    (b'{"prompt": "a", "temperature": NaN}', {}, 400),
    (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
    (b'{"prompt": "a", "prompt": "b"}', {}, 400),
    (b'{"prompt": "\xff\xfe"}', {}, 400),
    (b'{"prompt": "\\ud800"}', {}, 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
    (b" " * ((4 << 20) + 1), {}, 413),
    (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 415),
    (b'{"prompt": "a"}', {"Host": "attacker.example"}, 403),
    (b'{"prompt": "a"}', {"Origin": "https://attacker.example"}, 403),
    (b'{"prompt": "a"}', {"Origin": "null"}, 403),
    (b'{"prompt": "a", "model": "gpt\\u001b[2J"}', {}, 404),
]


@pytest.mark.parametrize(("body", "headers", "status"), HOSTILE, ids=[f"{i}-{row[2]}" for i, row in enumerate(HOSTILE)])
def test_serve_refuses_hostile_requests_in_the_form_of_openai(
    http: Any, body: bytes, headers: dict[str, str], status: int
) -> None:
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "\x1b" not in answer.text


def test_serve_refuses_bodies_without_a_length_beyond_the_limit(http: Any) -> None:
    answer = http.post(
        COMPLETIONS, content=(b" " * (1 << 20) for _ in range(5)), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize("items", [[1, "a"], [{}], [1.5], [["a"]], [[1], {}]], ids=str)
def test_serve_stops_at_the_first_wrong_item_of_a_list(items: list[Any]) -> None:
    """An error for each of 900,000 items blocked the server for 20 s."""
    from pydantic import ValidationError

    from runner.serving.protocol import ChatRequest, CompletionRequest

    for kind, fields in (
        (CompletionRequest, {"prompt": items * 500}),
        (CompletionRequest, {"prompt": [items * 500]}),
        (ChatRequest, {"messages": [1] * 500}),
        (ChatRequest, {"messages": MESSAGES, "tools": [1] * 500}),
    ):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(fields)
        assert refused.value.error_count() <= 4


@pytest.mark.parametrize(
    ("headers", "parts", "read"),
    [
        ({"content-length": str(6 << 20)}, 6, 6),
        ({"transfer-encoding": "chunked"}, 6, 6),
        ({"content-length": str(6 << 20), "expect": "100-continue"}, 6, 0),
        ({"content-length": str(1 << 40)}, 100, 0),
        ({"transfer-encoding": "chunked"}, 100, 65),
    ],
)
def test_serve_reads_a_large_body_before_it_refuses_it(headers: dict[str, str], parts: int, read: int) -> None:
    """A client that still sends sees a reset connection instead of the status."""
    import asyncio

    from starlette.requests import Request

    from runner.serving.guard import read_body
    from runner.serving.protocol import ApiError

    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": b" " * (1 << 20), "more_body": received < parts}

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_body(Request(scope, receive)))
    assert (refused.value.status, received) == (413, read)


def test_serve_names_its_paths_where_there_is_none(http: Any) -> None:
    assert (http.get("/v2").status_code, http.get(CHAT).status_code) == (404, 405)
    assert "/v1/chat/completions" in http.get("/v2").json()["error"]["message"]


def test_serve_answers_under_all_loopback_names_and_from_its_own_pages(http: Any) -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert http.get("/health", headers={"Host": host, "Origin": "http://localhost:8000"}).json() == {"status": "ok"}
    assert not any(name.startswith("access-control") for name in http.get("/health").headers)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "secret", "Basic secret", "Bearer sécret"])
def test_serve_answers_nothing_without_the_key(queue: Any, header: str | None) -> None:
    from starlette.testclient import TestClient

    from runner.serving.app import create_app

    client = TestClient(create_app(queue, "small", 16, "secret"))
    for path in ("/v1/models", "/anything"):
        answer = client.get(path, headers={"Authorization": header.encode()} if header else {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.get("/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_serve_answers_503_when_too_many_wait_and_hides_causes(
    queue: Any, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.inference import generation
    from runner.serving.protocol import ApiError

    def fail(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("/private/path")

    monkeypatch.setattr(generation, "generate_rows", fail)
    answer = http.post(COMPLETIONS, json={"prompt": "a"})
    assert answer.status_code == 500 and "private" not in answer.text
    full = ApiError(503, "too many answers wait", "server_error", code="queue_full")  # see test_generation.py
    monkeypatch.setattr(queue, "submit", lambda works: (_ for _ in ()).throw(full))
    answer = http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")


@pytest.mark.parametrize("is_stream", [False, True])
def test_serve_cancels_the_answers_of_a_client_that_goes_away(
    queue: Any, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    import uvicorn

    from runner.serving.app import create_app
    from runner.serving.guard import HeaderDeadlineProtocol

    submitted: threads.Queue[list[Any]] = threads.Queue()
    monkeypatch.setattr(queue, "submit", submitted.put)  # nothing is computed
    server = uvicorn.Server(
        uvicorn.Config(create_app(queue, "small", 16, None), http=HeaderDeadlineProtocol, ws="none", log_level="error")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            client = http.client.HTTPConnection(*listener.getsockname())
            client.request(
                "POST",
                COMPLETIONS,
                json.dumps({"prompt": "Tolo", "n": 3, "stream": is_stream}),
                {"Content-Type": "application/json"},
            )
            answers = submitted.get(timeout=300)
            assert len(answers) == 3 and not any(answer.done.cancelled() for answer in answers)
            client.close()
            while not all(answer.done.cancelled() for answer in answers):  # the time limit of the test ends it
                time.sleep(0.01)
        finally:
            server.should_exit = True
            thread.join(60)


def test_serve_scores_the_stop_token_that_was_generated(
    http: Any, trained: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scored eos_token, and a model may have several stop tokens."""
    from runner.inference import generation

    stop = next(
        token for token in trained.tokenizer.control_ids if token != trained.tokenizer.named_tokens["eos_token"]
    )
    number = trained.tokenizer.control_ids[stop]
    monkeypatch.setattr(generation, "generate_rows", lambda model, rows, *_: rows[0].end(number))
    assert ask(http, prompt="Where", logprobs=1)["choices"][0]["logprobs"]["tokens"] == [stop]


def test_serve_lists_the_likelier_of_two_tokens_with_one_text(
    trained: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.inference.generation import Score
    from runner.serving.protocol import CompletionRequest, Responder

    responder = Responder(CompletionRequest(prompt="a", logprobs=3), "small", trained.tokenizer)
    monkeypatch.setattr(responder, "_token_name", lambda number: "ab"[number == 2])
    score = Score(ids=[0, 1], own=[-1.0], best=[[(0, -0.1), (2, -0.5), (1, -3.0)]])
    assert responder._completion_logprobs(score)["top_logprobs"] == [{"a": -0.1, "b": -0.5}]


def test_serve_counts_a_prompt_once_and_places_tokens_behind_it(http: Any, trained: LoadedModel) -> None:
    ids = trained.tokenizer.encode("Where does Tolo live")
    answer = ask(http, prompt=ids, n=3, temperature=1, seed=0, logprobs=1)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for choice in answer["choices"]:
        placed, text = choice["logprobs"], "Where does Tolo live" + choice["text"]
        for token, offset in zip(placed["tokens"], placed["text_offset"], strict=True):
            assert token.startswith("bytes:") or text.startswith(token, offset)


def test_serve_places_tokens_behind_characters_of_several_tokens(http: Any, trained: LoadedModel) -> None:
    """Each part of such a character counted as long as its name, `bytes:123`."""
    text = "🦄龘 and"
    ids = trained.tokenizer.encode(text)
    logprobs = ask(http, prompt=text, echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    tokens, offsets = logprobs["tokens"][-len(ids) :], logprobs["text_offset"][-len(ids) :]
    assert tokens[0].startswith("bytes:")
    placed = [(token, offset - offsets[0]) for token, offset in zip(tokens, offsets, strict=True)]
    assert all(token.startswith("bytes:") or text.startswith(token, offset) for token, offset in placed)
    second = len(trained.tokenizer.encode("🦄"))
    assert [offset for _, offset in placed[: second + 1]] == [0] * second + [1], "it was placed at the first character"


def test_serve_keeps_the_space_that_a_tokenizer_drops_before_a_text(
    http: Any, served_folder: Path, tmp_path: Path
) -> None:
    """Tokenizers of Llama 2 decode " the" at the beginning of a text, and alone, to "the"."""
    from starlette.testclient import TestClient

    from runner.serving.app import GenerationQueue, create_app

    file = shutil.copytree(served_folder, tmp_path / "small") / "tokenizer.json"
    stored = json.loads(file.read_text())
    dropping = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    file.write_text(json.dumps(stored | {"decoder": {"type": "Sequence", "decoders": [stored["decoder"], dropping]}}))
    queue = GenerationQueue(load_trained(file.parent, "cpu"), max_batch=8, max_waiting=100)
    other = TestClient(create_app(queue, "small", 16, None))
    fields = {"temperature": 1, "seed": 0, "n": 8, "logprobs": 3, "max_tokens": 4}
    choices = ask(http, **fields)["choices"]
    assert any(choice["text"].startswith(" ") for choice in choices)
    assert ask(other, **fields)["choices"] == choices
    queue.close()
