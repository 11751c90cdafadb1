"""A client with the relay's own transport, for measurements of connections.

It races with the close of idle connections, or sends requests in sequence, on one connection or
each on a new TLS connection.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
from contextlib import aclosing, asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING
from uuid import uuid4

from benchmarks.client import sample
from benchmarks.receiver import new_event_loop, say
from outbox.core.model.headers import format_lines
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.network.egress import EgressPolicy
from outbox.network.tls import Tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult

_BEGIN = "-----BEGIN CERTIFICATE"
"""The file of the server has its key before."""
PAYLOAD_BYTES = 200
STEPS = 37
"""Times within the limits; prime to the number of rounds, so that each connection has many."""


async def race(
    url: str, connections: int, rounds: int, from_s: float, to_s: float
) -> dict[str, float]:
    """Send a request on each connection in each round; count those that fail or are sent again.

    Each connection has an endpoint of its own, and so a pool of its own.  Its next request is sent
    when it has been idle for a time within the limits; the times are spread evenly over them.
    """
    found: dict[str, float] = {"failed": 0, "sent again": 0}
    async with _transport() as transport:

        async def lane(number: int) -> None:
            request = _request(Recipient(url, endpoint=uuid4()))
            _require_success(await transport.send(request))
            for n in range(rounds):
                share = (number + n * connections) * 7 % STEPS / (STEPS - 1)
                await asyncio.sleep(from_s + (to_s - from_s) * share)
                response = await transport.send(request)
                found["failed"] += response.status is None
                found["sent again"] += response.resent

        await asyncio.gather(*(lane(n) for n in range(connections)))
    return found


async def in_sequence(url: str, requests: int) -> dict[str, float]:
    """Return the seconds that requests take, one after the other."""
    async with _transport() as transport:
        request = _request(Recipient(url))
        _require_success(await transport.send(request))
        return {"took_s": sum([await _took_s(transport, request) for _ in range(requests)])}


async def handshakes(url: str, requests: int, ca: str) -> dict[str, float]:
    """Return the median seconds of a request on a new TLS connection, with and without a session.

    Both alternate.

    Args:
        ca: certificate of the server, in PEM.
    """
    # This context does not resume sessions.
    async with _transport() as resuming, _transport(ssl.create_default_context(cadata=ca)) as plain:
        ways = {
            "resumed_s": (resuming, _request(Recipient(url, tls=Tls(ca)))),
            "full_s": (plain, _request(Recipient(url))),
        }
        took_s: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(requests):
            for name, (transport, request) in ways.items():
                alone = request._replace(keep_alive=False)
                took_s[name].append(await _took_s(transport, alone))
    return {name: median(each) for name, each in took_s.items()}


async def _took_s(transport: HttpTransport, request: Request) -> float:
    started_at = perf_counter()
    _require_success(await transport.send(request))
    return perf_counter() - started_at


@asynccontextmanager
async def _transport(tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpTransport]:
    policy = EgressPolicy((ip_network("127.0.0.0/8"),))
    async with aclosing(HttpTransport(policy, tls=tls)) as transport:
        yield transport


def _request(recipient: Recipient) -> Request:
    headers, body = sample(PAYLOAD_BYTES)
    return Request(recipient, format_lines(tuple(headers.items())), body)


def _require_success(response: AttemptResult) -> None:
    if response.status is None or response.status >= 300:
        raise RuntimeError(f"{response.status or response.failure}: {response.detail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--connections", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--from-s", type=float)
    parser.add_argument("--to-s", type=float)
    parser.add_argument("--in-sequence", type=int, help="Send these in sequence instead.")
    parser.add_argument("--ca", help="PEM file of the server: each on a new TLS connection.")
    given = parser.parse_args()
    if given.ca:
        ca = "".join(Path(given.ca).read_text("utf-8").partition(_BEGIN)[1:])
        sending = handshakes(given.url, given.in_sequence, ca)
    elif given.in_sequence:
        sending = in_sequence(given.url, given.in_sequence)
    else:
        sending = race(given.url, given.connections, given.rounds, given.from_s, given.to_s)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        say(runner.run(sending))


if __name__ == "__main__":
    main()
