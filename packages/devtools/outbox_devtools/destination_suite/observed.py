"""Connections of this process, as the interpreter's audit events report them (PEP 578).

They show what Python code does, in all threads.  A library that connects in C, as librdkafka and
uvloop do, raises no event: `Trap` shows its connections where they arrive.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from outbox.destination import EgressPolicy, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname")
_PROGRAMS = ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_WATCHED = {*_SENDS, *_LOOKUPS, *_PROGRAMS}


class RecordingPolicy(EgressPolicy):
    """An egress policy that counts the connections that it has allowed."""

    allowed: Counter[Server]

    def __init__(self, *allow_networks: str) -> None:
        super().__init__(allow_networks)
        self.allowed = Counter()

    def refusal(self, address: Any, *, port: int, **rules: Any) -> str | None:
        reason = super().refusal(address, port=port, **rules)
        if reason is None:
            self.allowed[Server(str(ip_address(address)), port)] += 1
        return reason


class Observation:
    """What a process does while it is observed."""

    def __init__(self, policy: RecordingPolicy) -> None:
        self._policy = policy
        self.connects = 0
        """Connections that the policy has allowed."""
        self.exposures: list[str] = []
        """What was done past the policy."""

    def record(self, event: str, values: tuple[Any, ...]) -> None:
        """Record an audit event."""
        if event in _PROGRAMS:
            self.exposures.append(f"started a program ({event})")
        elif event in _LOOKUPS:
            if (name := _text(values[0])) and _literal(name) is None:
                self.exposures.append(f"resolved {name} without the relay's resolver")
        elif (peer := values[1]) is not None:  # None: the socket is connected.
            self._record_peer(peer)

    def _record_peer(self, peer: Any) -> None:
        is_inet = isinstance(peer, tuple) and len(peer) >= 2
        host = _literal(_text(peer[0])) if is_inet else None
        server = Server(host, peer[1]) if host else None
        # Each allowance is for one connect: between two of them, a name may get another address.
        if server is not None and self._policy.allowed[server] > 0:
            self._policy.allowed[server] -= 1
            self.connects += 1
        else:
            what = repr(peer) if server is None else str(server)
            self.exposures.append(f"connected to {what}, not allowed by the policy")


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _literal(host: str) -> str | None:
    with suppress(ValueError):
        return str(ip_address(host.partition("%")[0]))
    return None


_running: list[Observation] = []


@cache
def _install() -> None:
    """Install the hook; a process keeps it to its end."""

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if _running and event in _WATCHED:
            for each in _running:
                each.record(event, values)

    sys.addaudithook(hook)


@contextmanager
def observing(policy: RecordingPolicy) -> Iterator[Observation]:
    """Observe this process during the block."""
    _install()
    observation = Observation(policy)
    _running.append(observation)
    try:
        yield observation
    finally:
        _running.remove(observation)


class Trap:
    """A port whose connections are counted, and closed at once."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._listener = socket.create_server((host, port))
        self._listener.setblocking(False)
        self.server = Server(*self._listener.getsockname()[:2])
        self._arrived = 0

    def arrived(self) -> int:
        """Connections so far; accepts those that wait."""
        with suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
                self._arrived += 1
        return self._arrived

    def serve(self) -> None:
        """Accept connections from now on."""
        asyncio.get_running_loop().add_reader(self._listener, self.arrived)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()


@asynccontextmanager
async def trapping(host: str, port: int = 0) -> AsyncIterator[Trap]:
    """A trap during the block.

    Raises:
        OSError: the host has no such address, or the port is taken.
    """
    trap = Trap(host, port)
    trap.serve()
    try:
        yield trap
    finally:
        trap.close()
