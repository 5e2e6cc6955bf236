"""Connections that do not send the headers of a request are closed; those that wait for an answer are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("uvicorn", reason="part of the extra serve")

import uvicorn
from uvicorn.server import ServerState

from common.limits import HEADER_SECONDS
from runner.serving.guard import HeaderDeadlineProtocol

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Loop:
    """Event loop whose time does not pass: its timers are those that were neither cancelled nor called."""

    def __init__(self) -> None:
        self.timers: dict[Mock, tuple[float, Callable[[], None]]] = {}

    def call_later(self, delay: float, callback: Callable[[], None]) -> Mock:
        timer = Mock()
        timer.cancel = lambda: self.timers.pop(timer, None)
        self.timers[timer] = (delay, callback)
        return timer

    def create_task(self, coroutine: Any, **_: Any) -> Mock:
        coroutine.close()
        return Mock()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def connection(loop: Any) -> HeaderDeadlineProtocol:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    protocol = HeaderDeadlineProtocol(uvicorn.Config(app, ws="none"), ServerState(), {}, _loop=loop)
    protocol.connection_made(Mock(spec=asyncio.Transport, get_extra_info=Mock(return_value=None)))
    return protocol


@pytest.mark.parametrize(
    "sent",
    [[], [b"GET /health HTTP/1.1\r\n"], [bytes([byte]) for byte in REQUEST[:-1]]],
    ids=["nothing", "line", "bytes"],
)
def test_connection_without_whole_headers_is_closed_at_the_first_deadline(
    loop: Loop, connection: Any, sent: list[bytes]
) -> None:
    [(timer, (delay, close))] = loop.timers.items()
    for data in sent:
        connection.data_received(data)
    assert list(loop.timers) == [timer] and delay == HEADER_SECONDS  # no byte moves the deadline
    close()
    connection.transport.abort.assert_called_once()


def test_connection_with_whole_headers_has_a_deadline_for_the_next_request(loop: Loop, connection: Any) -> None:
    connection.data_received(REQUEST)
    assert not loop.timers
    connection.data_received(REQUEST[:9])  # while the first one is answered
    assert not loop.timers
    connection.cycle.response_complete = True
    connection.data_received(REQUEST[9:12])
    assert [delay for delay, _ in loop.timers.values()] == [HEADER_SECONDS]
    connection.connection_lost(OSError())
    assert not loop.timers
