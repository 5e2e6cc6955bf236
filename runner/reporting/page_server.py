"""An HTTP server on the loopback address for pages, and a page that is written again as it changes.

A page that is written again while what it shows goes on.

An HTTP server on the loopback address for pages that are made at each request.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from common.errors import UserError, one_line, print_safely
from common.limits.connections import HEADER_SECONDS

MAX_SHARE = 0.005  # of the time
SECONDS_BETWEEN_PAGES = 5.0  # at least, between two pages


class RepeatedPage:
    """Calls `write_page` in at most MAX_SHARE of the time after the first page.

    What goes wrong is passed to `warn` once and never raised.
    """

    def __init__(self, write_page: Callable[[], object], warn: Callable[[str], None]) -> None:
        self._write_page, self._warn = write_page, warn
        self._has_warned = False
        self._has_written = False
        self._due = 0.0  # monotonic time of the next page

    def write_if_due(self) -> None:
        if self._is_due():
            self.write()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def write(self) -> None:
        begun = time.monotonic()
        try:
            self._write_page()
        # the page only repeats what the other files hold: nothing that is wrong with it may end a training
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"report.html cannot be written: {type(error).__name__}: {error}")
        ended = time.monotonic()
        # the first page imports and compiles what the others use
        share = (ended - begun) / MAX_SHARE if self._has_written else 0.0
        self._has_written, self._due = True, ended + max(SECONDS_BETWEEN_PAGES, share)


HOST = "127.0.0.1"
PAGE_SECONDS = 2.0  # between two times that a page is written
MAX_CACHED_PAGES = 16
MAX_PAGE_CONNECTIONS = 32  # at a time; more are closed at once
# (path without the first slash, query) -> the page; None: there is no such page
Pages = Callable[[str, dict[str, list[str]]], bytes | None]


def serve_pages(title: str, pages: Pages, port: int) -> None:
    """Answer GET requests with what `pages` returns, until Ctrl-C.

    Raises UserError if the port is not free.
    """
    try:
        server = PageServer(pages, port)
    except OSError as error:
        raise UserError(
            f"port {port} of {HOST} cannot be used: {error.strerror}", f"port={port}", "port=0 takes a free one"
        ) from error
    with server:
        print_safely(f"serving {title} on http://{HOST}:{server.server_port}/ (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def only_page(write: Callable[[], Path]) -> Pages:
    """Return the pages of a server with one page: the file that `write` returns."""
    return lambda path, query: None if path else write().read_bytes()


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, pages: Pages, port: int) -> None:
        super().__init__((HOST, port), PageHandler)
        self._pages, self._lock = pages, threading.Lock()
        self._cached: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # address -> (when it was written, page)
        self._free = threading.BoundedSemaphore(MAX_PAGE_CONNECTIONS)
        # of connections whose headers are not complete, monotonic seconds
        self.deadlines: dict[socket.socket, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own if there is a place."""
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        self.deadlines[request] = time.monotonic() + HEADER_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.deadlines.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """Close the connections that have not sent their headers in time: called about twice a second."""
        now = time.monotonic()
        for request, deadline in [*self.deadlines.items()]:
            if now > deadline:
                with suppress(OSError):  # closed already
                    request.shutdown(socket.SHUT_RDWR)

    def page(self, address: str) -> bytes | None:
        """Return the page at `address`, at most PAGE_SECONDS old.

        One page is written at a time. Raises UserError, OSError.
        """
        with self._lock:
            written, page = self._cached.get(address, (0.0, b""))
            if page and time.monotonic() <= written + PAGE_SECONDS:
                return page
            url = urlsplit(address)
            new = self._pages(
                unquote(url.path, errors="surrogateescape").removeprefix("/"),
                parse_qs(url.query, errors="surrogateescape"),
            )
            if new is not None:
                self._cached[address] = (time.monotonic(), new)
                self._cached.move_to_end(address)
                while len(self._cached) > MAX_CACHED_PAGES:
                    self._cached.popitem(last=False)
            return new


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # seconds for a client to send the next bytes, and to take the answer

    def do_GET(self) -> None:
        self.server.deadlines.pop(self.connection, None)  # the headers are complete
        host, _, port = (self.headers.get("Host") or "").rpartition(":")
        # a name of another page for this address
        if host not in (HOST, "localhost") or port != str(self.server.server_address[1]):
            return self.send_error(403, "this server answers for 127.0.0.1 and localhost only")
        if self.headers.get("Sec-Fetch-Site") == "cross-site":  # a page of another host makes the browser ask
            return self.send_error(403, "pages of other hosts may not use this server")
        try:
            page = self.server.page(self.path)
        except UserError as error:
            return self._send(
                400,
                f"{one_line(error.message)}\n{one_line(error.fix)}\n".encode("utf-8", "backslashreplace"),
                "text/plain",
            )
        except OSError as error:
            return self._send(
                500,
                f"the page cannot be read or written: {one_line(str(error))}\n".encode("utf-8", "backslashreplace"),
                "text/plain",
            )
        # a page of files that another has written: the answer says what is wrong with it, and the others are still
        # served
        except Exception as error:
            return self._send(
                500,
                f"the page cannot be made: {one_line(f'{type(error).__name__}: {error}')}\n".encode(
                    "utf-8", "backslashreplace"
                ),
                "text/plain",
            )
        if page is None:
            return self.send_error(404)
        self._send(200, page, "text/html")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not printed."""
