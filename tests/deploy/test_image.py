"""The image of deploy/Dockerfile runs what deploy/compose.yaml says."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.containers import ROOT, Containers, Image, built_image, containers
from tests.support.tcp import forward_to, free_port, listening
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.image, pytest.mark.full]


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    with built_image() as image:
        yield image


class Composition:
    """The services of compose.yaml, all on this machine's loopback.

    In place of the service `postgres` runs the test's server; ports that would be taken
    twice on one machine are replaced.
    """

    def __init__(self, running: Containers, database: Database, port: int, tmp_path: Path) -> None:
        self._running = running
        receiver = str(free_port())
        text = (ROOT / "deploy/compose.yaml").read_text()
        at = f"@postgres:{port}/{database.name}?sslmode=disable"
        for before, after in (
            ("@postgres/postgres", at),
            ("172.16.0.0/12,192.168.0.0/16", "127.0.0.0/8"),
            ('"9000"', f'"{receiver}"'),
        ):
            assert before in text
            text = text.replace(before, after)
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
        declaration = (ROOT / "deploy/endpoints.yaml").read_text()
        self._declaration = tmp_path / "endpoints.yaml"
        self._declaration.write_text(declaration.replace(":9000", f":{receiver}"))
        self._declaration.chmod(0o644)

    def _container(
        self, service: str, words: list[str] | None, health: int | None
    ) -> tuple[list[str], dict[str, str], list[tuple[Path, str]]]:
        described = self.services[service]
        command = self._running.image.command(described["command"] if words is None else words)
        env = described["environment"] | {"OUTBOX_HEALTH": f"127.0.0.1:{health or 9090}"}
        targets = [volume.split(":")[1] for volume in described.get("volumes", ())]
        return command, env, [(self._declaration, target) for target in targets]

    async def run(self, service: str, *words: str) -> str:
        """`docker compose run --rm SERVICE [WORDS]`: its output."""
        code, out = await self._running.run(*self._container(service, list(words) or None, None))
        assert code == 0, out
        return out

    async def start(self, service: str, health: int | None = None) -> asyncio.subprocess.Process:
        return await self._running.start(*self._container(service, None, health))

    async def is_healthy(self, health: int) -> bool:
        check = [word.replace("9090", str(health)) for word in self._running.image.healthcheck]
        code, _ = await self._running.run(check, {})
        return code == 0


@pytest.fixture
async def composition(
    image: Image, empty_database: Database, tmp_path: Path
) -> AsyncIterator[tuple[Composition, Containers]]:
    socket_path = empty_database.server.embedded.socket_dir / ".s.PGSQL.5432"
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(forward_to(str(socket_path))))
        running = await stack.enter_async_context(containers(image, ["postgres", "receiver"]))
        yield Composition(running, empty_database, port, tmp_path), running


async def test_two_relays_deliver_and_take_over(
    composition: tuple[Composition, Containers],
) -> None:
    services, running = composition
    assert services.services["relay"]["deploy"] == {"replicas": 2}
    assert "schema" in await services.run("migrate")
    assert "whsec_" in await services.run("endpoints")
    receiver = await services.start("receiver")
    ports = [free_port(), free_port()]
    relays = [await services.start("relay", port) for port in ports]
    for port in ports:
        await until(lambda port=port: services.is_healthy(port), 20, "a relay to be healthy")

    # The example of the file's header.
    header = (ROOT / "deploy/compose.yaml").read_text()
    example = re.search(r"run --rm relay publish (.*)", header)
    assert example is not None
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", example[1])]
    await services.run("relay", "publish", *words)
    assert "sequence 1 order.paid key order-7" in await _next_delivery(receiver)

    (owner, other) = relays if await _owns(services, relays[0]) else reversed(relays)
    code, out = await running.stop(owner)
    assert code == 0, out
    await services.run("relay", "publish", *words)
    assert "sequence 2 order.paid key order-7" in await _next_delivery(receiver)
    for process in (other, receiver):
        code, out = await running.stop(process)
        assert code == 0, out


async def _next_delivery(receiver: asyncio.subprocess.Process) -> str:
    assert receiver.stdout is not None
    async with asyncio.timeout(20):
        while b"accepted" not in (line := await receiver.stdout.readline()):
            assert line, "the receiver ended"
    return line.decode()


async def _owns(services: Composition, relay: asyncio.subprocess.Process) -> bool:
    """Whether the relay owns the endpoint; its name ends with its process's number."""
    status = await services.run("relay", "status")
    return f":{relay.pid}" in status.splitlines()[-1]


async def test_the_image_has_no_pip_and_its_user_writes_nothing(image: Image) -> None:
    async with containers(image, []) as running:
        code, out = await running.run(["python3", "-c", "import pip"], {})
        assert code == 1, out
        probe = "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/tmp', os.W_OK))"
        code, out = await running.run(["python3", "-c", probe], {})
        assert (code, out.split()) == (0, ["65532", "False", "False"])


async def test_without_a_dsn_the_container_ends_with_one_line(image: Image) -> None:
    async with containers(image, []) as running:
        code, out = await running.run(image.command(), {})
    assert code == 3, out
    assert out.count("\n") == 1, out
    assert "OUTBOX_DSN" in out
