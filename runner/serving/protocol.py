"""Requests of the HTTP interface of OpenAI (https://platform.openai.com/docs/api-reference), as far as they are
answered.

A field that would change the answer and that this server does not read is refused, never ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.limits import parse_json

# Fields that clients send and that change no answer of any server
HARMLESS = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)
NEUTRAL: tuple[Any, ...] = (False, 0, "", [], {}, "auto", "none")  # values of other fields that ask for nothing
ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
}
MIN_DIVISOR = 1e-5  # of logits: smaller ones give infinite logits
MAX_ROWS = 1024  # answers of one request: prompts x n
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]


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
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    # padding against listeners on the network: read, as clients send it, and never added
    include_obfuscation: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

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

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def check_settings(self) -> Self:
        if 0 < self.temperature < MIN_DIVISOR:
            raise ValueError(f"temperature must be 0, which is greedy, or at least {MIN_DIVISOR}")
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
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"

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
        if self.stream and (self.logprobs or self.uses_tools):
            raise ValueError("logprobs and tools are not supported with stream=true")
        return self


class CompletionRequest(_Body):
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
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
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"][:1])) or None
        raise ApiError(
            400, f"{param}: {first['msg']}" if param else first["msg"].removeprefix("Value error, "), param=param
        ) from error
    body.check_all_read()
    return body
