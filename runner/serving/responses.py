"""Bodies of answers, as OpenAI's interface has them, and tool calls in the text of an answer.

A tool call is a JSON object between `<tool_call>` tags, as the templates of MiniMind, Qwen and Hermes write them.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

from common.limits.parsers import parse_json
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.tokenizer import Tokenizer
from runner.serving.answers import Answer, Score
from runner.serving.protocol import ApiError, Body, ChatRequest, CompletionRequest

OPENING_TAG = "<tool_call>"
OPENING = re.compile(r"<tool_call>\s*(?=\{)")
CLOSING = re.compile(r"\}\s*</tool_call>")


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
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def complete(self, answers: list[Answer], scores: list[Score | None]) -> dict[str, Any]:
        choices = [
            self._choice(i, answer, score) for i, (answer, score) in enumerate(zip(answers, scores, strict=True))
        ]
        return {
            **self._head,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "choices": choices,
            "usage": self._usage(answers),
        }

    def score_of(self, answer: Answer) -> Score:
        """Return the work that gives the log-probabilities of `answer`.

        The stop token is part of it: lm-evaluation-harness asks for one token and drops it from the lists.
        """
        return Score(
            ids=answer.prompt + answer.ids + [self.tokenizer.eos_id] * answer.has_stop_token,
            top=max(self.body.top or 0, 1),
        )

    def _choice(self, index: int, answer: Answer, score: Score | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
        if isinstance(self.body, CompletionRequest):
            choice["text"] = (
                self.tokenizer.decode(answer.prompt, skip_special=False) if self.body.echo else ""
            ) + answer.text
            if score is not None:
                choice["logprobs"] = self._completion_logprobs(score, 0 if self.body.echo else len(answer.prompt))
            return choice
        content, calls = (
            split_tool_calls(answer.text) if self.body.tools and self.body.tool_choice != "none" else (answer.text, [])
        )
        choice["message"] = {"role": "assistant", "content": content, "refusal": None} | (
            {"tool_calls": calls} if calls else {}
        )
        if calls:
            choice["finish_reason"] = "tool_calls"
        if score is not None:
            choice["logprobs"] = {
                "content": self._chat_logprobs(score, len(answer.prompt), len(answer.ids)),
                "refusal": None,
            }
        return choice

    def _completion_logprobs(self, score: Score, start: int) -> dict[str, Any]:
        """Return the field logprobs for the tokens from `start` on; the first token of a text has none."""
        names = [self._token_name(i) for i in score.ids]
        likeliest = [None, *({self._token_name(i): value for i, value in row} for row in score.best)]
        offsets, length = [], 0
        for name in names:
            offsets.append(length)
            length += len(name)
        return {
            "tokens": names[start:],
            "token_logprobs": [None, *score.own][start:],
            "top_logprobs": likeliest[start:],
            "text_offset": offsets[start:],
        }

    def _chat_logprobs(self, score: Score, start: int, count: int) -> list[dict[str, Any]]:
        top = self.body.top or 0
        return [
            {
                **self._token(score.ids[i], score.own[i - 1]),
                "top_logprobs": [self._token(token, value) for token, value in score.best[i - 1][:top]],
            }
            for i in range(start, start + count)
        ]

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        name = self._token_name(token_id)
        return {"token": name, "logprob": log_prob, "bytes": None if name.startswith("bytes:") else list(name.encode())}

    def _token_name(self, token_id: int) -> str:
        """Return the text of a token; of part of a character, which has none, its number."""
        text = self.tokenizer.decode([token_id], skip_special=False)
        return f"bytes:{token_id}" if "\ufffd" in text else text

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        prompt, completion = (
            sum(len(answer.prompt) for answer in answers[:: self.body.n]),
            sum(len(answer.ids) for answer in answers),
        )
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # --- server-sent events ---

    def first_event(self, index: int) -> str:
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text_event(self, index: int, text: str) -> str:
        return self._event(
            {"index": index, "finish_reason": None}
            | ({"delta": {"content": text}} if self.is_chat else {"text": text, "logprobs": None})
        )

    def last_event(self, index: int, reason: str | None) -> str:
        rest: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": "", "logprobs": None}
        return self._event({"index": index, "finish_reason": reason} | rest)

    def usage_event(self, answers: list[Answer]) -> str:
        return self._event(None, self._usage(answers))

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> str:
        chunk = {
            **self._head,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "choices": [] if choice is None else [choice],
        }
        if self.body.includes_usage:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n"
