"""Routes of the server: /v1/models, /v1/chat/completions, /v1/completions, /health."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from common.errors import UserError
from data.errors import BadRowError
from data.tokenize.chat_template import ChatTemplate
from runner.serving.generation import Answer, GenerationQueue, GenerationRequest, Sampling
from runner.serving.protocol import ChatRequest, CompletionRequest

MAX_BODY_BYTES = 4 << 20
Body = ChatRequest | CompletionRequest


def create_app(generation: GenerationQueue, name: str, max_new_tokens: int, key: str | None, allowed_hosts: list[str] | None = None) -> FastAPI:
    """`key`: the token that clients must send as `Authorization: Bearer KEY`; None: none is needed. `allowed_hosts`: values of the header Host; None: any."""
    app = FastAPI(title="lm-runner", docs_url=None, redoc_url=None, openapi_url=None)
    if allowed_hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts, www_redirect=False)
    server = _Server(generation, name, max_new_tokens)

    @app.middleware("http")
    async def check(request: Request, call_next: Any) -> Any:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and request.url.path != "/health" and not hmac.compare_digest(given.encode(), key.encode()):
            return _error(401, "the key is missing or wrong: send it as Authorization: Bearer KEY", "authentication_error")
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return _error(413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", "invalid_request_error")
        return await call_next(request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return _error(400, f"{'.'.join(map(str, first['loc'][1:])) or 'body'}: {first['msg']}", "invalid_request_error")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), "invalid_request_error")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": server.started, "owned_by": "lm-runner"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await server.answer(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await server.answer(body, request)

    return app


def _error(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status_code=status)


class _Server:
    def __init__(self, generation: GenerationQueue, name: str, max_new_tokens: int) -> None:
        self.generation, self.name, self.max_new_tokens = generation, name, max_new_tokens
        self.tokenizer = generation.trained.tokenizer
        self.template = ChatTemplate(self.tokenizer) if self.tokenizer.chat_template is not None else None
        self.started = int(time.time())

    async def answer(self, body: Body, request: Request) -> Any:
        if unknown := body.unsupported():
            raise HTTPException(400, f"{unknown} is not supported by this server: leave it out")
        try:
            prompts = self._prompts(body)
        except (UserError, BadRowError) as error:
            raise HTTPException(400, str(error.args[0])) from error
        sampling = self._sampling(body, max(map(len, prompts)))
        generation = GenerationRequest([Answer(prompt, body.stops) for prompt in prompts for _ in range(body.n)], sampling)
        head = {"id": f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if body.stream:
            if isinstance(body, CompletionRequest) and (body.echo or body.logprobs is not None):
                raise HTTPException(400, "echo and logprobs are not supported with stream=true")
            return StreamingResponse(self._stream(body, generation, head), media_type="text/event-stream")
        await self._run(generation, request)
        return await self._complete(body, generation, head, request)

    def _prompts(self, body: Body) -> list[list[int]]:
        if isinstance(body, CompletionRequest):
            return [prompt if isinstance(prompt, list) else [*self.tokenizer.bos_ids, *self.tokenizer.encode(prompt)] for prompt in body.prompts]
        if self.template is None:
            raise HTTPException(400, "this model has no chat template: use /v1/completions")
        return [self.template.encode_prompt(body.messages, body.tools)]

    def _sampling(self, body: Body, longest: int) -> Sampling:
        requested = body.max_completion_tokens if isinstance(body, ChatRequest) and body.max_completion_tokens is not None else body.max_tokens
        positions = self.generation.trained.model.cfg.max_position_embeddings
        if longest > positions - (requested or 0):
            raise HTTPException(400, f"the prompt has {longest} tokens and max_tokens is {requested or 0}: this model has {positions} positions")
        vocabulary = self.generation.trained.model.cfg.vocab_size
        stop_ids = tuple(self.template.stop_ids) if isinstance(body, ChatRequest) and self.template else self.tokenizer.stop_ids
        if isinstance(body, CompletionRequest) and any(not 0 <= i < vocabulary for prompt in body.prompts if isinstance(prompt, list) for i in prompt):
            raise HTTPException(400, f"prompt: token ids must be in [0, {vocabulary})")
        limit = self.max_new_tokens if requested is None else requested
        return Sampling(limit, body.temperature, body.top_p, body.top_k, body.repetition_penalty, body.seed, stop_ids)

    async def _run(self, generation: GenerationRequest, request: Request) -> None:
        """Wait for the answers; a client that goes away cancels them. Raises HTTPException."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        generation.on_end = lambda: loop.call_soon_threadsafe(done.set)
        self.generation.submit(generation)
        while not done.is_set():
            try:
                await asyncio.wait_for(done.wait(), timeout=0.5)
            except TimeoutError:
                generation.is_cancelled = generation.is_cancelled or await request.is_disconnected()
        if isinstance(generation.error, UserError):
            raise HTTPException(400, f"{generation.error.message}; {generation.error.fix}")
        if generation.error is not None:
            raise generation.error

    async def _complete(self, body: Body, generation: GenerationRequest, head: dict[str, Any], request: Request) -> dict[str, Any]:
        scores: list[dict[str, Any] | None] = [None] * len(generation.answers)
        if isinstance(body, CompletionRequest) and body.logprobs is not None:
            # The token that ended an answer is listed too: lm-evaluation-harness asks for one token and drops it from the lists.
            whole = [answer.prompt + answer.ids + [self.tokenizer.eos_id] * answer.has_stop_token for answer in generation.answers]
            scoring = GenerationRequest([], generation.sampling, scored=whole)
            await self._run(scoring, request)
            starts = [0 if body.echo else len(answer.prompt) for answer in generation.answers]
            scores = [self._logprobs(ids, start, body.logprobs, *score) for ids, start, score in zip(whole, starts, scoring.scores, strict=True)]
        choices = []
        for i, (answer, score) in enumerate(zip(generation.answers, scores, strict=True)):
            choice: dict[str, Any] = {"index": i, "finish_reason": answer.finish_reason, "logprobs": score}
            if isinstance(body, ChatRequest):
                choice["message"] = {"role": "assistant", "content": answer.text}
            else:
                choice["text"] = (self.tokenizer.decode(answer.prompt, skip_special=False) if body.echo else "") + answer.text
            choices.append(choice)
        kind = "chat.completion" if isinstance(body, ChatRequest) else "text_completion"
        return {**head, "object": kind, "choices": choices, "usage": _usage(generation, body.n)}

    async def _stream(self, body: Body, generation: GenerationRequest, head: dict[str, Any]) -> AsyncIterator[str]:
        """Yield server-sent events; if the client goes away, this generator is closed and the answers are cancelled."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        for i, answer in enumerate(generation.answers):
            answer.on_text = partial(_put, loop, pieces, i)
        generation.on_end = lambda: loop.call_soon_threadsafe(pieces.put_nowait, None)
        is_chat = isinstance(body, ChatRequest)
        head = {**head, "object": "chat.completion.chunk" if is_chat else "text_completion"}

        def event(index: int, text: str | None, reason: str | None) -> str:
            delta = {"role": "assistant", "content": text} if text is not None else {}
            choice = {"index": index, "finish_reason": reason, **({"delta": delta} if is_chat else {"text": text or "", "logprobs": None})}
            return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

        self.generation.submit(generation)
        try:
            while (piece := await pieces.get()) is not None:
                yield event(*piece, None)
            if generation.error is not None:
                yield f"data: {json.dumps({'error': {'message': str(generation.error.args[0]), 'type': 'invalid_request_error'}})}\n\n"
                return
            for i, answer in enumerate(generation.answers):
                yield event(i, None, answer.finish_reason)
            if body.includes_usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(generation, body.n)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            generation.is_cancelled = True

    def _logprobs(self, ids: list[int], start: int, top: int, own: Any, best: Any) -> dict[str, Any]:
        """Return the field logprobs for the tokens from `start` on; the first token of a text has none."""
        names = [self._token_name(i) for i in ids]
        values = [None, *own.tolist()]
        likeliest = [None, *({self._token_name(int(i)): value for i, value in row[: max(top, 1)]} for row in best.tolist())]
        offsets, length = [], 0
        for name in names:
            offsets.append(length)
            length += len(name)
        return {"tokens": names[start:], "token_logprobs": values[start:], "top_logprobs": likeliest[start:], "text_offset": offsets[start:]}

    def _token_name(self, token_id: int) -> str:
        """Return the text of a token, unique among all: part of a character is named by its bytes' token."""
        text = self.tokenizer.decode([token_id], skip_special=False)
        return f"bytes:{token_id}" if "\ufffd" in text else text


def _put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[tuple[int, str] | None], index: int, text: str) -> None:
    """Hand a piece of answer `index` from the thread of the model to the event loop."""
    loop.call_soon_threadsafe(pieces.put_nowait, (index, text))


def _usage(generation: GenerationRequest, n: int) -> dict[str, int]:
    prompt, completion = sum(len(answer.prompt) for answer in generation.answers[::n]), sum(len(answer.ids) for answer in generation.answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
