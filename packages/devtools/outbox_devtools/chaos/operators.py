"""Commands of operators as processes that hang, freeze or die in the middle of a change.

Each has a proxy of its own to the database.  What hangs stays there until the end of the run: a
backend that waits for the rest of a message must not hold anything that others need.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import orjson

from outbox.core.model.endpoint_config import to_file_values
from outbox_devtools.chaos.plan import HUNG_COMMANDS_MAX
from outbox_devtools.chaos.port_gate import HOST
from outbox_devtools.chaos.proxy import Interruption, Proxy
from outbox_devtools.chaos.proxy_dsn import proxied_dsn
from outbox_devtools.command_process import CommandProcess

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.connection.dsn import Dsn

INTERRUPTED_WITHIN_S = 30.0
"""A process needs some seconds to start on a busy machine."""
LAST_PIECE_SHARE = 1 / 2
"""How often a command is interrupted in the message that changes something."""
WHOLE_PIECE_SHARE = 1 / 3
"""How often the piece passes as a whole, so that only the response is lost."""


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    """A command of an operator."""

    arguments: tuple[str, ...]
    pieces: int
    """Pieces of data that it sends to the database, if there is something to change.  The last of
    them is the message that changes it, and the others are reads."""


def pause(name: str) -> OperatorCommand:
    """Pause an endpoint."""
    return OperatorCommand(("endpoint", "pause", name), 12)


def resume(name: str) -> OperatorCommand:
    """Resume an endpoint."""
    return OperatorCommand(("endpoint", "resume", name), 18)


def change_lanes(name: str, lanes: int) -> OperatorCommand:
    """Change the number of lanes of an endpoint."""
    return OperatorCommand(("endpoint", "update", name, "--lanes", str(lanes)), 16)


def replay_dead_letters() -> OperatorCommand:
    """Replay all dead letters."""
    return OperatorCommand(("dead", "replay", "--all", "--detach"), 14)


def apply_file(path: Path, endpoints: Iterable[EndpointSettings]) -> OperatorCommand:
    """Apply a file with these endpoints, which is written first."""
    path.write_bytes(orjson.dumps({"endpoints": [to_file_values(each) for each in endpoints]}))
    return OperatorCommand(("apply", "--file", str(path)), 20)


class Operators:
    """Runs commands of operators that are interrupted."""

    def __init__(self, address: Dsn, schema: str, directory: Path) -> None:
        self._address = address
        self._schema = schema
        self._log_path = directory / "operators.log"
        self._hung: list[_Operator] = []

    async def interrupt(self, command: OperatorCommand, way: str, rng: random.Random) -> str | None:
        """Execute a command, and interrupt it in the middle of a random message.

        Args:
            way: the kind of fault: "half-command", "freeze-command" or "kill-command".

        Returns:
            After which message it was interrupted; None: it ended before.
        """
        operator = _Operator(self._address, self._schema, self._log_path, command)
        self._hung.append(operator)
        last = rng.random() < LAST_PIECE_SHARE
        before = command.pieces - 1 if last else rng.randrange(command.pieces)
        share = 1.0 if rng.random() < WHOLE_PIECE_SHARE else rng.random()
        interrupted = await operator.run(way, before, share)
        if not interrupted or way == "kill-command":
            self._hung.remove(operator)
            await operator.close()
        while len(self._hung) > HUNG_COMMANDS_MAX:
            await self._hung.pop(0).close()
        return f"after message {before} and {share:.0%} of the next" if interrupted else None

    async def close(self) -> None:
        """Kill all processes, and reset their connections."""
        while self._hung:
            await self._hung.pop().close()


class _Operator:
    """One command: its process and its proxy."""

    def __init__(self, address: Dsn, schema: str, log_path: Path, command: OperatorCommand) -> None:
        (server,) = address.addresses
        self._proxy = Proxy(*server)
        self._process = CommandProcess(
            command.arguments,
            proxied_dsn(address, HOST, self._proxy.gate.port),
            log_path,
            {"OUTBOX_SCHEMA": schema},
        )

    async def run(self, way: str, pieces_before: int, share: float) -> bool:
        """Run the command until it is interrupted; False if it ended before that."""
        interrupted = asyncio.Event()
        interrupt: dict[str, Callable[[], None]] = {
            "half-command": partial(self._proxy.mute, for_good=True),
            "freeze-command": self._process.freeze,
            "kill-command": self._process.send_kill,
        }

        def act() -> None:
            interrupt[way]()
            interrupted.set()

        self._proxy.interruption = Interruption(pieces_before, share, act)
        await self._proxy.gate.open()
        await self._process.start()
        waiting = [
            asyncio.ensure_future(interrupted.wait()),
            asyncio.ensure_future(self._process.wait()),
        ]
        try:
            await asyncio.wait(
                waiting, timeout=INTERRUPTED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return interrupted.is_set()

    async def close(self) -> None:
        """Kill the process in any state, and reset its connections."""
        await self._process.kill()
        self._proxy.close()
