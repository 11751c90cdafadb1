"""The services of the systemd units, started by hand with their settings and credentials."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import aiohttp
import asyncpg
import pytest

from outbox.core.model.encryption_keys import format_key
from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.support.checkout import ROOT
from tests.support.compose import compose_database
from tests.support.ports import free_port
from tests.support.process import outbox, relay_process
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.full]

ROLES = {
    "/etc/outbox/migrate-dsn": "outbox_owner",
    "/etc/outbox/dsn": "outbox_relay",
    "/etc/outbox/api-dsn": "outbox_api",
}
"""The role of each DSN."""
SEALED = "SELECT secret FROM relay.endpoint_secret"


class Unit:
    """A unit whose credentials are in a directory.

    Args:
        contents: of the files that the machine has.
    """

    def __init__(self, name: str, directory: Path, contents: dict[str, str]) -> None:
        text = (ROOT / f"deploy/outbox-{name}.service").read_text()
        (command,) = re.findall(r"^ExecStart=/opt/outbox/bin/outbox (.*)$", text, re.MULTILINE)
        self.words = tuple(command.split())
        credentials = directory / name
        credentials.mkdir()
        for credential, path in re.findall(r"^LoadCredential=(\w+):(.*)$", text, re.MULTILINE):
            (credentials / credential).write_text(contents[path])
        settings = " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE))
        self.env = dict(
            each.replace("%d", str(credentials)).split("=", 1) for each in settings.split()
        )


async def test_the_services_of_the_units_work_together(tmp_path: Path) -> None:
    receiver = DevelopmentReceiver(())
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(compose_database())
        database = await asyncpg.connect(server.dsn("app"))
        stack.push_async_callback(database.close)
        contents = {path: server.dsn("app", user=role) for path, role in ROLES.items()}
        contents["/etc/outbox/key"] = format_key(bytes(range(32)))
        migrate, relay, api = (
            Unit(name, tmp_path, contents) for name in ("migrate", "relay", "api")
        )
        ended = await outbox(*migrate.words, env=migrate.env)
        assert ended.code == 0, ended.stderr

        url = await enter(receiver.serve())
        operator = migrate.env | {"OUTBOX_KEY_FILE": relay.env["OUTBOX_KEY_FILE"]}
        for words in (
            ("endpoint", "add", "shop", url, "--allow-network", "127.0.0.0/8"),
            ("publish", "order.paid"),
        ):
            ended = await outbox(*words, env=operator)
            assert ended.code == 0, ended.stderr
        for row in await database.fetch(SEALED):
            assert not row["secret"].startswith("whsec_")

        admin = f"127.0.0.1:{free_port()}"
        env = {**relay.env, "OUTBOX_ALLOW_NETWORKS": ""}
        words = relay.words[1:]
        await enter(relay_process(env, tmp_path / "relay.log", None, *words, name=relay.words[0]))
        env = {**api.env, "OUTBOX_ALLOW_NETWORKS": "", "OUTBOX_ADMIN": admin}
        words = api.words[1:]
        await enter(relay_process(env, tmp_path / "api.log", None, *words, name=api.words[0]))
        await until(lambda: receiver.totals().accepted == 1, LIVE_S, "the event to arrive")

        session = await enter(aiohttp.ClientSession())

        async def is_served() -> bool:
            try:
                async with session.get(f"http://{admin}/") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await until(is_served, LIVE_S, "the page")
