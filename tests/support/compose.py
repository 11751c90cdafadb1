"""The services of deploy/compose.yaml as processes of this machine, without Docker.

Each has the command, the environment and the volumes of the file: a volume is a directory, and its
path in the container is replaced by that of the directory.  Host names and ports are replaced, too,
because all services share one loopback.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import yaml

from outbox_devtools.embedded import EmbeddedPostgres
from outbox_devtools.embedded.launch import command
from tests.support.checkout import ROOT
from tests.support.ports import free_port
from tests.support.postgres import TEST_SETTINGS
from tests.support.process import environment
from tests.support.prototypes import memory
from tests.support.waiting import LIVE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

FILE = ROOT / "deploy/compose.yaml"
ROLES = ROOT / "deploy/compose/roles.sql"
ENTRYPOINT = ("outbox",)
"""Of the image."""


@dataclass(frozen=True)
class Service:
    """A service of the image."""

    name: str
    words: tuple[str, ...]
    """Its command line."""
    environment: Mapping[str, str]
    volumes: Mapping[str, str]
    """Sources by their paths in the container; those that begin with `./` are files."""
    read_only: frozenset[str]
    """The paths that the service does not write."""
    directory: str
    depends_on: Mapping[str, str]
    """Conditions by the names of services."""
    replicas: int
    profiles: tuple[str, ...]


def services(text: str) -> dict[str, Service]:
    """The services of the image `outbox-relay` in a compose file."""
    parsed: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return {
        name: Service(
            name,
            (*each.get("entrypoint", ENTRYPOINT), *each.get("command", ())),
            each.get("environment", {}),
            {target: source for source, target, *_ in _volumes(each)},
            frozenset(target for _, target, *mode in _volumes(each) if mode == ["ro"]),
            each.get("working_dir", "/"),
            {on: how["condition"] for on, how in each.get("depends_on", {}).items()},
            each.get("deploy", {}).get("replicas", 1),
            tuple(each.get("profiles", ())),
        )
        for name, each in parsed.items()
        if each["image"] == "outbox-relay"
    }


def _volumes(service: dict[str, Any]) -> list[list[str]]:
    return [volume.split(":") for volume in service.get("volumes", ())]


def example(command: str) -> list[str]:
    """The words of an example in the header of the file, after the service's name."""
    found = re.search(rf"run --rm outbox ({command} .*)", FILE.read_text())
    assert found is not None
    return shlex.split(found[1])


@asynccontextmanager
async def compose_database() -> AsyncIterator[EmbeddedPostgres]:
    """A server in place of the service `postgres`, with its database and its roles."""
    async with EmbeddedPostgres(temporary_in=memory(), settings=TEST_SETTINGS) as server:
        for name, statements in (("postgres", "CREATE DATABASE app"), ("app", ROLES.read_text())):
            connection = await asyncpg.connect(server.dsn(name))
            await connection.execute(statements)
            await connection.close()
        yield server


@dataclass
class Composition:
    """The services, started by hand.

    Args:
        directory: has the volumes and the logs.
        replaced: texts of commands, variables and files, and what this machine has in their place.
    """

    directory: Path
    replaced: Mapping[str, str]
    services: Mapping[str, Service] = field(default_factory=lambda: services(FILE.read_text()))
    running: dict[str, list[asyncio.subprocess.Process]] = field(default_factory=dict)
    health: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of probes and metrics, by service."""

    async def up(self) -> None:
        """Start the services in the order of their dependencies; `docker compose up`."""
        waiting = {name: each for name, each in self.services.items() if not each.profiles}
        # postgres is not ours, and runs.
        ended = set(self._awaited()) - set(self.services)
        while waiting:
            ready = [each for each in waiting.values() if set(each.depends_on) <= ended]
            assert ready, f"a cycle, or a service that does not end: {sorted(waiting)}"
            for each in ready:
                del waiting[each.name]
                if each.name in self._awaited():
                    await self.run(each.name)
                    ended.add(each.name)
                else:
                    self.running[each.name] = [
                        await self._start(each, number) for number in range(each.replicas)
                    ]

    def _awaited(self) -> dict[str, str]:
        """Services that others wait for, with the conditions."""
        return {on: how for each in self.services.values() for on, how in each.depends_on.items()}

    async def run(self, name: str, *words: str) -> str:
        """Run a service to its end; `docker compose run --rm NAME WORDS`.  Returns its output."""
        process = await self._start(self.services[name], 0, words, asyncio.subprocess.PIPE)
        async with asyncio.timeout(LIVE_S):
            output, errors = await process.communicate()
        assert process.returncode == 0, f"{name}: {errors.decode()}"
        return output.decode()

    def log(self, name: str) -> str:
        """What the processes of a service have written."""
        return "".join(each.read_text() for each in sorted(self.directory.glob(f"{name}-*.log")))

    async def _start(
        self, service: Service, number: int, words: tuple[str, ...] = (), pipe: int | None = None
    ) -> asyncio.subprocess.Process:
        targets = {target: str(self._path(source)) for target, source in service.volumes.items()}
        replaced = {**targets, **self.replaced}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        program, *arguments = (self._replace(each, replaced) for each in (*service.words, *words))
        program = shutil.which(program, path=path) or program
        # In a container each has the port of the image.
        health = f"127.0.0.1:{free_port()}"
        self.health.setdefault(service.name, []).append(health)
        variables = {
            name: self._replace(str(value), replaced) for name, value in service.environment.items()
        }
        with (self.directory / f"{service.name}-{number}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command([program, *arguments], account=None),
                cwd=targets.get(service.directory, "/"),
                env=environment(variables) | {"OUTBOX_HEALTH": health, "PATH": path},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=pipe or log,
            )

    def _path(self, source: str) -> Path:
        """The file or the directory of a volume."""
        if not source.startswith("./"):
            path = self.directory / source
            path.mkdir(exist_ok=True)
            return path
        given = FILE.parent / source
        path = self.directory / given.name
        path.write_text(self._replace(given.read_text(), self.replaced))
        return path

    @staticmethod
    def _replace(text: str, replaced: Mapping[str, str]) -> str:
        """Replace in one pass, the longest first: what is put in is not replaced again."""
        longest = sorted(replaced, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest)), lambda found: replaced[found[0]], text)

    async def end(self) -> None:
        """End all services, as `docker compose down` does."""
        processes = [each for of_one in self.running.values() for each in of_one]
        for each in processes:
            if each.returncode is None:
                each.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(LIVE_S):
                await asyncio.gather(*(each.wait() for each in processes))
        finally:
            for each in processes:
                if each.returncode is None:
                    each.kill()


@asynccontextmanager
async def composition(directory: Path, replaced: Mapping[str, str]) -> AsyncIterator[Composition]:
    """Services that end with the block."""
    made = Composition(directory, replaced)
    try:
        yield made
    finally:
        await made.end()
