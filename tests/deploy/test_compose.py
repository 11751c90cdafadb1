"""What deploy/compose.yaml says, and its services, started by hand."""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import pytest
import yaml

from tests.support.compose import (
    FILE,
    ROLES,
    Composition,
    compose_database,
    composition,
    example,
    services,
)
from tests.support.ports import free_port
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TEXT = FILE.read_text()
SUPERUSERS = "SELECT rolname FROM pg_roles WHERE rolsuper AND rolname ~ '^outbox_'"
SEALED = "SELECT secret FROM relay.endpoint_secret"
ANY = "0.0.0.0"  # noqa: S104 (of the file)
OWNER = "SELECT r.name FROM relay.ownership o JOIN relay.replica r ON r.id = o.replica_id"


def _dsn(environment: Any) -> str | None:
    dsn = environment.get("OUTBOX_DSN", environment.get("OUTBOX_API_DSN"))
    return None if dsn is None else str(dsn)


def test_each_service_has_a_role_of_its_own_with_its_password() -> None:
    made = dict(re.findall(r"CREATE ROLE (\w+) LOGIN PASSWORD '(\w+)';", ROLES.read_text()))
    users = {}
    for name, service in services(TEXT).items():
        if (dsn := _dsn(service.environment)) is not None:
            address = urlsplit(dsn)
            assert made[str(address.username)] == address.password, name
            users[name] = address.username
    assert users == {
        "migrate": "outbox_owner",
        "endpoints": "outbox_operator",
        "relay": "outbox_relay",
        "api": "outbox_api",
        "outbox": "outbox_operator",
    }
    assert services(TEXT)["migrate"].words[1:] == (
        *("migrate", "--relay", "outbox_relay", "--api", "outbox_api"),
        *("--operator", "outbox_operator", "--producer", "outbox_operator"),
    )


def test_the_volumes_are_declared_and_the_files_are_there() -> None:
    assert "$" not in TEXT, "Compose would replace what follows it"
    parsed = yaml.safe_load(TEXT)
    used = {
        volume.split(":")[0]
        for each in parsed["services"].values()
        for volume in each.get("volumes", ())
    }
    files = {each for each in used if each.startswith(".")}
    assert used - files == set(parsed["volumes"])
    assert "database:/var/lib/postgresql" in parsed["services"]["postgres"]["volumes"]
    for each in files:
        assert (FILE.parent / each).is_file(), each


@pytest.fixture
async def composed(tmp_path: Path) -> AsyncIterator[tuple[Composition, asyncpg.Connection]]:
    async with compose_database() as server:
        database = await asyncpg.connect(server.dsn("app"))
        replaced = {
            "@postgres/app": f"@{server.dsn('app').partition('@')[2]}",
            "172.16.0.0/12,192.168.0.0/16": "127.0.0.0/8",
            "receiver:9000": f"127.0.0.1:{(receiver := free_port())}",
            "9000": str(receiver),
            f"{ANY}:8080": f"127.0.0.1:{free_port()}",
            ANY: "127.0.0.1",
        }  # fmt: skip
        async with composition(tmp_path, replaced) as made:
            yield made, database
        await database.close()


@pytest.mark.full
async def test_the_services_deliver_verified_events_and_take_over(
    composed: tuple[Composition, asyncpg.Connection], tmp_path: Path
) -> None:
    made, database = composed
    await made.up()

    async def arrives(sequence: int) -> None:
        await until(
            lambda: f"sequence {sequence} order.paid key order-7" in made.log("receiver"),
            LIVE_S,
            f"event {sequence} to arrive",
        )

    await made.run("outbox", *example("publish"))
    await arrives(1)
    owner = await database.fetchval(OWNER)
    relays = made.running["relay"]
    (killed,) = (n for n, each in enumerate(relays) if owner.endswith(f":{each.pid}"))
    relays[killed].kill()
    await made.run("outbox", *example("publish"))
    await arrives(2)

    log = made.log("receiver")
    assert log.count("accepted") == 2
    assert "signatures are not verified" not in log
    async with aiohttp.ClientSession() as session:
        receiver = f"http://{made.replaced['receiver:9000']}/"
        async with session.post(receiver, json={"forged": True}) as response:
            assert response.status == 401
        page = f"http://{made.replaced[f'{ANY}:8080']}"
        token = re.search(
            r"^secret +(\S+)$", await made.run("outbox", *example("token")), re.MULTILINE
        )
        assert token is not None
        headers = {"Authorization": f"Bearer {token[1]}"}
        for path in ("/", "/v1/status", "/v1/endpoints"):
            async with session.get(f"{page}{path}", headers=headers) as response:
                assert response.status == 200, await response.text()
        for health in (made.health["relay"][1 - killed], *made.health["api"]):
            async with session.get(f"http://{health}/healthz") as response:
                assert response.status == 200

    assert await database.fetch(SUPERUSERS) == []
    for row in await database.fetch(SEALED):
        assert not row["secret"].startswith("whsec_"), "a secret in plain text"
    key, secret = tmp_path / "key/key", tmp_path / "receiver/secret"
    before = key.read_text(), secret.read_text()
    for file in (key, secret):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [each.name for each in file.parent.iterdir()] == [file.name]
    for service in ("key", "migrate", "endpoints"):
        await made.run(service)
    assert (key.read_text(), secret.read_text()) == before, "a second `up` keeps them"
    await made.run("outbox", *example("publish"))
    await arrives(3)
