"""Chromium for the tests of the pages.

`open_page(path_or_url, width=, scheme=)` opens a page; what a page must never do fails its test.

A test is marked slow and asks for `open_page`, and for `viewport` to run at each width and color scheme:

    pytestmark = pytest.mark.slow

    def test_sweep_page_fits_the_screen(open_page, viewport, tmp_path):
        page = open_page(write_report(tmp_path), *viewport)  # playwright.sync_api.Page
        assert page_checks.overflow(page) == []
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
# No name is resolved, so that a prefetch cannot leave either. As root, chromium needs --no-sandbox.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
HEIGHTS = {1280: 900, 390: 844}
VIEWPORTS = [(width, scheme) for width in HEIGHTS for scheme in ("light", "dark")]
OpenPage = Callable[..., Any]


@dataclass
class Chromium:
    browser: Any  # playwright.sync_api.Browser
    loop: asyncio.AbstractEventLoop  # of Playwright


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """One browser for all tests of a process; skipped without Playwright's package or without chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the tests of the pages need the package playwright")
    path = next((found for name in CHROMIUM_NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"the tests of the pages need one of these programs: {', '.join(CHROMIUM_NAMES)}")
    playwright = sync_api.sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    yield Chromium(browser, loop)
    asyncio._set_running_loop(loop)
    browser.close()
    playwright.stop()


@pytest.fixture(params=VIEWPORTS, ids=lambda viewport: f"{viewport[0]}-{viewport[1]}")
def viewport(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Width in pixels and color scheme: the test runs once for each."""
    return request.param


@pytest.fixture
def page_faults() -> list[str]:
    """What the opened pages did and must not do. A test that expects a fault removes it."""
    return []


@pytest.fixture
def open_page(chromium: Chromium, page_faults: list[str]) -> Iterator[OpenPage]:
    """`open_page(path or loopback URL, width=1280, scheme="light")` returns a page.

    With `clock` (seconds since 1970) its time stands still: its timers run only in `page.clock.run_for(milliseconds)`.

    The test fails if a page sends a request to anything but itself, prints to the console, raises, or opens a dialog or
    another page.
    """
    contexts: list[Any] = []
    # Playwright's loop counts as running in this thread, for as long as no other test can call asyncio.run
    asyncio._set_running_loop(chromium.loop)

    def open_page(target: Path | str, width: int = 1280, scheme: str = "light", clock: float | None = None) -> Any:
        url = target.resolve().as_uri() if isinstance(target, Path) else target
        context = chromium.browser.new_context(
            viewport={"width": width, "height": HEIGHTS.get(width, 900)}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        watch(context, page, url, page_faults)
        if clock is not None:
            page.clock.install(time=clock - 1)
            page.clock.pause_at(clock)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    asyncio._set_running_loop(None)
    assert page_faults == []


def watch(context: Any, page: Any, url: str, faults: list[str]) -> None:
    """Add what the pages of `context` do, and must not do, to `faults`."""

    def on_request(request: Any) -> None:
        if not is_page_itself(request.url, url):
            faults.append(f"request: {request.method} {request.url}")

    def on_dialog(dialog: Any) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    context.on("request", on_request)
    context.on("page", lambda other: faults.append(f"opened: {other.url}"))
    page.on("console", lambda message: faults.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", on_dialog)


def is_page_itself(requested: str, url: str) -> bool:
    """Whether a request is for the page, another page of its loopback server, or another report.html below the folder
    of the page.
    """
    found, own = urlsplit(requested), urlsplit(url)
    if own.scheme == "file":
        folder = own.path.rpartition("/")[0]
        return found.scheme == "file" and (
            found.path == own.path or (found.path.startswith(f"{folder}/") and found.path.endswith("/report.html"))
        )
    return own.hostname == "127.0.0.1" and (found.scheme, found.netloc) == (own.scheme, own.netloc)
