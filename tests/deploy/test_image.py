"""The image of deploy/Dockerfile runs what deploy/compose.yaml says."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.compose import FILE, compose_database, example, services
from tests.support.containers import Containers, Image, Volume, built_image, containers
from tests.support.ports import free_port
from tests.support.tcp import forward_to, listening
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

pytestmark = [pytest.mark.image, pytest.mark.full]


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    with built_image() as image:
        yield image


class Containment:
    """The services of compose.yaml as containers, all on this machine's loopback.

    In place of the service `postgres` runs the test's server; ports that would be taken
    twice on one machine are replaced.
    """

    def __init__(self, running: Containers, dsn: str, tmp_path: Path) -> None:
        self._running, self._directory = running, tmp_path
        receiver = str(free_port())
        text = FILE.read_text()
        for before, after in (
            ("@postgres/app", f"@{dsn.partition('@')[2]}"),
            ("172.16.0.0/12,192.168.0.0/16", "127.0.0.0/8"),
            ('"9000"', f'"{receiver}"'),
            ("0.0.0.0:8080", f"127.0.0.1:{free_port()}"),
        ):
            assert before in text
            text = text.replace(before, after)
        self.services = services(text)
        declared = (FILE.parent / "endpoints.yaml").read_text()
        (tmp_path / "endpoints.yaml").write_text(declared.replace(":9000", f":{receiver}"))
        (tmp_path / "endpoints.yaml").chmod(0o644)

    def _container(
        self, name: str, words: Sequence[str], health: int
    ) -> tuple[list[str], dict[str, str], list[Volume], str]:
        service = self.services[name]
        env = {**service.environment, "OUTBOX_HEALTH": f"127.0.0.1:{health}"}
        volumes = [
            Volume(self._volume(source), target, "ro" if target in service.read_only else "rw")
            for target, source in service.volumes.items()
        ]
        return [*service.words, *words], env, volumes, service.directory

    def _volume(self, source: str) -> Path:
        """The file or the directory of a volume, which a new one gives to the user."""
        path = self._directory / Path(source).name
        if not path.exists():
            path.mkdir(mode=0o700)
            os.chown(path, *map(int, self._running.image.config["User"].split(":")))
        return path

    async def run(self, name: str, *words: str) -> str:
        """`docker compose run --rm NAME WORDS`: its output."""
        code, out = await self._running.run(*self._container(name, words, 9090))
        assert code == 0, out
        return out

    async def start(self, name: str, health: int = 9090) -> asyncio.subprocess.Process:
        return await self._running.start(*self._container(name, (), health))

    async def is_healthy(self, health: int) -> bool:
        check = [word.replace("9090", str(health)) for word in self._running.image.healthcheck]
        code, _ = await self._running.run(check, {})
        return code == 0


@pytest.fixture
async def containment(
    image: Image, tmp_path: Path
) -> AsyncIterator[tuple[Containment, Containers]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(compose_database())
        socket = f"{server.socket_dir}/.s.PGSQL.5432"
        port = await enter(listening(forward_to(socket)))
        running = await enter(containers(image, ["postgres", "receiver"]))
        dsn = f"postgresql://x@postgres:{port}/app?sslmode=disable"
        yield Containment(running, dsn, tmp_path), running


async def test_two_relays_deliver_and_take_over(
    containment: tuple[Containment, Containers],
) -> None:
    made, running = containment
    assert made.services["relay"].replicas == 2
    for name in ("key", "migrate", "endpoints"):
        await made.run(name)
    receiver, api = await made.start("receiver"), await made.start("api", free_port())
    ports = [free_port(), free_port()]
    relays = [await made.start("relay", port) for port in ports]
    for port in ports:
        await until(lambda port=port: made.is_healthy(port), LIVE_S, "a relay to be healthy")

    words = example("publish")
    await made.run("outbox", *words)
    assert "sequence 1 order.paid key order-7" in await _next_delivery(receiver)

    (owner, other) = relays if await _owns(made, relays[0]) else reversed(relays)
    code, out = await running.stop(owner)
    assert code == 0, out
    await made.run("outbox", *words)
    assert "sequence 2 order.paid key order-7" in await _next_delivery(receiver)
    for process in (other, api, receiver):
        code, out = await running.stop(process)
        assert code == 0, out


async def _next_delivery(receiver: asyncio.subprocess.Process) -> str:
    assert receiver.stdout is not None
    async with asyncio.timeout(20):
        while b"accepted" not in (line := await receiver.stdout.readline()):
            assert line, "the receiver ended"
    return line.decode()


async def _owns(made: Containment, relay: asyncio.subprocess.Process) -> bool:
    """Whether the relay owns the endpoint; its name ends with its process's number."""
    status = await made.run("outbox", "status")
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
