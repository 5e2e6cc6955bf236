"""Routes of the server: /v1/models, /v1/chat/completions, /v1/completions, /health."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UserError
from runner.inference.generation import Answer, Sampling, Work
from runner.serving.guard import Guard
from runner.serving.protocol import ApiError, Body, ChatRequest, CompletionRequest, parse_request
from runner.serving.queue import GenerationQueue, QueueFullError, StoppingError
from runner.serving.responses import Responder, check_tools

Pieces = asyncio.Queue[tuple[int, str | None]]  # (number of a work, a piece of its text, or None when it is done)

JSON_TYPE = "application/json"  # a web page can send other types to this machine without asking its user


def create_app(
    generation: GenerationQueue, name: str, max_new_tokens: int, key: str | None, allowed_hosts: list[str] | None = None
) -> ASGIApp:
    """`key` and `allowed_hosts`: see Guard."""
    app = FastAPI(title="lm-runner", docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(generation, name, max_new_tokens)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}; the paths are GET /v1/models, POST /v1/chat/completions, POST /v1/completions, GET /health"
        return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        server.check_model(model)
        return server.card()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await server.answer(ChatRequest, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await server.answer(CompletionRequest, request)

    return Guard(app, key, allowed_hosts)


class _Server:
    def __init__(self, generation: GenerationQueue, name: str, max_new_tokens: int) -> None:
        self.generation, self.name, self.max_new_tokens = generation, name, max_new_tokens
        self.trained = generation.trained
        self.template = self.trained.template if self.trained.tokenizer.chat_template is not None else None
        self.started = int(time.time())
        self._rendering = asyncio.Lock()

    def card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "lm-runner"}

    def check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise ApiError(
                404,
                f"this server has no model {model[:200]!r}; it has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Any:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != JSON_TYPE:
            raise ApiError(415, f"the header Content-Type must be {JSON_TYPE}")
        data = await request.body()
        # Beside the event loop, as texts may be long. Chat templates are rendered one at a time: those of other folders
        # share a process.
        async with self._rendering if kind is ChatRequest else nullcontext():
            body, prompts = await asyncio.to_thread(self._parse, kind, data)
        sampling = self._sampling(body, max(map(len, prompts)))
        seed = secrets.randbits(62) if body.seed is None else body.seed
        # Choice i of a prompt has the seed + i: it does not depend on the other prompts, nor on what else is generated.
        answers = [
            Answer(
                prompt=prompt,
                sampling=sampling,
                generator=torch.Generator(self.trained.device).manual_seed((seed + i) % 2**63),
                stops=body.stops,
            )
            for prompt in prompts
            for i in range(body.n)
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

    def _sampling(self, body: Body, longest: int) -> Sampling:
        positions = self.trained.model.cfg.max_position_embeddings
        requested = body.requested_tokens
        if longest + (requested or 0) > positions:
            requested_text = "" if requested is None else f" and max_tokens is {requested}"
            raise ApiError(
                400,
                f"the prompt has {longest} tokens{requested_text}: this model has {positions} positions",
                code="context_length_exceeded",
            )
        return Sampling(
            self.max_new_tokens if requested is None else requested,
            body.temperature,
            body.top_p,
            body.top_k,
            body.repetition_penalty,
            self.trained.stop_ids(isinstance(body, ChatRequest)),
        )

    def _submit(self, works: Sequence[Work], streams_text: bool = False) -> Pieces:
        """Return the queue of what the thread of the model says about `works`."""
        loop, pieces = asyncio.get_running_loop(), Pieces()

        def put(number: int, text: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (number, text))

        def put_end(number: int, _: Future[None]) -> None:
            put(number, None)

        for number, work in enumerate(works):
            work.done.add_done_callback(partial(put_end, number))
            if streams_text and isinstance(work, Answer):
                work.on_text = partial(put, number)
        try:
            self.generation.submit(works)
        except QueueFullError:
            raise ApiError(503, "too many answers wait: try again later", "server_error", code="queue_full") from None
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
    if isinstance(error, StoppingError):
        return ApiError(503, "the server is stopping", "server_error", code="stopping")
    if error is not None:
        return ApiError(500, "the model failed; the log of the server has the cause", "server_error")
    return None


async def _events(responder: Responder, answers: list[Answer], pieces: Pieces) -> AsyncIterator[str]:
    """Yield server-sent events."""
    for i in range(len(answers) if responder.is_chat else 0):
        yield responder.first_event(i)
    left = len(answers)
    while left:
        i, text = await pieces.get()
        if text is not None:
            yield responder.text_event(i, text)
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
