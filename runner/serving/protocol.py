"""Requests of the HTTP interface of OpenAI (https://platform.openai.com/docs/api-reference), as far as they are answered. Unknown fields are refused
where they would change the answer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# Fields that clients send and that change no answer here
HARMLESS = ("user", "store", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key")


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    n: int = Field(default=1, ge=1, le=64)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def unsupported(self) -> str | None:
        """Return the name of a field that this server does not read and whose value is not the neutral one."""
        neutral: tuple[Any, ...] = (None, False, 0, 0.0, [], {}, "auto", "none", {"type": "text"})
        return next((name for name, value in (self.model_extra or {}).items() if name not in HARMLESS and value not in neutral), None)


class ChatRequest(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = None


class CompletionRequest(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]
