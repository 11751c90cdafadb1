"""A proxy that forwards a client's messages to PostgreSQL one at a time.

After each message it asks the server whether the backend waits for the client although it
has a transaction id: what it has written or locked would then be held for as long as the
client is silent.  That is a *hold point*.  It shows the cause, so no client has to fall silent.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.tcp import client_messages, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import asyncpg

    from tests.support.postgres import Database

_BACKEND_KEY = b"K\0\0\0\x0c"
_KINDS = {b"P": "Parse", b"B": "Bind", b"E": "Execute", b"Q": "Query", b"S": "Sync"}

READ_BACKEND = """
SELECT backend_xid IS NOT NULL AS has_xid, wait_event = 'ClientRead' AS waits_for_client, state
  FROM pg_stat_activity WHERE pid = $1
"""
SETTLE_S, SETTLE_STEP_S = 0.05, 0.001
"""How long a backend may take to process a message before the next one is forwarded."""


@dataclass
class Lockstep:
    """What the proxy saw."""

    messages: int = 0
    hold_points: Counter[str] = field(default_factory=Counter)
    """Number of hold points by session, message and statement."""

    def report(self) -> str:
        """The hold points, the most frequent first."""
        return "\n".join(f"{n:4d} {what}" for what, n in self.hold_points.most_common())


class _Session:
    """One client's connection."""

    def __init__(self, seen: Lockstep, observers: asyncio.Queue[asyncpg.Connection]) -> None:
        self._seen = seen
        self._observers = observers
        self._pid: int | None = None
        self._name = "?"
        self._statements: dict[bytes, str] = {}
        self._last = ""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_path: str
    ) -> None:
        there, back = await asyncio.open_unix_connection(socket_path)
        try:
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._forward_responses(there, writer))
                await self._forward_messages(reader, back)
                answering.cancel()
        finally:
            back.close()

    async def _forward_responses(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = b""
        while data := await there.read(65536):
            if self._pid is None:
                head += data
                at = head.find(_BACKEND_KEY)
                if 0 <= at <= len(head) - 9:
                    (self._pid,) = struct.unpack_from("!I", head, at + 5)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _forward_messages(
        self, reader: asyncio.StreamReader, back: asyncio.StreamWriter
    ) -> None:
        try:
            async for kind, data in client_messages(reader):
                back.write(data)
                await back.drain()
                if kind:
                    self._read(kind, data[5:])
                elif b"application_name\0" in data:
                    self._name = data.split(b"application_name\0")[1].split(b"\0")[0].decode()
                if self._pid is not None and kind in (b"P", b"B", b"E", b"Q"):
                    await self._observe(_KINDS[kind])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def _read(self, kind: bytes, body: bytes) -> None:
        """Remember to which statement the message belongs."""
        if kind == b"Q":
            self._last = body[:-1].decode(errors="replace")
        elif kind == b"P":
            name, sql = body.split(b"\0")[:2]
            self._last = self._statements[name] = sql.decode(errors="replace")
        elif kind == b"B":
            self._last = self._statements.get(body.split(b"\0")[1], self._last)

    async def _observe(self, kind: str) -> None:
        connection = await self._observers.get()
        try:
            row: Any = None
            for _ in range(int(SETTLE_S / SETTLE_STEP_S)):
                row = await connection.fetchrow(READ_BACKEND, self._pid)
                if row is None or row["waits_for_client"]:
                    break
                await asyncio.sleep(SETTLE_STEP_S)
            if row is not None and row["has_xid"]:
                # PostgreSQL reads transaction id and wait event one after the other, and the
                # transaction may end in between.  A hold point stays, as the proxy waits, too.
                row = await connection.fetchrow(READ_BACKEND, self._pid)
        finally:
            self._observers.put_nowait(connection)
        self._seen.messages += 1
        if row is not None and row["waits_for_client"] and row["has_xid"]:
            session = re.sub(r"\d+", "N", self._name)
            text = " ".join(self._last.split())[:70]
            self._seen.hold_points[f"{session} {kind} ({row['state']}): {text}"] += 1


@asynccontextmanager
async def in_lockstep(
    database: Database, observers: int = 4
) -> AsyncIterator[tuple[Lockstep, str]]:
    """The proxy during the block; yields what it sees, and its DSN."""
    seen = Lockstep()
    idle: asyncio.Queue[asyncpg.Connection] = asyncio.Queue()
    for _ in range(observers):
        idle.put_nowait(await database.connect())
    socket_path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Session(seen, idle).serve(reader, writer, socket_path)

    async with listening(handler) as port:
        yield seen, f"postgresql://postgres@127.0.0.1:{port}/{database.name}"
