"""Responses whose head and body are sent apart, and TLS handshakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.connections.servers import SERVERS, serving
from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.stage import child
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from benchmarks.stage import Stage

APART = ("JDK httpserver", "Python http.server")
"""Servers that send head and body apart, with Nagle's algorithm."""
REQUESTS = 100
REQUEST_MAX_S = 0.005
"""A delayed acknowledgement takes 40 ms."""
QUICK_REQUESTS = 20
SOONER = Target("under", 1.0)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Measure both, round by round."""
    requests = QUICK_REQUESTS if quick else REQUESTS
    return [
        *[await _apart(stage, name, requests, rounds) for name in APART],
        await _handshakes(stage, requests, rounds),
    ]


async def _apart(stage: Stage, name: str, requests: int, rounds: int) -> Row:
    server = next(each for each in SERVERS if each.name == name)
    took_s: list[float] = []
    missing = None
    try:
        directory = stage.directory / f"exchanges-{name.replace(' ', '-')}"
        async with serving(server, directory) as url:
            for _ in range(rounds):
                took_s.append((await _send(url, requests))["took_s"])
                stage.say(f"exchanges, {requests} requests to {name}: {took_s[-1]:.2f} s")
    except CannotRun as error:
        missing, took_s = str(error), []
        stage.say(f"exchanges, {name}: not measured: {error}")
    return Row(
        "exchanges",
        f"{requests} requests in sequence, {name}",
        "s",
        Samples(tuple(took_s)),
        f"{REQUEST_MAX_S * 1000:g} ms each",
        Samples((requests * REQUEST_MAX_S,) * len(took_s)),
        missing_reason=missing,
        target=SOONER,
    )


async def _handshakes(stage: Stage, requests: int, rounds: int) -> Row:
    found = Rounds()
    if stage.certificate is not None:
        stage.expect(0)
        for _ in range(rounds):
            took_s = await _send(stage.urls["https"], requests, "--ca", stage.certificate)
            for name, value in took_s.items():
                found.add(name, value * 1000)
            stage.say(
                f"exchanges, TLS session resumed: {took_s['resumed_s'] * 1000:.2f} ms, "
                f"full handshake: {took_s['full_s'] * 1000:.2f} ms"
            )
    missing = None if stage.certificate is not None else "openssl is not installed"
    nothing = Samples(())
    return Row(
        "exchanges",
        "a request on a new connection, TLS session resumed",
        "ms",
        nothing if missing else found.samples_of("resumed_s"),
        "full handshake",
        nothing if missing else found.samples_of("full_s"),
        missing_reason=missing,
        target=SOONER,
    )


async def _send(url: str, requests: int, *words: object) -> dict[str, float]:
    async with child("connections.client", url, "--in-sequence", requests, *words) as client:
        sent: dict[str, float] = await client.response()
        return sent
