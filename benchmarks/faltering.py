"""A receiver that is down for a while, and counts what comes in each tenth of a second.

Down as a service behind a proxy is: 503, at once.  Afterwards each request takes the
time that work takes.  A process of its own; it says where it listens, and is told by JSON
lines on stdin when the outage begins.  It ends when stdin does.

    {"url": "http://127.0.0.1:4711/"}
    {"down_s": 30, "takes_s": 0.02, "expect": 50000}
    {"bins": [17, 164, ...], "recovered_s": 17.2}    requests; from the outage's end to the last
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import orjson

from benchmarks.receiver import TAKEN, Connection, Receiver, new_event_loop, say

DOWN = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
BIN_S = 0.1


class Faltering(Receiver):
    """Well until it is told to be down."""

    def __init__(self) -> None:
        super().__init__()
        self._began_at = self._up_at = 0.0
        self._left = 0
        self._bins: list[int] = []

    def command(self) -> None:
        """Read a line from stdin; without one, end."""
        loop = asyncio.get_running_loop()
        line = os.read(sys.stdin.fileno(), 65536)
        if not line:
            loop.stop()
            return
        asked = orjson.loads(line)
        self.answer, self.delay_s = DOWN, 0.0
        self._left, self._bins = asked["expect"], []
        self._began_at = time.monotonic()
        self._up_at = self._began_at + asked["down_s"]
        loop.call_later(asked["down_s"], self._recover, asked["takes_s"])

    def _recover(self, takes_s: float) -> None:
        self.answer, self.delay_s = TAKEN, takes_s
        self._up_at = time.monotonic()

    def arrived(self, _: bytes, deliveries: int) -> None:
        """One request is here."""
        if not self._left:
            return
        now = time.monotonic()
        n = int((now - self._began_at) / BIN_S)
        self._bins += [0] * (n + 1 - len(self._bins))
        self._bins[n] += 1
        if self.answer is TAKEN:
            self._left -= min(deliveries, self._left)
            if not self._left:
                say({"bins": self._bins, "recovered_s": now - self._up_at})


def main() -> None:
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    receiver = Faltering()

    async def start() -> None:
        server = await loop.create_server(
            lambda: Connection(receiver), "127.0.0.1", 0, backlog=1024
        )
        loop.add_reader(sys.stdin.fileno(), receiver.command)
        say({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"})

    loop.run_until_complete(start())
    loop.run_forever()


if __name__ == "__main__":
    main()
