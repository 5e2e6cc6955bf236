"""Routes of the server: /v1/models, /v1/chat/completions, /v1/completions, /health."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UserError
from data.errors import BadRowError
from data.tokenize.chat_template import ChatTemplate
from runner.serving.answers import Answer, Sampling, Score, Work
from runner.serving.generation import GenerationQueue, QueueFullError, StoppingError
from runner.serving.guard import Guard
from runner.serving.protocol import ApiError, Body, ChatRequest, CompletionRequest, parse_request
from runner.serving.responses import Responder, check_tools

JSON_TYPES = ("", "application/json")  # a web page can send other types to this machine without asking its user


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
        self.tokenizer = generation.trained.tokenizer
        self.template = ChatTemplate(self.tokenizer) if self.tokenizer.chat_template is not None else None
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
        if content_type not in JSON_TYPES[1:]:
            raise ApiError(415, "the header Content-Type must be application/json")
        data = await request.body()
        # Beside the event loop, as texts may be long. Chat templates are rendered one at a time: those of other folders
        # share a process.
        async with self._rendering if kind is ChatRequest else nullcontext():
            body, prompts = await asyncio.to_thread(self._parse, kind, data)
        sampling = self._sampling(body, max(map(len, prompts)))
        seed = secrets.randbits(62) if body.seed is None else body.seed
        # Choice i of a prompt has the seed + i: it does not depend on the other prompts, nor on what else is generated.
        answers = [
            Answer(prompt=prompt, sampling=sampling, seed=(seed + i) % 2**63, stops=body.stops)
            for prompt in prompts
            for i in range(body.n)
        ]
        responder = Responder(body, self.name, self.tokenizer)
        if body.stream:
            return self._stream(responder, answers)
        await self._run(answers, request)
        scores: list[Score | None] = [None] * len(answers)
        if body.top is not None:
            scores = [responder.score_of(answer) for answer in answers]
            await self._run([score for score in scores if score is not None], request)
        return JSONResponse(responder.complete(answers, scores))

    def _parse(self, kind: type[ChatRequest] | type[CompletionRequest], data: bytes) -> tuple[Body, list[list[int]]]:
        body: Body = parse_request(kind, data)
        self.check_model(body.model)
        try:
            return body, self._prompts(body)
        except (UserError, BadRowError) as error:
            raise ApiError(
                400, str(error.args[0]), param="prompt" if isinstance(body, CompletionRequest) else "messages"
            ) from error

    def _prompts(self, body: Body) -> list[list[int]]:
        if isinstance(body, CompletionRequest):
            prompts = [
                prompt if isinstance(prompt, list) else [*self.tokenizer.bos_ids, *self.tokenizer.encode(prompt)]
                for prompt in body.prompts
            ]
            vocabulary = self.generation.trained.model.cfg.vocab_size
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
        tools = body.tools if body.tool_choice != "none" else None
        if tools:
            check_tools(self.template)
        return [self.template.encode_prompt(body.messages, tools)]

    def _sampling(self, body: Body, longest: int) -> Sampling:
        positions = self.generation.trained.model.cfg.max_position_embeddings
        requested = body.requested_tokens
        if longest + (requested or 0) > positions:
            requested_text = "" if requested is None else f" and max_tokens is {requested}"
            raise ApiError(
                400,
                f"the prompt has {longest} tokens{requested_text}: this model has {positions} positions",
                code="context_length_exceeded",
            )
        stop_ids = (
            self.template.stop_ids if isinstance(body, ChatRequest) and self.template else self.tokenizer.stop_ids
        )
        limit = self.max_new_tokens if requested is None else requested
        return Sampling(limit, body.temperature, body.top_p, body.top_k, body.repetition_penalty, tuple(stop_ids))

    def _submit(self, works: Sequence[Work]) -> None:
        try:
            self.generation.submit(works)
        except QueueFullError:
            raise ApiError(503, "too many answers wait: try again later", "server_error", code="queue_full") from None

    async def _run(self, works: Sequence[Work], request: Request) -> None:
        """Wait until all is done; a client that goes away cancels it. Raises ApiError."""
        loop, done, left = asyncio.get_running_loop(), asyncio.Event(), len(works)

        def count_down() -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        for work in works:
            work.on_end = partial(loop.call_soon_threadsafe, count_down)
        self._submit(works)
        ending, leaving = asyncio.ensure_future(done.wait()), asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.is_cancelled = True
            ending.cancel()
            leaving.cancel()
        if not done.is_set():
            raise ApiError(499, "the client has closed the connection")
        for work in works:
            if work.error is not None:
                raise _as_api_error(work.error)

    def _stream(self, responder: Responder, answers: list[Answer]) -> StreamingResponse:
        """Return server-sent events."""
        loop = asyncio.get_running_loop()
        # (index of the answer, text or None at its end)
        pieces: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()
        for i, answer in enumerate(answers):
            answer.on_text = partial(_put, loop, pieces, i)
            answer.on_end = partial(_put, loop, pieces, i, None)
        self._submit(answers)
        return _EventStream(_events(responder, answers, pieces), answers)


async def _events(
    responder: Responder, answers: list[Answer], pieces: asyncio.Queue[tuple[int, str | None]]
) -> AsyncIterator[str]:
    left = len(answers)
    for i in range(left if responder.is_chat else 0):
        yield responder.first_event(i)
    while left:
        i, text = await pieces.get()
        if text is not None:
            yield responder.text_event(i, text)
            continue
        left -= 1
        if (error := answers[i].error) is not None:
            yield f"data: {json.dumps(_as_api_error(error).body())}\n\n"
            return
        yield responder.last_event(i, answers[i].finish_reason)
    if responder.body.includes_usage:
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
            for answer in self.answers:
                answer.is_cancelled = True


def _put(
    loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[tuple[int, str | None]], index: int, text: str | None
) -> None:
    """Hand a piece of answer `index` from the thread of the model to the event loop."""
    loop.call_soon_threadsafe(pieces.put_nowait, (index, text))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, UserError):
        return ApiError(400, f"{error.message}; {error.fix}")
    if isinstance(error, StoppingError):
        return ApiError(503, "the server is stopping", "server_error", code="stopping")
    return ApiError(500, "the model failed; the log of the server has the cause", "server_error")
