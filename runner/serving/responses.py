"""Bodies of answers, as OpenAI's interface has them, and tool calls in the text of an answer.

A tool call is a JSON object between `<tool_call>` tags, as the templates of MiniMind, Qwen and Hermes write them.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from itertools import accumulate, islice
from typing import Any

from common.limits import parse_json
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.tokenizer import Tokenizer
from runner.inference.generation import Answer, Score
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

    def complete(self, answers: list[Answer], scores: list[Score]) -> dict[str, Any]:
        """`scores`: of each answer, or of none."""
        choices = [self._choice(i, answer, scores[i] if scores else None) for i, answer in enumerate(answers)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(answers)}

    def score_of(self, answer: Answer) -> Score:
        """Return the work that gives the log-probabilities of `answer`.

        The stop token is part of it: lm-evaluation-harness asks for one token and drops it from the lists.
        """
        ids = answer.prompt + answer.ids + [self.tokenizer.eos_id] * answer.has_stop_token
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
        likeliest = [{self._token_name(i): value for i, value in row} for row in score.best]
        start = score.first - len(unscored)
        return {
            "tokens": names[start:],
            "token_logprobs": [*unscored, *score.own],
            "top_logprobs": [*unscored, *likeliest],
            "text_offset": list(accumulate(map(len, names), initial=0))[start:-1],
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
        text = self.tokenizer.decode([token_id], skip_special=False)
        return f"bytes:{token_id}" if "\ufffd" in text else text

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        prompt = sum(len(answer.prompt) for answer in answers[:: self.body.n])
        completion = sum(len(answer.ids) for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # --- server-sent events ---

    def first_event(self, index: int) -> str:
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text_event(self, index: int, text: str, finish_reason: str | None = None) -> str:
        """`text`: "" in the last event of an answer."""
        part = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text, "logprobs": None}
        return self._event({"index": index, "finish_reason": finish_reason, **part})

    def usage_event(self, answers: list[Answer]) -> str:
        return self._event(None, self._usage(answers))

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": [] if choice is None else [choice]}
        if self.body.stream_options.include_usage:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n"
