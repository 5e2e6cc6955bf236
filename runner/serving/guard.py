"""What a request must pass before the application sees it.

Host name, origin, key, size and time of its body, and the deadline of common.limits for its headers. Errors
are JSON, as those of OpenAI.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import traceback
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import print_safely
from common.limits import HEADER_SECONDS
from runner.serving.protocol import ApiError


class HeaderDeadlineProtocol(H11Protocol):
    """Between requests uvicorn's own limit counts (`timeout_keep_alive`); for bodies that of `Guard`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # the headers of a request are complete
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 60  # a body that takes longer to arrive is refused
OPEN_PATHS = ("/health",)  # answered without the key


class Guard:
    """`key`: the token that clients must send as `Authorization: Bearer KEY`; None: none is needed.

    `allowed_hosts`: names under which the server may be addressed, and from whose pages; None: any. Without this check
    a web page could use a loopback server through the browser of its user.
    """

    def __init__(self, app: ASGIApp, key: str | None, allowed_hosts: list[str] | None) -> None:
        self.app, self.key, self.allowed_hosts = app, key, allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        is_started = False

        async def noting_start(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
            return await self.app(scope, _replaying(await _read_body(scope, receive), receive), noting_start)
        except ApiError as error:
            response = error
        except Exception:  # any fault of a request: its traceback is for the log of the server, not for the client
            print_safely(traceback.format_exc(), file=sys.stderr)
            response = ApiError(500, "the server failed; its log has the cause", "server_error")
        if not is_started:
            await JSONResponse(response.body(), response.status, headers={"connection": "close"})(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises ApiError for a request that must not be answered."""
        if self.allowed_hosts is not None:
            origin = headers.get("origin")
            if _host_name(headers.get("host", "")) not in self.allowed_hosts:
                raise ApiError(
                    403,
                    "this server answers under the names of this machine only; start it with host= to serve others",
                    code="host_not_allowed",
                )
            if origin is not None and _host_of_url(origin) not in self.allowed_hosts:
                raise ApiError(403, "requests from pages of other sites are refused", code="origin_not_allowed")
        if self.key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.key.encode()):
            raise ApiError(
                401,
                "the key is missing or wrong: send it as Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
            )


def _host_name(header: str) -> str:
    """Return the name in the value of the header Host, without its port."""
    name = header.partition("]")[0] + "]" if header.startswith("[") else header.partition(":")[0]
    return name.lower().rstrip(".")


def _host_of_url(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body, whether it has a length or comes in chunks.

    Raises ApiError if it is too large or too slow.
    """
    too_large = ApiError(413, f"the request is larger than {MAX_BODY_BYTES:,} bytes")
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 20 or int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise too_large
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the request took longer than {BODY_SECONDS} seconds to arrive") from None


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, then what comes after it: the end of the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
