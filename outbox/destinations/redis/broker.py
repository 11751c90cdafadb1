"""Streams of Redis and Valkey: exact appends by one script.

Each lane has a stream `NAME:{<lane>}` and beside it a hash with the epoch of its owner.  The
script appends only if the last id that the stream ever had is the sequence before, and the owner
is not fenced.  Redis keeps the last id when it trims the stream, so a trimmed stream is not taken
for one that has lost messages.

**Promise.**  In each lane's stream every sequence that is not a dead letter stands once, in order,
without a hole, also after kills of relays; late writes of former owners are refused.  A server that
has lost or evicted what it had acknowledged is noticed at the next append.

**Not promised.**  That a server that crashes keeps what it had acknowledged, unless `appendfsync`
is `always`: with `everysec` its writes to the file may be two seconds late.  That a fail-over does.
Nothing of this if the hash is deleted alone; the order against other writers of the same stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Fenced,
    Foreign,
    Position,
    Stop,
    StopKind,
)
from outbox.core.model.response import one_line
from outbox.destinations.broker import BrokerFinding
from outbox.destinations.broker_connection import BrokerOpener, stop_of
from outbox.destinations.interface import NotConnected
from outbox.destinations.redis.connection import GroupedConnection, NotSent, ResponseLost
from outbox.destinations.redis.script import OPENING_BITS, SCRIPT, packed, packed_call
from outbox.destinations.redis.target import parse_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress
    from outbox.destinations.http.dns import Resolver
    from outbox.destinations.http.egress import EgressPolicy

_DIGEST = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_LATER = frozenset(
    {
        "OOM", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS",
        "MISCONF", "READONLY",
    }
)  # fmt: skip
"""Errors that pass by themselves, or end when the server has room."""
RECEIVE_BYTES = 64 * 1024


class RedisBroker:
    """The streams of one endpoint."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self._target = target = parse_url(address.url)
        self._opener = BrokerOpener(address, policy, resolver)
        user, separator, password = (address.credentials or "").partition(":")
        self._connection = GroupedConnection(
            self._open_streams,
            address.timeout_s,
            username=(user or None) if separator else None,
            password=(password if separator else user) or None,
            db=target.database,
        )

    async def open(self, lane: str, owner: Owner, after: int, receipt: str | None) -> Standing:
        response = await self._run(lane, owner, "", [])
        if isinstance(response, Stop):
            return response
        what, about = response[0], response[1].decode("utf-8", "replace")
        key = self._target.stream_key(lane)
        if what == b"OPEN":
            return Position(int(about), response[2].decode("utf-8", "replace") or None)
        if what == b"FENCED":
            return Fenced(int(about) >> OPENING_BITS)
        if what == b"OTHER":
            return Foreign(f"the stream {key} belongs to database {about}")
        return Foreign(f"the stream {key} has the id {about}, which another writer made")

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        response = await self._run(lane, owner, str(after), messages)
        if isinstance(response, Stop):
            return Appended(after, response)
        if response[0] == b"STORED":
            return Appended(messages[-1].sequence)
        about = " ".join(each.decode("utf-8", "replace") for each in response)
        key = self._target.stream_key(lane)
        return Appended(after, Stop(StopKind.MOVED, f"the stream {key} responded {about}"))

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            await self._connection.call(packed("SCRIPT", "LOAD", SCRIPT))
            about = _fields(await self._connection.call(packed("INFO")))
        except (NotSent, ResponseLost, RedisError) as error:
            stop = _stop(error)
            return [BrokerFinding(True, stop.detail, _WHAT_TO_DO)]
        findings = []
        if about.get("role") == "slave":
            findings.append(
                BrokerFinding(True, "the server is a replica", "give the URL of the primary")
            )
        if about.get("cluster_enabled") == "1":
            findings.append(
                BrokerFinding(
                    True,
                    "the server is part of a cluster, where redirections are not followed",
                    "use a server without cluster mode, or a proxy that hides it",
                )
            )
        policy = about.get("maxmemory_policy", "")
        if policy.startswith("allkeys"):
            findings.append(
                BrokerFinding(
                    about.get("maxmemory", "0") != "0",
                    f"maxmemory-policy is {policy}: streams may be evicted",
                    "CONFIG SET maxmemory-policy noeviction",
                )
            )
        if about.get("aof_enabled") == "0":
            findings.append(
                BrokerFinding(
                    False,
                    "appendonly is off: a crash of the server loses what it had acknowledged",
                    "CONFIG SET appendonly yes, and appendfsync always",
                )
            )
        return findings

    async def aclose(self) -> None:
        await self._connection.aclose()
        self._opener.close()

    async def _run(
        self, lane: str, owner: Owner, after: str, messages: Sequence[Message]
    ) -> list[bytes] | Stop:
        """Run the script; the second time with its text, if the server does not have it."""
        given = self._target, lane, owner, after, messages
        try:
            try:
                response: list[bytes] = await self._connection.call(
                    packed_call(("EVALSHA", _DIGEST), *given)
                )
            except RedisError as error:
                if _code(error) != "NOSCRIPT":
                    raise
                response = await self._connection.call(packed_call(("EVAL", SCRIPT), *given))
        except (NotSent, ResponseLost, RedisError) as error:
            return _stop(error)
        return response

    async def _open_streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target, loop = self._target, asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=RECEIVE_BYTES, loop=loop)
        protocol = await self._opener.open(
            target.host, target.port, lambda: _Protocol(reader, loop=loop), secure=target.secure
        )
        assert protocol.made is not None
        return reader, asyncio.StreamWriter(protocol.made, protocol, reader, loop)


class _Protocol(asyncio.StreamReaderProtocol):
    """asyncio's, which also keeps its transport."""

    made: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not asyncio's class, if the loop is uvloop's.
        self.made = cast("asyncio.Transport", transport)


_WHAT_TO_DO = (
    "check the URL and the credentials (outbox endpoint update --url, --header), and the rights: "
    "+eval +evalsha +script|load +hmget +hset +exists +xinfo|stream +xrevrange +xadd +info"
)


def _stop(error: NotSent | ResponseLost | RedisError) -> Stop:
    """What an error means for the calls that got it."""
    if isinstance(error, ResponseLost):
        return Stop(StopKind.UNKNOWN, one_line(str(error)))
    if isinstance(error, NotSent):
        if isinstance(error.cause, NotConnected):
            return stop_of(error.cause)
        error = error.cause
    kind = StopKind.UNAVAILABLE if _code(error) in _LATER else StopKind.MISCONFIGURED
    code, text = _code(error), str(error)
    return Stop(kind, one_line(text if text.startswith(code) else f"{code} {text}"))


def _code(error: RedisError) -> str:
    """The first word of the server's error, which redis-py takes off for some."""
    code = getattr(error, "status_code", None)
    return str(code or str(error).partition(" ")[0])


def _fields(info: Any) -> dict[str, str]:
    """The fields of INFO."""
    lines = info.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
