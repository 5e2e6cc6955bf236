"""The page of a run or sweep over HTTP, for this machine only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from common.errors import UserError, print_safely

HOST = "127.0.0.1"
PAGE_SECONDS = 2.0  # between two times that the page is written


def serve_page(folder: Path, write: Callable[[], Path], port: int) -> None:
    """Answer `GET /` with the page that `write` returns, until Ctrl-C. Raises UserError if the port is not free."""
    try:
        server = PageServer(write, port)
    except OSError as error:
        raise UserError(f"port {port} of {HOST} cannot be used: {error.strerror}", f"port={port}", "port=0 takes a free one") from error
    with server:
        print_safely(f"serving {folder} on http://{HOST}:{server.server_port}/ (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, write: Callable[[], Path], port: int) -> None:
        super().__init__((HOST, port), PageHandler)
        self._write, self._lock = write, threading.Lock()
        self._written, self._page = 0.0, b""

    def page(self) -> bytes:
        """Return the page, at most PAGE_SECONDS old."""
        with self._lock:
            if not self._page or time.monotonic() > self._written + PAGE_SECONDS:
                self._page, self._written = self._write().read_bytes(), time.monotonic()
            return self._page


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # another name for this address: pages of other hosts must not read this one
            return self.send_error(403, "this server answers for 127.0.0.1 and localhost only")
        if self.path != "/":
            return self.send_error(404)
        page = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not printed."""
