"""A receiver with an outage, which counts the requests in each tenth of a second.

During the outage it responds 503 immediately, like a service behind a proxy. Afterwards each
request takes a fixed time. A separate process; it prints its URL, and reads from stdin, as
JSON lines, when the outage begins. It ends at the end of stdin.

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
    """A receiver that works until it receives the command to be down."""

    def __init__(self) -> None:
        super().__init__()
        self._began_at = self._up_at = 0.0
        self._left = 0
        self._bins: list[int] = []

    def command(self) -> None:
        """Read a command from stdin; end at the end of the input."""
        loop = asyncio.get_running_loop()
        line = os.read(sys.stdin.fileno(), 65536)
        if not line:
            loop.stop()
            return
        asked = orjson.loads(line)
        self.response, self.delay_s = DOWN, 0.0
        self._left, self._bins = asked["expect"], []
        self._began_at = time.monotonic()
        self._up_at = self._began_at + asked["down_s"]
        loop.call_later(asked["down_s"], self._recover, asked["takes_s"])

    def _recover(self, takes_s: float) -> None:
        self.response, self.delay_s = TAKEN, takes_s
        self._up_at = time.monotonic()

    def arrived(self, _: bytes, deliveries: int) -> None:
        """Handle a request."""
        if not self._left:
            return
        now = time.monotonic()
        n = int((now - self._began_at) / BIN_S)
        self._bins += [0] * (n + 1 - len(self._bins))
        self._bins[n] += 1
        if self.response is TAKEN:
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
