"""Hostile clients of the relay's listeners, in a separate process.

Half of them never complete a request: silence, half a head, half a body. A quarter sends bodies
with a valid token, one byte at a time, and a quarter sends complete bodies that are costly to parse
or to validate. Each connects again when its connection ends. The process prints a line when all
have connected, and for every line on stdin what has happened since the line before. It ends at the
end of stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter

from benchmarks.receiver import say
from outbox.web.address import parse_address

Address = tuple[str, int]
DRIP_TOKEN, COSTLY_TOKEN = "BENCH_DRIP_TOKEN", "BENCH_COSTLY_TOKEN"
"""Variables of two tokens: dripping clients hold all requests that one token may have."""
DRIP_S = 5.0
COSTLY_EVERY_S = 1.0
RECONNECT_S = 1.0
CONNECTED = "connections"
SMALL_BODY, LARGE_BODY = 127 * 1024, 1023 * 1024
HALVES = (b"", b"GET /healthz HTTP/1.1\r\nHost: ", b"GET / HTTP/1.1\r\nHost: localhost\r\n"
          b"Content-Length: 100000\r\n\r\nx")  # fmt: skip


def _array(field: bytes, item: bytes, size: int) -> bytes:
    count = (size - len(field) - 10) // (len(item) + 1)
    return b'{"' + field + b'":[' + b",".join([item] * count) + b"]}"


COSTLY = (
    (b"/v1/events", b"{" + b",".join(b'"k%d":1' % n for n in range(LARGE_BODY // 13)) + b"}"),
    (b"/v1/events", _array(b"payload", b"[null]", 340_000)),
    (b"/v1/events", _array(b"events", b'{"type":1,"key":1,"x":1}', LARGE_BODY)),
    (b"/v1/endpoints", _array(b"types", b"1", SMALL_BODY)),
    (b"/v1/endpoints", _array(b"retryable", b"[]", SMALL_BODY)),
)
"""Paths and bodies."""


class Clients:
    """The clients, with the number of connections and of responses by status."""

    def __init__(self, count: int) -> None:
        self.counts: Counter[str] = Counter()
        self.all_connected = asyncio.Event()
        self._count = count
        self._drip_token = os.environ[DRIP_TOKEN]
        self._costly_token = os.environ[COSTLY_TOKEN]

    async def stay_incomplete(self, at: Address, sent: bytes) -> None:
        """Send the beginning of a request, and wait for the end of the connection."""
        reader, writer = await self._connect(at)
        try:
            writer.write(sent)
            await self._count_status(reader)
            await reader.read()
        finally:
            writer.close()

    async def drip(self, at: Address) -> None:
        """Send a body of an event byte by byte."""
        reader, writer = await self._connect(at)
        try:
            writer.write(_head(b"/v1/events", self._drip_token, 1000) + b"{")
            responded = asyncio.ensure_future(self._count_status(reader))
            while not responded.done():
                await asyncio.wait([responded], timeout=DRIP_S)
                writer.write(b" ")
            await responded
        finally:
            writer.close()

    async def send_costly(self, at: Address, path: bytes, body: bytes) -> None:
        """Send a costly body, read the response, and again."""
        reader, writer = await self._connect(at)
        try:
            while True:
                writer.write(_head(path, self._costly_token, len(body)) + body)
                status, length = await self._count_status(reader)
                if not status:
                    return
                await reader.readexactly(length)
                await writer.drain()
                await asyncio.sleep(COSTLY_EVERY_S)
        finally:
            writer.close()

    async def _connect(self, at: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*at)
        self.counts[CONNECTED] += 1
        if self.counts[CONNECTED] == self._count:
            self.all_connected.set()
        return reader, writer

    async def _count_status(self, reader: asyncio.StreamReader) -> tuple[str, int]:
        """Return the status of a response, and the length of its body."""
        status, length = "", 0
        while line := (await reader.readline()).strip().lower():
            if not status:
                status = line[9:12].decode()
                self.counts[status] += 1
            elif line.startswith(b"content-length:"):
                length = int(line[15:])
        return status, length

    async def run(self, number: int, listeners: dict[str, Address]) -> None:
        """Be client `number`, and connect again when the connection ends."""
        half, kind = divmod(number, 4)
        while True:
            try:
                if kind < 2:
                    at = list(listeners.values())[half % len(listeners)]
                    await self.stay_incomplete(at, HALVES[number % len(HALVES)])
                elif kind == 2:
                    await self.drip(listeners["api"])
                else:
                    await self.send_costly(listeners["api"], *COSTLY[half % len(COSTLY)])
            except (OSError, asyncio.IncompleteReadError):
                self.counts["lost"] += 1
            await asyncio.sleep(RECONNECT_S)


def _head(path: bytes, token: str, length: int) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    ) % (path, token.encode(), length)


async def run(count: int, listeners: dict[str, Address]) -> None:
    clients = Clients(count)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(clients.run(n, listeners)) for n in range(count)]
        if count:
            await clients.all_connected.wait()
        say({"connected": count})
        while await asyncio.to_thread(sys.stdin.readline):
            say(dict(clients.counts))
            clients.counts.clear()
        for each in running:
            each.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, required=True)
    for name in ("health", "api", "receivers"):
        parser.add_argument(f"--{name}", required=True, help="HOST:PORT")
    given = vars(parser.parse_args())
    count = given.pop("count")
    listeners = {name: parse_address(text) for name, text in given.items()}
    asyncio.run(run(count, {name: (at.host, at.port) for name, at in listeners.items()}))


if __name__ == "__main__":
    main()
