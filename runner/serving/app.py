"""Routes of the server: /v1/models, /v1/chat/completions, /v1/completions, /health; and the one thread that owns the
model: answers wait in a queue, and join the batch that is generated between two of its tokens.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UserError, print_safely
from models.generate import Sampler
from runner.inference.generation import Answer, Work, compute_batch
from runner.inference.load import LoadedModel
from runner.serving.guard import Guard, read_body
from runner.serving.json_mode import Constraint, json_constraints
from runner.serving.protocol import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    Responder,
    check_tools,
    parse_request,
)

Pieces = asyncio.Queue[tuple[int, str | None]]  # (number of a work, a piece of its text, or None when it is done)

JSON_TYPE = "application/json"  # a web page can send other types to this machine without asking its user


class GenerationQueue:
    """`submit(works)` returns at once.

    The oldest work is done first, together with those behind it that fit into its batch.
    """

    def __init__(self, trained: LoadedModel, max_batch: int, max_waiting: int) -> None:
        self.trained, self._max_batch, self._max_waiting = trained, max_batch, max_waiting
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self.is_stopping = False  # may be set by a signal handler, which takes no lock
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, works: Sequence[Work]) -> None:
        """Raises ApiError if more than `max_waiting` would wait; nothing is added then."""
        with self._changed:
            if len(self._waiting) + len(works) > self._max_waiting:
                self._drop_cancelled()
            if self._waiting and len(self._waiting) + len(works) > self._max_waiting:
                raise ApiError(503, "too many answers wait: try again later", "server_error", code="queue_full")
            self._waiting.extend(works)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what waits and what is computed, and end the thread."""
        self.is_stopping = True
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._compute(batch)
            except Exception as error:  # the clients get it; the thread computes the next batch
                if not isinstance(error, UserError | ApiError):
                    print_safely(traceback.format_exc(), file=sys.stderr)
                _fail(batch, error)
        _fail(self._waiting, _stopping_error())

    def _next_batch(self) -> list[Work]:
        """Return the oldest works of one kind; []: stop."""
        with self._changed:
            while not self.is_stopping:
                self._drop_cancelled()
                if self._waiting:
                    return self._take(type(self._waiting[0]), self._max_batch)
                self._changed.wait(timeout=1)  # a signal handler does not notify
        return []

    def _take(self, kind: type[Work], count: int) -> list[Any]:
        """Remove the oldest works, up to the first of another kind, and return them."""
        taken = takewhile(lambda work: isinstance(work, kind), [*islice(self._waiting, count)])
        return [self._waiting.popleft() for _ in taken]

    def _drop_cancelled(self) -> None:
        self._waiting = deque(work for work in self._waiting if not work.done.cancelled())

    def _compute(self, batch: list[Work]) -> None:
        def join(count: int) -> list[Answer]:
            with self._changed:
                self._drop_cancelled()
                new = self._take(Answer, self._max_batch - count)
            batch.extend(new)
            return new

        compute_batch(self.trained, batch, self._max_batch, self._check_stop, join)

    def _check_stop(self) -> None:
        if self.is_stopping:
            raise _stopping_error()


def _stopping_error() -> ApiError:
    return ApiError(503, "the server is stopping", "server_error", code="stopping")


def _fail(works: Iterable[Work], error: Exception) -> None:
    for work in works:
        work.finish(error)


def create_app(
    generation: GenerationQueue, name: str, max_new_tokens: int, key: str | None, allowed_hosts: list[str] | None = None
) -> ASGIApp:
    """`key` and `allowed_hosts`: see Guard."""
    server = _Server(generation, name, max_new_tokens)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    return Guard(Router(routes), key, allowed_hosts)


