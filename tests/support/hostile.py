"""Hostile and broken receivers.

Each script handles one connection. `OUTCOMES` gives the acceptable results of a transport: a
status, or kinds of failures. A flood continues until the sender disconnects, at a pace that lets
other tasks of the process run.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING

from outbox.core.model.response import Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.destinations.servers import Connection

    Script = Callable[[Connection], Awaitable[None]]

DRIP_S = 0.05
FLOOD = 16 * 1024
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BOMB = gzip.compress(b"\0" * 10_000_000)


def _respond_with(*pieces: bytes) -> Script:
    """Responds to every request with these pieces, and waits for the sender to disconnect."""

    async def script(connection: Connection) -> None:
        await connection.request()
        for piece in pieces:
            await connection.send(piece)
        await connection.closed_by_peer()

    return script


def _floods(first: bytes, again: bytes) -> Script:
    """Begins a response and never ends it."""
    flood = again * max(1, FLOOD // len(again))

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(first)
        while True:
            await connection.send(flood)
            await asyncio.sleep(0)

    return script


def _drips(first: bytes, again: bytes) -> Script:
    """The same, one byte at a time."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(first)
        while True:
            await connection.send(again)
            await asyncio.sleep(DRIP_S)

    return script


async def _hangs(connection: Connection) -> None:
    await connection.request()
    await connection.closed_by_peer()


async def _reads_nothing(connection: Connection) -> None:
    await asyncio.get_running_loop().create_future()


async def _resets(connection: Connection) -> None:
    await connection.request()
    connection.reset()


async def _closes(connection: Connection) -> None:
    await connection.request()


async def _respond_before_request(connection: Connection) -> None:
    await connection.send(OK)
    await connection.closed_by_peer()


async def _respond_to_head(connection: Connection) -> None:
    await connection.head()
    await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    await connection.closed_by_peer()


async def _floods_when_idle(connection: Connection) -> None:
    await connection.request()
    await connection.send(OK)
    while True:
        await asyncio.sleep(0.001)
        await connection.send(b"HTTP/1.1 200 Forged\r\nContent-Length: 0\r\n\r\n" * 300)


SCRIPTS: dict[str, Script] = {
    "hangs": _hangs,
    "reads nothing": _reads_nothing,
    "resets": _resets,
    "closes": _closes,
    "drips its head": _drips(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "drips its body": _drips(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"x"),
    "drips chunks": _drips(CHUNKED, b"1\r\nx\r\n"),
    "an endless status line": _floods(b"HTTP/1.1 200 ", b"x"),
    "an endless header": _floods(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "an endless name of a header": _floods(b"HTTP/1.1 200 OK\r\n", b"x"),
    "endless headers": _floods(b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n"),
    "endless folds": _floods(b"HTTP/1.1 200 OK\r\nX: a\r\n", b" b\r\n"),
    "a thousand headers": _respond_with(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n"),
    "a header of a megabyte": _respond_with(
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n"
    ),
    "an endless body": _floods(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "a body of an exabyte": _floods(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1152921504606846976\r\n\r\n", b"x"
    ),
    "endless chunks of a byte": _floods(CHUNKED, b"1\r\nx\r\n"),
    "endless extensions of a chunk": _floods(CHUNKED + b"1;", b"x"),
    "endless extensions of chunks": _floods(CHUNKED, b"1;" + b"x=y;" * 100 + b"\r\nx\r\n"),
    "endless trailers": _floods(CHUNKED + b"0\r\n", b"X-Trailer: value\r\n"),
    "an endless trailer": _floods(CHUNKED + b"0\r\nX: ", b"x"),
    "a chunk of an exabyte": _floods(CHUNKED + b"1000000000000000\r\n", b"x"),
    "a chunk larger than numbers are": _respond_with(CHUNKED + b"f" * 40 + b"\r\nabc"),
    "a chunk of less than nothing": _respond_with(CHUNKED + b"-1\r\nabc"),
    "a gzip bomb": _respond_with(
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB)
        + BOMB
    ),
    "a bomb of chunks of gzip": _respond_with(
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"),
        b"%x\r\n" % len(BOMB) + BOMB + b"\r\n0\r\n\r\n",
    ),
    "endless responses before the response": _floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless early hints": _floods(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    "another protocol, and a flood of it": _floods(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b"\0"
    ),
    "garbage": _floods(b"", b"\x00\xff\x16\x03\x01"),
    "SSH": _respond_with(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "TLS where there is none": _respond_with(
        b"\x16\x03\x03\x00\x31\x02\x00\x00\x2d\x03\x03" + b"a" * 99
    ),
    "HTTP/0.9": _respond_with(b"<html>hello</html>\r\n\r\n"),
    "HTTP/2": _respond_with(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\0" * 18),
    "a folded header": _respond_with(OK.replace(b"\r\n\r\n", b"\r\nX: a\r\n b\r\n\r\n")),
    "bare line feeds": _respond_with(OK.replace(b"\r\n", b"\n")),
    "bare carriage returns": _respond_with(OK.replace(b"\r\n", b"\r")),
    "two lengths": _respond_with(OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n")),
    "a length and chunks": _respond_with(
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"1\r\nx\r\n0\r\n\r\n"
    ),
    "a length of less than nothing": _respond_with(OK.replace(b": 2", b": -2")),
    "a length with a plus": _respond_with(OK.replace(b": 2", b": +2")),
    "a NUL in a header": _respond_with(OK.replace(b"\r\n\r\n", b"\r\nX: a\0b\r\n\r\n")),
    "a body where none may be": _respond_with(b"HTTP/1.1 204 No Content\r\n\r\n" + OK),
    "a second response": _respond_with(OK + b"HTTP/1.1 500 Forged\r\nContent-Length: 0\r\n\r\n"),
    "a response before the request": _respond_before_request,
    "a response to the head alone": _respond_to_head,
    "a flood when it is idle": _floods_when_idle,
    "a way inside": _respond_with(
        b"HTTP/1.1 307 Go\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    ),
}

_TIMEOUT, _RESET = frozenset({Failure.TIMEOUT}), frozenset({Failure.RESET})
_PROTOCOL = frozenset({Failure.PROTOCOL})

OUTCOMES: dict[str, int | frozenset[Failure]] = {
    **dict.fromkeys(SCRIPTS, 200),
    **dict.fromkeys(("hangs", "reads nothing", "drips its head"), _TIMEOUT),
    **dict.fromkeys(("resets", "closes"), _RESET),
    **dict.fromkeys(
        (
            "an endless status line",
            "an endless header",
            "an endless name of a header",
            "endless headers",
            "endless folds",
            "a thousand headers",
            "a header of a megabyte",
            "endless responses before the response",
            "endless early hints",
            "garbage",
            "SSH",
            "TLS where there is none",
            "HTTP/0.9",
            "HTTP/2",
            "bare carriage returns",
            "two lengths",
            "a length and chunks",
            "a length of less than nothing",
            "a length with a plus",
            "a NUL in a header",
        ),
        _PROTOCOL,
    ),
    "another protocol, and a flood of it": 101,
    "a body where none may be": 204,
    "a response to the head alone": 413,
    "a way inside": 307,
}
