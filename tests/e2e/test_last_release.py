"""An upgrade from the last release, as its migrations allow: rolling, or while no relay runs.

Before the first tag, the last commit whose newest migration is the one before takes the place of
the release.  The upgrades from this version to one with one more migration cover both ways,
whatever the last release is.
"""

from __future__ import annotations

import itertools
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from outbox.core.messages.signature import parse_secret
from outbox.store.schema.migration_files import migrations
from outbox_devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from outbox_doctor.verify.audit import run_audit
from tests.support.checkout import commit_before, export, last_release, require_checkout
from tests.support.newer_version import LAST, ROLLING, STOP_FIRST, newer_version
from tests.support.postgres import SCHEMA
from tests.support.process import RelayProcess, relay_process
from tests.support.process import outbox as command
from tests.support.relay import all_ended, exceptions
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]


@dataclass(frozen=True)
class Upgrade:
    """Two versions: directories with a program and its schema, or None for this version."""

    old: Path | None
    new: Path | None
    version: int
    """The newest migration of the new version."""
    relays_stop: bool
    """Whether relays of the old version must stop first."""


@pytest.fixture(params=["from the last release", "rolling", "relays stop first"])
def upgrade(request: pytest.FixtureRequest, tmp_path: Path) -> Upgrade:
    """An upgrade."""
    if request.param != "from the last release":
        relays_stop = request.param == "relays stop first"
        text = STOP_FIRST if relays_stop else ROLLING
        return Upgrade(None, newer_version(tmp_path, text), LAST + 1, relays_stop)
    require_checkout()
    commit = last_release() or commit_before(f"schema/{migrations()[-1]}.sql")
    if commit is None:
        pytest.skip("the last release is not in the history: this is a shallow clone")
    directory = tmp_path / "last-release"
    export(commit, directory, "outbox", "schema")
    known = len([*directory.glob("schema/[0-9]*.sql")])
    return Upgrade(
        directory, None, LAST, any(each.relays_stop_first for each in migrations()[known:])
    )


def _is_registered(relay: RelayProcess) -> bool:
    return any(line.get("message") == "replica registered" for line in relay.log())


def _errors(relay: RelayProcess) -> list[object]:
    return [line for line in relay.log() if line.get("level", "error") in ("error", "critical")]


async def test_nothing_is_lost_or_reordered_in_an_upgrade(
    empty_database: Database, upgrade: Upgrade, rng: random.Random, tmp_path: Path
) -> None:
    database = empty_database
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    got: list[HandledRequest] = []
    receiver = DevelopmentReceiver(on_request=got.append, from_start=True, rng=rng)
    numbers = itertools.count()
    count = 0

    def accepted() -> list[object]:
        return [h.message.data["n"] for h in got if h.outcome is HandledOutcome.ACCEPTED]

    async def publish(package: Path | None) -> None:
        nonlocal count
        payload = f'{{"n": {next(numbers)}}}'
        words = ("publish", "order.paid", "--key", "order-7", "--payload", payload)
        published = await command(*words, env=env, package=package)
        assert published.code == 0, published.stderr
        count += 1

    async def delivered() -> None:
        await until(lambda: accepted() == [*range(count)], what=f"{count} deliveries in order")

    async def migrate() -> None:
        migrated = await command("migrate", env=env, package=upgrade.new)
        assert f"at version {upgrade.version}" in migrated.stdout, migrated.stderr

    async def roll(old: RelayProcess, new: RelayProcess) -> None:
        await migrate()
        # Producers of both versions, and one that begins on the newest schema.
        await publish(upgrade.old)
        await publish(upgrade.new)
        await delivered()
        assert await old.end() == 0
        # It also starts on the newest schema.
        await old.start()
        await publish(upgrade.new)
        await delivered()
        await new.start()
        await until(lambda: _is_registered(new), what="the newest relay")
        await publish(upgrade.old)
        await delivered()
        assert await old.end() == 0

    async def stop_first(old: RelayProcess, new: RelayProcess) -> None:
        refused = await command("migrate", env=env, package=upgrade.new)
        assert refused.code == 3
        assert re.fullmatch(
            r"outbox: \d{4}_\w+ was not applied: relays must stop first, and 1 is running: .*\n",
            refused.stderr,
        )
        # Nothing was changed.
        await publish(upgrade.old)
        await delivered()
        assert await old.end() == 0
        await publish(upgrade.old)
        await migrate()
        await publish(upgrade.new)
        started = await command("relay", env=env, package=upgrade.old)
        assert started.code == 3
        assert "upgrade outbox-relay here" in started.stderr
        await new.start()

    new = RelayProcess(env, tmp_path / "new.log", upgrade.new)
    async with receiver.serve() as url:
        migrated = await command("migrate", env=env, package=upgrade.old)
        assert migrated.code == 0, migrated.stderr
        words = ("endpoint", "add", "shop", url, "--json")
        added = await command(*words, env=env, package=upgrade.old)
        receiver.secrets = (parse_secret(added.json["secret"]),)
        async with relay_process(env, tmp_path / "old.log", upgrade.old) as old:
            await publish(upgrade.old)
            await delivered()
            try:
                await (stop_first if upgrade.relays_stop else roll)(old, new)
                await publish(upgrade.new)
                await delivered()
                await all_ended(database, 30)
                assert await new.end() == 0
            finally:
                if new.process is not None:
                    await new.end(signal.SIGKILL)
        assert _errors(old) == []
        assert _errors(new) == []
    assert receiver.totals().good
    assert await exceptions(database) == {}
    # Not by the command: it belongs to a package of this version.
    async with database.connection(server_settings={"search_path": SCHEMA}) as connection:
        report = await run_audit(connection, SCHEMA)
    assert report.violations == 0, report
