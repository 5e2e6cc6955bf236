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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
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
MAX_DISCARDED_BYTES = 64 << 20  # of a larger body, which is refused when it has been read
BODY_SECONDS = 60  # a body that takes longer to arrive is refused
PATHS = "the paths are GET /v1/models, POST /v1/chat/completions, POST /v1/completions, GET /health"
OPEN_PATHS = ("/health",)  # answered without the key


class Guard:
    """`key`: the token that clients must send as `Authorization: Bearer KEY`; None: none is needed.

    `allowed_hosts`: names under which the server may be addressed, and from whose pages; None: any. Without this check
    a web page could use a loopback server through the browser of its user.
    """

    def __init__(self, app: ASGIApp, key: str | None, allowed_hosts: list[str] | None) -> None:
        self.app, self.key, self.allowed_hosts = app, key, allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noting_start(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        headers = {"connection": "close"}  # the rest of a refused request may still come
        try:
            if scope["type"] == "http":
                self._check(scope["path"], Headers(scope=scope))
            # with `app` in the scope the router raises HTTPException
            return await self.app({**scope, "app": self}, receive, noting_start)
        except ApiError as error:
            response = error
        except HTTPException as error:
            response = ApiError(error.status_code, f"{error.detail}; {PATHS}")
            headers |= error.headers or {}
        except Exception:  # any fault of a request: its traceback is for the log of the server, not for the client
            print_safely(traceback.format_exc(), file=sys.stderr)
            response = ApiError(500, "the server failed; its log has the cause", "server_error")
        if not is_started:
            await JSONResponse(response.body(), response.status, headers)(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises ApiError for a request that must not be answered."""
        if self.allowed_hosts is not None:
            origin = headers.get("origin")
            if _host_of("//" + headers.get("host", "")) not in self.allowed_hosts:
                raise ApiError(
                    403,
                    "this server answers under the names of this machine only; start it with host= to serve others",
                    code="host_not_allowed",
                )
            if origin is not None and _host_of(origin) not in self.allowed_hosts:
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


def _host_of(url: str) -> str:
    """Return the name of the host, without its port; "" if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


async def read_body(request: Request) -> bytes:
    """Return the body, whether it has a length or comes in chunks.

    Raises ApiError if it is too large or too slow. A large body is read to its end, within a limit: a client that is
    still sending would not see the response.
    """
    too_large = ApiError(413, f"the request is larger than {MAX_BODY_BYTES:,} bytes")
    length = request.headers.get("content-length", "0")
    is_number = length.isascii() and length.isdigit() and len(length) <= 20
    if not is_number or int(length) > (MAX_BODY_BYTES if "expect" in request.headers else MAX_DISCARDED_BYTES):
        raise too_large
    body, received = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                received += len(part)
                if received > MAX_DISCARDED_BYTES:
                    raise too_large
                if received <= MAX_BODY_BYTES:
                    body += part
    except TimeoutError:
        raise ApiError(408, f"the request took longer than {BODY_SECONDS} seconds to arrive") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has closed the connection") from None
    if received > MAX_BODY_BYTES:
        raise too_large
    return bytes(body)
