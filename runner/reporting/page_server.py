"""The pages that report.py serves on the loopback address: a list of runs with a page for each, comparisons, and a
sweep with its jobs. Each is made when it is asked for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from common.errors import UserError, one_line, print_safely
from common.limits import HEADER_SECONDS
from runner.reporting.compare import compare_page, read_comparison
from runner.reporting.leaderboard import update_report
from runner.reporting.page_kit import encode_page
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.run_facts import RunReport
from runner.reporting.run_list import list_page, scan_runs, served_link
from runner.reporting.run_page import run_page, write_run_page
from runner.reporting.runs import REPORT_FILE, expand_sweeps, is_file, job_folders
from runner.reporting.sweep_page import sweep_page
from runner.run_dir.contents import RUN_FILE, SWEEP_FILE, check_run_files, is_sweep_dir

HOST = "127.0.0.1"
PAGE_SECONDS = 2.0  # between two times that a page is written
MAX_CACHED_PAGES = 16
MAX_PAGE_CONNECTIONS = 32  # at a time; more are closed at once
RUN_PREFIX = "run/"  # of the address of a run's page
MAX_PAGE_SHARE = 0.1  # of the time: a list of many runs is kept longer
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


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, pages: Pages, port: int) -> None:
        super().__init__((HOST, port), PageHandler)
        self._pages, self._lock = pages, threading.Lock()
        # address -> (monotonic time until which it is not written again, page); the last used is the last
        self._cached: dict[str, tuple[float, bytes]] = {}
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
        """Return the page at `address`, at most PAGE_SECONDS old, or as old as MAX_PAGE_SHARE demands.

        One page is written at a time. Raises UserError, OSError.
        """
        with self._lock:
            kept_until, page = self._cached.pop(address, (0.0, None))
            begun = time.monotonic()
            if begun > kept_until:
                url = urlsplit(address)
                path = unquote(url.path, errors="surrogateescape").removeprefix("/")
                page = self._pages(path, parse_qs(url.query, errors="surrogateescape"))
                ended = time.monotonic()
                kept_until = ended + max(PAGE_SECONDS, (ended - begun) / MAX_PAGE_SHARE)
            if page is not None:
                self._cached[address] = kept_until, page
            while len(self._cached) > MAX_CACHED_PAGES:
                del self._cached[next(iter(self._cached))]
            return page


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
            return self._send(400, encode_page(f"{one_line(error.message)}\n{one_line(error.fix)}\n"), "text/plain")
        # a page of files that another has written: the answer says what is wrong with it, and the others are still
        # served
        except Exception as error:
            is_disk = isinstance(error, OSError)
            problem = (
                f"{'read or written' if is_disk else 'made'}: {'' if is_disk else f'{type(error).__name__}: '}{error}"
            )
            return self._send(500, encode_page(f"the page cannot be {one_line(problem)}\n"), "text/plain")
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


# --- the pages: they are not written to disk ----------------------------------------------------------------------------


def list_pages(root: Path) -> Pages:
    """Return the pages of the list of `root`: "", `run/<path below root>/` and `compare?run=<path>&run=<path>`. Only
    runs below `root` are opened.
    """

    def pages(path: str, query: dict[str, list[str]]) -> bytes | None:
        if not path:
            return encode_page(list_page(scan_runs(root), lambda row: served_link(row, root), is_served=True))
        if path == "compare":
            folders = []
            for name in query.get("run", []):
                if (folder := run_folder(root, name)) is None:
                    raise UserError(f"the list has no run {name}", f"compare?run={name}", "choose runs in the list")
                folders.append(folder)
            if not folders:
                raise UserError("no run is chosen", "compare?run=", "choose runs in the list")
            return comparison_bytes(folders)
        folder = run_folder(root, path.removeprefix(RUN_PREFIX).removesuffix(REPORT_FILE))
        return page_bytes(folder) if path.startswith(RUN_PREFIX) and folder is not None else None

    return pages


def run_folder(root: Path, name: str) -> Path | None:
    """Return the run or sweep at the relative path `name` below `root`; None if there is none, or the path leads
    through a link or out of `root`.
    """
    if "\0" in name:
        return None
    base = root.resolve()
    folder = base / name
    is_below = folder.is_relative_to(base) and folder.resolve() == folder != base
    return root / name if is_below and any(is_file(folder / file) for file in (RUN_FILE, SWEEP_FILE)) else None


def write_page(folder: Path) -> Path:
    """Write report.html of the run or sweep in `folder` again; return its path."""
    if not is_sweep_dir(folder):
        return write_run_page(folder)
    update_report(folder)
    return folder / REPORT_FILE


def folder_pages(folder: Path) -> Pages:
    """Return the pages of a server for a run or sweep: its report.html and, below it, those of the jobs of a sweep."""

    def pages(path: str, query: dict[str, list[str]]) -> bytes | None:
        if not path:
            return write_page(folder).read_bytes()
        name = path.removesuffix(REPORT_FILE).rstrip("/")
        return next((page_bytes(job) for job in job_folders(folder) if job.name == name), None)

    return pages


def comparison_bytes(folders: list[Path]) -> bytes:
    """Return the page that compares the runs and sweeps in `folders`."""
    return encode_page(compare_page(read_comparison(expand_sweeps(folders)), reloads=True))


def page_bytes(folder: Path) -> bytes:
    """Return the page of the run or sweep in `folder`. Raises UserError if a file of it is a link."""
    if is_sweep_dir(folder):
        return encode_page(sweep_page(read_sweep_results(folder), is_final=False))
    check_run_files(folder)
    return encode_page(run_page(RunReport.read(folder)))
