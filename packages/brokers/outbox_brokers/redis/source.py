"""Streams of Redis and Valkey, read without consumer groups.

The position of a lane is in the consumer's database: XREAD continues after `<sequence>-0`.  A
consumer group would keep a second position in the broker, which a restored database, or a restored
broker, contradicts.

Two connections serve all lanes.  One reads entries and never blocks.  The other one waits, with one
XREAD over all lanes that have no entry, in rounds so short that a lane can join the next one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from outbox.core.model.response import one_line
from outbox.receiver.streams.source import StoredEntry, StreamUnavailable
from outbox_brokers.redis.target import RedisTarget, parse_credentials, parse_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from outbox.receiver.streams.source import SourceOptions

ROUND_S = 0.1
"""Length of a round of waiting, for up to LANES_PER_ROUND lanes; more lanes wait longer."""
LANES_PER_ROUND = 200
_BODY = b"body"


class RedisSource:
    """The streams of one endpoint."""

    def __init__(
        self,
        target: RedisTarget,
        credentials: str | None,
        tls: dict[str, str],
        timeout_s: float,
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        user, password = parse_credentials(credentials)
        settings: dict[str, Any] = {
            "host": target.host,
            "port": target.port,
            "db": target.database,
            "username": user,
            "password": password,
            "protocol": 2,
            # A lost command is not repeated by the library: the reader starts again.
            "retry": Retry(NoBackoff(), 0),
            "single_connection_client": True,
            "socket_connect_timeout": timeout_s,
            "socket_timeout": None,
        }
        if target.secure:
            settings |= {"ssl": True, **tls}
        self._reading, self._waiting = Redis(**settings), Redis(**settings)
        self._waiters: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._rounds: asyncio.Task[None] | None = None
        """Runs while lanes wait."""

    @classmethod
    def factory(cls, options: SourceOptions) -> Callable[[], RedisSource]:
        """Return a function that makes a source.

        Raises:
            UsageError: the options are not valid.
        """
        target = parse_url(options.url)
        tls = {}
        if target.secure and options.ca is not None:
            options.tls_context()  # Raises.
            tls = {"ssl_ca_data" if options.has_ca_text else "ssl_ca_certs": str(options.ca)}
        return lambda: cls(target, options.credentials, tls, options.timeout_s)

    async def lanes(self) -> set[str]:
        found = await self._call(self._reading.smembers(self._target.lanes_key))
        return {_text(lane) for lane in found}

    async def with_entries(self, lanes: Sequence[str]) -> set[str]:
        pipeline = self._reading.pipeline(transaction=False)
        for lane in lanes:
            pipeline.xlen(self._target.stream_key(lane))
        lengths = await self._call(pipeline.execute()) if lanes else []
        return {lane for lane, length in zip(lanes, lengths, strict=True) if length}

    async def read(self, lane: str, after: int, count: int, wait_s: float) -> list[StoredEntry]:
        entries = await self._read(lane, after, count)
        if entries or wait_s <= 0:
            return entries
        if not await self._wait(lane, after, wait_s):
            return []
        return await self._read(lane, after, count)

    async def aclose(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.wait([self._rounds], timeout=self._timeout_s)
        for client in (self._reading, self._waiting):
            with suppress(Exception):
                async with asyncio.timeout(self._timeout_s):
                    await client.aclose()

    async def _read(self, lane: str, after: int, count: int) -> list[StoredEntry]:
        key = self._target.stream_key(lane)
        found = await self._call(self._reading.xread({key: f"{after}-0"}, count=count))
        return [_entry(id_, fields) for _, entries in found or () for id_, fields in entries]

    async def _wait(self, lane: str, after: int, wait_s: float) -> bool:
        """Wait until a lane has an entry; returns whether it has."""
        entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[lane] = (after, entry)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._wait_in_rounds())
        try:
            async with asyncio.timeout(wait_s):
                await entry
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(lane, None)
        return True

    async def _wait_in_rounds(self) -> None:
        try:
            while self._waiters:
                await self._wait_one_round()
        except StreamUnavailable as error:
            for _, entry in self._waiters.values():
                if not entry.done():
                    entry.set_exception(error)

    async def _wait_one_round(self) -> None:
        lanes = {self._target.stream_key(lane): lane for lane in self._waiters}
        after: dict[Any, Any] = {key: f"{self._waiters[lane][0]}-0" for key, lane in lanes.items()}
        round_s = ROUND_S * (1 + len(lanes) // LANES_PER_ROUND)
        found = await self._call(
            self._waiting.xread(after, count=1, block=round(round_s * 1000)), round_s
        )
        for key, _ in found or ():
            waiter = self._waiters.pop(lanes[_text(key)], None)
            if waiter is not None and not waiter[1].done():
                waiter[1].set_result(None)

    async def _call(self, command: Awaitable[Any], longer_s: float = 0.0) -> Any:
        """Await a command; a server that is silent is lost."""
        try:
            async with asyncio.timeout(self._timeout_s + longer_s):
                return await command
        except TimeoutError:
            text = f"no response within {self._timeout_s:g} s"
        except (RedisError, OSError) as error:
            text = str(error) or type(error).__name__
        where = f"{self._target.host}:{self._target.port}"
        raise StreamUnavailable(one_line(f"{where}: {text}"))


def _entry(id_: bytes, fields: dict[bytes, bytes] | None) -> StoredEntry:
    # The relay writes the body last: of two fields with this name the client keeps the last one.
    fields = dict(fields or {})
    body = fields.pop(_BODY, b"")
    number, _, suffix = id_.partition(b"-")
    # Another suffix is another writer's.
    return StoredEntry(int(number) if suffix == b"0" else None, fields, body)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
