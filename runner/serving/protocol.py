"""Requests and answers of the HTTP interface of OpenAI (https://platform.openai.com/docs/api-reference), as far as they
are answered, and tool calls in the text of an answer.

A field that would change the answer and that this server does not read is refused, never ignored. A tool call is a JSON
object between `<tool_call>` tags, as the templates of MiniMind, Qwen and Hermes write them.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import defaultdict
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.limits import parse_json
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.tokenizer import Tokenizer
from models.generate import MIN_DIVISOR
from runner.inference.generation import Answer, Score
from runner.inference.inspect_rows import token_spans

# Fields that clients send and that change no answer of any server
HARMLESS = """
    user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction
""".split()
NEUTRAL: tuple[Any, ...] = (False, 0, "", [], {}, "auto", "none")  # values of other fields that ask for nothing
ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(
        ("parallel_tool_calls", "add_generation_prompt", "add_special_tokens", "skip_special_tokens"), (True,)
    ),
}
MAX_ROWS = 1024  # answers of one request: prompts x n
MAX_TOOLS = 1024
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
# fail_fast: an error for each of a million items would take half a minute, in which no other request is answered
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
OPENING_TAG, END_OF_CALL = "<tool_call>", "</tool_call>"
OPENING = re.compile(r"<tool_call>\s*(?=\{)")
CLOSING = re.compile(r"\}\s*</tool_call>")


class ApiError(Exception):
    """Refused: the client gets it in the form of OpenAI's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    # padding against listeners on the network: read, as clients send it, and never added
    include_obfuscation: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, ge=MIN_DIVISOR, le=100)
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("*", mode="before")
    @classmethod
    def take_whole_number(cls, value: object) -> object:
        return int(value) if isinstance(value, float) and value.is_integer() else value  # JSON has one kind of number

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def check_settings(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is allowed with stream=true only")
        return self

    def check_all_read(self) -> None:
        """Raises ApiError for a field that this server does not read, unless its value asks for nothing."""
        for name, value in (self.model_extra or {}).items():
            is_accepted = name in HARMLESS or value in ACCEPTED_VALUES.get(name, NEUTRAL)
            if not is_accepted and (name, value) != ("best_of", self.n):
                raise ApiError(
                    400,
                    f"{name}={json.dumps(value)[:100]} is not supported by this server: omit it",
                    param=name,
                    code="unsupported_parameter",
                )


class ChatRequest(_Body):
    messages: Objects = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: Annotated[Objects, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[str, Any] = {"type": "text"}

    @property
    def json_schema(self) -> dict[str, Any] | None:
        match self.response_format:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return schema
        message = "response_format must have the type text, json_object, or json_schema with json_schema.schema"
        raise ApiError(400, message, param="response_format")

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed beside each; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def check_fields(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        self.max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.stream and self.logprobs:
            raise ValueError("logprobs are not supported with stream=true")
        if self.json_schema is not None and self.uses_tools:
            raise ApiError(400, "tools are not supported with a response_format of JSON", param="response_format")
        if any((tool.get("type") or "function") != "function" for tool in self.tools or ()):
            raise ApiError(400, "tools must have the type function", param="tools")
        return self


class CompletionRequest(_Body):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]
    )
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed beside each; None: no log-probabilities."""
        return self.logprobs

    @model_validator(mode="after")
    def check_fields(self) -> Self:
        if self.stream and (self.echo or self.logprobs is not None):
            raise ValueError("echo and logprobs are not supported with stream=true")
        if len(self.prompts) * self.n > MAX_ROWS:
            raise ValueError(f"prompts x n is {len(self.prompts) * self.n:,}, at most {MAX_ROWS:,} are allowed")
        return self


Body = ChatRequest | CompletionRequest


def parse_request(kind: type[ChatRequest] | type[CompletionRequest], data: bytes) -> Body:
    """Return the request in the body `data`. Raises ApiError."""
    try:
        raw = parse_json(data)
        json.dumps(raw, ensure_ascii=False).encode()  # fails for half of a surrogate pair, which is no character
    except ValueError as error:
        raise ApiError(400, f"the body must be JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(raw).__name__}")
    try:
        body = kind.model_validate({name: value for name, value in raw.items() if value is not None})
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        # of a union, a wrong length says more than another type
        first = next((each for each in errors if "too_" in each["type"]), errors[0])
        param = ".".join(map(str, first["loc"][:1])) or None
        raise ApiError(
            400, f"{param}: {first['msg']}" if param else first["msg"].removeprefix("Value error, "), param=param
        ) from error
    body.check_all_read()
    return body


def check_tools(template: ChatTemplate) -> None:
    """Raises ApiError if tools would have no effect, or calls would not be recognized."""
    if not template.names("tools"):
        raise ApiError(
            400, "the chat template of this model has no tools: omit them", param="tools", code="unsupported_parameter"
        )
    if OPENING_TAG not in str(template.tokenizer.chat_template):
        message = f"calls of tools are recognized between {OPENING_TAG} tags only, which the chat template of this model does not write: omit tools"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")


def split_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text outside of calls, and the calls as OpenAI returns them.

    What is no valid call stays text.

    An answer is read once: time is linear in its length, whatever tags it repeats.
    """
    calls: list[dict[str, Any]] = []
    rest, position = [], 0
    while (opening := OPENING.search(text, position)) and (closing := CLOSING.search(text, opening.end())):
        call = _parse_call(text[opening.end() : closing.start() + 1])
        rest.append(text[position : closing.end() if call is None else opening.start()])
        calls += [] if call is None else [call]
        position = closing.end()
    rest.append(text[position:])
    return ("".join(rest).strip() or None) if calls else text, calls


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = parse_json(text)
    except ValueError:
        return None
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return None
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class Responder:
    """Writes the answers to one request."""

    def __init__(self, body: Body, model: str, tokenizer: Tokenizer) -> None:
        self.body, self.tokenizer, self.is_chat = body, tokenizer, isinstance(body, ChatRequest)
        self._held: dict[int, str] = defaultdict(str)  # streamed text of each answer that may be part of a call
        self._calls: dict[int, int] = defaultdict(int)  # streamed calls of each answer
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def complete(self, answers: list[Answer], scores: list[Score]) -> dict[str, Any]:
        """`scores`: of each answer, or of none."""
        choices = [self._choice(i, answer, scores[i] if scores else None) for i, answer in enumerate(answers)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(answers)}

    def score_of(self, answer: Answer) -> Score:
        """Return the work that gives the log-probabilities of `answer`.

        The stop token is part of it: lm-evaluation-harness asks for one token and drops it from the lists.
        """
        ids = answer.prompt + answer.ids + ([] if answer.stop_token is None else [answer.stop_token])
        return Score(ids=ids, first=1 if self._echoes else len(answer.prompt), top=max(self.body.top or 0, 1))

    @property
    def _echoes(self) -> bool:
        return isinstance(self.body, CompletionRequest) and self.body.echo

    def _choice(self, index: int, answer: Answer, score: Score | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
        if isinstance(self.body, CompletionRequest):
            prompt = self.tokenizer.decode(answer.prompt, skip_special=False) if self._echoes else ""
            logprobs = score and self._completion_logprobs(score)
            return choice | {"text": prompt + answer.text, "logprobs": logprobs}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if self.body.uses_tools:
            message["content"], calls = split_tool_calls(answer.text)
            if calls:
                message["tool_calls"], choice["finish_reason"] = calls, "tool_calls"
        if score is not None:
            choice["logprobs"] = {"content": self._chat_logprobs(score, len(answer.ids)), "refusal": None}
        return choice | {"message": message}

    def _completion_logprobs(self, score: Score) -> dict[str, Any]:
        """Return the field logprobs for the scored tokens, and the first token of an echoed text, which has none."""
        names = [self._token_name(i) for i in score.ids]
        unscored = [None] * self._echoes
        # of two tokens with one text the likelier one, which comes last
        likeliest = [{self._token_name(i): value for i, value in row + row[::-1]} for row in score.best]
        start, offsets = score.first - len(unscored), [0]
        for span in token_spans(self.tokenizer, score.ids, [0] * len(names), []):
            # tokens of one character begin where it begins
            offsets += [offsets[-1]] * (len(span.ids) - 1) + [offsets[-1] + len(span.text)]
        return {
            "tokens": names[start:],
            "token_logprobs": [*unscored, *score.own],
            "top_logprobs": [*unscored, *likeliest],
            "text_offset": offsets[start:-1],
        }

    def _chat_logprobs(self, score: Score, count: int) -> list[dict[str, Any]]:
        rows = zip(score.ids[score.first :], score.own, score.best, strict=True)
        top = self.body.top or 0
        return [
            {**self._token(token, own), "top_logprobs": [self._token(*each) for each in best[:top]]}
            for token, own, best in islice(rows, count)
        ]

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        name = self._token_name(token_id)
        return {"token": name, "logprob": log_prob, "bytes": None if name.startswith("bytes:") else list(name.encode())}

    def _token_name(self, token_id: int) -> str:
        """Return the text of a token; of part of a character, which has none, its number."""
        # behind itself: a tokenizer may drop the space of a first token
        first, both = (self.tokenizer.decode([token_id] * count, skip_special=False) for count in (1, 2))
        text = both[len(first) :]
        return f"bytes:{token_id}" if "\ufffd" in text else text

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        prompt = sum(len(answer.prompt) for answer in answers[:: self.body.n])
        completion = sum(len(answer.ids) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # --- server-sent events ---

    def first_event(self, index: int) -> str:
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text_event(self, index: int, text: str, finish_reason: str | None = None) -> str:
        """`text`: "" in the last event of an answer. Return "" where nothing can be sent yet."""
        if isinstance(self.body, CompletionRequest):
            return self._event({"index": index, "finish_reason": finish_reason, "text": text, "logprobs": None})
        calls: list[dict[str, Any]] = []
        if self.body.uses_tools:
            text, calls = self._split_stream(index, text, finish_reason is not None)
            if finish_reason and self._calls[index]:
                finish_reason = "tool_calls"
        delta = {name: value for name, value in (("content", text), ("tool_calls", calls)) if value}
        has_news = delta or finish_reason
        return self._event({"index": index, "finish_reason": finish_reason, "delta": delta}) if has_news else ""

    def _split_stream(self, index: int, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return what can be sent: text outside of calls, and calls that are complete."""
        held = self._held[index] + text
        end = len(held)
        if not is_last and OPENING_TAG in held:
            before, tag, _ = held.rpartition(END_OF_CALL)
            end = len(before + tag) if before.rstrip().endswith("}") else 0
        elif not is_last:  # its end may begin a tag, or be the space before one
            start = held.rfind("<", 1 - len(OPENING_TAG))
            end = len(held[: start if start >= 0 else end].rstrip())
        self._held[index] = held[end:]
        content, calls = split_tool_calls(held[:end])
        self._calls[index] += len(calls)
        first = self._calls[index] - len(calls)
        return content or "", [{"index": i} | call for i, call in enumerate(calls, first)]

    def usage_event(self, answers: list[Answer]) -> str:
        return self._event(None, self._usage(answers))

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": [] if choice is None else [choice]}
        if self.body.stream_options.include_usage:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n"
