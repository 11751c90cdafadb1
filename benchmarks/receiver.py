"""A cheap receiver: reads a request, records the time, and responds 204.

A separate process, controlled by JSON lines on stdin. It ends at the end of stdin. One line is
printed for each command, after everything has arrived:

    {"expect": 1000, "keep": false, "delay_s": 0, "every": 0, "distinct": false}
    {"per_s": 8123.4}                                or, with keep,
    {"arrived": {"17": 123456789}}                   payload's n: monotonic ns

With `every`, a line is printed after each such number of requests, and none at the end:

    {"so_far": 2000, "at": 123456789}                monotonic ns
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import sys
import time
from array import array
from typing import Any, cast

import orjson

try:
    import uvloop
except ImportError:  # Windows
    uvloop = None  # type: ignore[assignment]

TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"
# The first and the last requests include start-up and lanes that ended early.
FROM_SHARE, TO_SHARE = 0.05, 0.9


class Receiver:
    """The expected and the received requests."""

    def __init__(self) -> None:
        self.response = TAKEN
        self.delay_s = 0.0
        self.distinct = False
        """Whether each response has an X-Request-Id of its own."""
        self._responded = 0
        self._expected = self._every = 0
        self._times = array("q")
        self._bodies: list[bytes] | None = None
        self._unread = b""

    def command(self) -> None:
        """Read a command from stdin; end at the end of the input."""
        read = os.read(sys.stdin.fileno(), 65536)
        if not read:
            asyncio.get_running_loop().stop()
            return
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            asked = orjson.loads(line)
            self.delay_s, self.distinct = asked["delay_s"], asked["distinct"]
            self._expected, self._every = asked["expect"], asked["every"]
            self._times = array("q")
            self._bodies = [] if asked["keep"] else None

    def arrived(self, body: bytes, deliveries: int) -> None:
        """Handle a request; a duplicate is not expected, and does not count."""
        if b'"replay_of":' in body:
            return
        now, is_complete = time.monotonic_ns(), len(self._times) >= self._expected
        for _ in range(deliveries):
            self._times.append(now)
        if self._bodies is not None:
            self._bodies.append(body)
        if self._every:
            if len(self._times) % self._every == 0:
                say({"so_far": len(self._times), "at": self._times[-1]})
        elif len(self._times) >= self._expected and not is_complete:
            say(self._report())

    def next_response(self) -> bytes:
        """Return the response to a request."""
        if not self.distinct:
            return self.response
        self._responded += 1
        return self.response[:-2] + b"X-Request-Id: %032x\r\n\r\n" % self._responded

    def _report(self) -> dict[str, Any]:
        times = self._times
        if self._bodies is not None:
            # The first copy of each event counts.
            arrived: dict[str, int] = {}
            for body, at in zip(self._bodies, times, strict=True):
                arrived.setdefault(str(orjson.loads(body)["data"]["n"]), at)
            return {"arrived": arrived}
        first, last = int(len(times) * FROM_SHARE), int(len(times) * TO_SHARE)
        return {"per_s": (last - first) / (times[last] - times[first]) * 1e9}


class Connection(asyncio.Protocol):
    """The part of HTTP/1.1 that our clients use."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._read = self._read + data if self._read else data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end].lower()
            total = end + 4 + (_number(head, b"content-length") or 0)
            if len(self._read) < total:
                return
            last, deliveries = _number(head, b"x-last-sequence"), 1
            if last is not None:
                deliveries = last - (_number(head, b"x-sequence") or last) + 1
            self._receiver.arrived(self._read[end + 4 : total], deliveries)
            self._read = self._read[total:]
            if self._receiver.delay_s:
                asyncio.get_running_loop().call_later(self._receiver.delay_s, self._respond)
            else:
                self._respond()

    def _respond(self) -> None:
        if self._transport.is_closing():  # The client was ended meanwhile.
            return
        self._transport.write(self._receiver.next_response())


def _number(head: bytes, name: bytes) -> int | None:
    """Return the value of a numeric header; names are in lower case, as in the head."""
    at = head.find(b"\r\n%b:" % name)
    if at < 0:
        return None
    return int(head[at + len(name) + 3 :].split(b"\r\n", 1)[0])


def say(what: dict[str, Any]) -> None:
    """Print one JSON line to stdout."""
    sys.stdout.buffer.write(orjson.dumps(what) + b"\n")
    sys.stdout.buffer.flush()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a fast event loop: the environment of the relay must not be the bottleneck."""
    loop: asyncio.AbstractEventLoop = (uvloop or asyncio).new_event_loop()
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--certificate", help="PEM file with key and certificate; default: no TLS.")
    given = parser.parse_args()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    receiver, failures = Receiver(), []

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Waiting clients get their response at the end.
        loop.default_exception_handler(context)
        failures.append(context)
        loop.stop()

    loop.set_exception_handler(fail)

    async def start() -> None:
        tls = None
        if given.certificate:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(given.certificate)
        ports = []
        for context in (None, tls):
            server = await loop.create_server(
                lambda: Connection(receiver), "127.0.0.1", 0, ssl=context, backlog=1024
            )
            ports.append(server.sockets[0].getsockname()[1])
        loop.add_reader(sys.stdin.fileno(), receiver.command)
        say({"http": ports[0], "https": ports[1] if tls else None})

    loop.run_until_complete(start())
    loop.run_forever()
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