class _Server:
    def __init__(self, generation: GenerationQueue, name: str, max_new_tokens: int) -> None:
        self.generation, self.name, self.max_new_tokens = generation, name, max_new_tokens
        self.trained = generation.trained
        self.template = self.trained.template if self.trained.tokenizer.chat_template is not None else None
        self._card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lm-runner"}
        self._rendering = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["model"])
        return JSONResponse(self._card)

    async def chat(self, request: Request) -> Response:
        return await self.answer(ChatRequest, request)

    async def completions(self, request: Request) -> Response:
        return await self.answer(CompletionRequest, request)

    def check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise ApiError(
                404,
                f"this server has no model {model[:200]!r}; it has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != JSON_TYPE:
            raise ApiError(415, f"the header Content-Type must be {JSON_TYPE}")
        data = await read_body(request)
        # Beside the event loop, as texts may be long. Chat templates are rendered one at a time: those of other folders
        # share a process.
        async with self._rendering if kind is ChatRequest else nullcontext():
            body, prompts = await asyncio.to_thread(self._parse, kind, data)
        limit = self._limit(body, max(map(len, prompts)))
        constraints: list[Constraint | None] = [None] * body.n
        if (schema := body.json_schema) is not None:
            constraints = [*await asyncio.to_thread(json_constraints, self.trained, schema, body.n)]
        seed = secrets.randbits(62) if body.seed is None else body.seed
        stop_ids = self.trained.stop_ids(kind is ChatRequest)
        # Choice i of a prompt has the seed + i: it does not depend on the other prompts, nor on what else is generated.
        answers = [
            Answer(
                prompt=prompt,
                limit=limit,
                sampler=Sampler(
                    body.temperature,
                    body.top_k,
                    body.top_p,
                    body.repetition_penalty,
                    torch.Generator(self.trained.device).manual_seed((seed + i) % 2**63),
                ),
                stop_ids=stop_ids,
                tokenizer=self.trained.tokenizer,
                stops=body.stops,
                constrain=constraint,
                before=prompt[-1:] if kind is CompletionRequest else [],
            )
            for prompt in prompts
            for i, constraint in enumerate(constraints)
        ]
        responder = Responder(body, self.name, self.trained.tokenizer)
        if body.stream:
            pieces = self._submit(answers, streams_text=True)
            return _EventStream(_events(responder, answers, pieces), answers)
        await self._run(answers, request)
        scores = [responder.score_of(answer) for answer in answers] if body.top is not None else []
        if scores:
            await self._run(scores, request)
        return JSONResponse(responder.complete(answers, scores))

    def _parse(self, kind: type[ChatRequest] | type[CompletionRequest], data: bytes) -> tuple[Body, list[list[int]]]:
        body: Body = parse_request(kind, data)
        self.check_model(body.model)
        try:
            return body, self._prompts(body)
        except UserError as error:
            param = "prompt" if isinstance(body, CompletionRequest) else "messages"
            raise ApiError(400, error.message, param=param) from error

    def _prompts(self, body: Body) -> list[list[int]]:
        if isinstance(body, CompletionRequest):
            prompts = [
                prompt if isinstance(prompt, list) else self.trained.encode_text(prompt) for prompt in body.prompts
            ]
            vocabulary = self.trained.model.cfg.vocab_size
            if any(not 0 <= i < vocabulary for prompt in prompts for i in prompt):
                raise ApiError(400, f"prompt: token ids must be in [0, {vocabulary})", param="prompt")
            if not all(prompts):
                raise ApiError(
                    400,
                    "prompt: it is empty, and this model begins no text by itself: give at least one character",
                    param="prompt",
                )
            return prompts
        if self.template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        if body.uses_tools:
            check_tools(self.template)
        return [self.template.encode_prompt(body.messages, body.tools if body.uses_tools else None)]

    def _limit(self, body: Body, longest: int) -> int:
        """Return how many tokens each answer may have. `longest`: tokens of the longest prompt."""
        positions, requested = self.trained.model.cfg.max_position_embeddings, body.max_tokens
        if longest + (requested or 0) > positions:
            requested_text = "" if requested is None else f" and max_tokens is {requested}"
            raise ApiError(
                400,
                f"the prompt has {longest} tokens{requested_text}: this model has {positions} positions",
                code="context_length_exceeded",
            )
        return self.max_new_tokens if requested is None else requested

    def _submit(self, works: Sequence[Work], streams_text: bool = False) -> Pieces:
        """Return the queue of what the thread of the model says about `works`."""
        loop, pieces = asyncio.get_running_loop(), Pieces()

        def put(number: int, text: str | None, _: object = None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (number, text))

        for number, work in enumerate(works):
            work.done.add_done_callback(partial(put, number, None))
            if streams_text and isinstance(work, Answer):
                work.on_text = partial(put, number)
        self.generation.submit(works)
        return pieces

    async def _run(self, works: Sequence[Work], request: Request) -> None:
        """Wait until all is done; a client that goes away cancels it. Raises ApiError."""
        ends = self._submit(works)
        leaving = asyncio.ensure_future(_cancel_at_disconnect(request, works))
        try:
            for _ in works:
                number, _ = await ends.get()
                if error := _error_of(works[number]):
                    raise error
        finally:
            leaving.cancel()
            _cancel(works)


def _cancel(works: Sequence[Work]) -> None:
    for work in works:
        work.done.cancel()


async def _cancel_at_disconnect(request: Request, works: Sequence[Work]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    _cancel(works)


def _error_of(work: Work) -> ApiError | None:
    """Return why a work that is done has no result."""
    if work.done.cancelled():
        return ApiError(499, "the client has closed the connection")
    error = work.done.exception()
    if isinstance(error, UserError):
        return ApiError(400, f"{error.message}; {error.fix}")
    if error is None or isinstance(error, ApiError):
        return error
    return ApiError(500, "the model failed; the log of the server has the cause", "server_error")


async def _events(responder: Responder, answers: list[Answer], pieces: Pieces) -> AsyncIterator[str]:
    """Yield server-sent events."""
    for i in range(len(answers) if responder.is_chat else 0):
        yield responder.first_event(i)
    left = len(answers)
    while left:
        i, text = await pieces.get()
        if text is not None:
            if event := responder.text_event(i, text):
                yield event
            continue
        left -= 1
        if error := _error_of(answers[i]):
            yield f"data: {json.dumps(error.body())}\n\n"
            return
        yield responder.text_event(i, "", answers[i].finish_reason)
    if responder.body.stream_options.include_usage:
        yield responder.usage_event(answers)
    yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Cancels the answers when it ends, also because the client has gone away."""

    def __init__(self, events: AsyncIterator[str], answers: list[Answer]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self.answers)
