"""A rolling deploy from the last release: its relay serves the newest schema until it is replaced.

Before the first tag, the last commit whose newest migration is the one before takes its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.signature import parse_secret
from outbox.devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from outbox.store.connection.migration_files import migrations
from tests.support.checkout import commit_before, export, last_release, require_checkout
from tests.support.process import RelayProcess, relay_process
from tests.support.process import outbox as command
from tests.support.relay import all_ended, exceptions
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the program and the schema of the last release."""
    require_checkout()
    newest = migrations()[-1]
    commit = last_release() or commit_before(f"schema/{newest}.sql")
    if commit is None:
        pytest.skip("the last release is not in the history: this is a shallow clone")
    directory = tmp_path_factory.mktemp("last-release")
    export(commit, directory, "outbox", "schema")
    return directory


def _is_registered(relay: RelayProcess) -> bool:
    return any(line.get("message") == "replica registered" for line in relay.log())


def _errors(relay: RelayProcess) -> list[object]:
    return [line for line in relay.log() if line.get("level", "error") in ("error", "critical")]


async def test_a_relay_of_the_last_release_serves_the_newest_schema(
    empty_database: Database, last: Path, rng: random.Random, tmp_path: Path
) -> None:
    database, newest = empty_database, migrations()[-1].version
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    got: list[HandledRequest] = []
    receiver = DevelopmentReceiver(on_request=got.append, from_start=True, rng=rng)

    def accepted() -> list[object]:
        return [h.message.data["n"] for h in got if h.outcome is HandledOutcome.ACCEPTED]

    async def publish(n: int, package: Path | None) -> None:
        words = ("publish", "order.paid", "--key", "order-7", "--payload", f'{{"n": {n}}}')
        published = await command(*words, env=env, package=package)
        assert published.code == 0, published.stderr

    async def delivered(count: int) -> None:
        await until(lambda: accepted() == [*range(count)], 30, f"{count} deliveries in order")

    async with receiver.serve() as url:
        migrated = await command("migrate", env=env, package=last)
        assert migrated.code == 0, migrated.stderr
        words = ("endpoint", "add", "shop", url, "--json")
        added = await command(*words, env=env, package=last)
        receiver.secrets = (parse_secret(added.json["secret"]),)
        async with relay_process(env, tmp_path / "last.log", last) as old:
            await publish(0, last)
            await delivered(1)
            migrated = await command("migrate", env=env)
            assert f"at version {newest}" in migrated.stdout, migrated.stderr
            # Producers of both versions, and one that begins on the newest schema.
            await publish(1, last)
            await publish(2, None)
            await delivered(3)
            assert await old.end() == 0
            # It also starts on the newest schema.
            await old.start()
            await publish(3, None)
            await delivered(4)
            async with relay_process(env, tmp_path / "new.log") as new:
                await until(lambda: _is_registered(new), 30, "the newest relay")
                await publish(4, last)
                await delivered(5)
                assert await old.end() == 0
                await publish(5, None)
                await delivered(6)
                await all_ended(database, 30)
                assert await new.end() == 0
        assert _errors(old) == []
        assert _errors(new) == []
    assert receiver.totals().good
    assert await exceptions(database) == {}
    audit = await command("verify", env=env)
    assert audit.code == 0, audit.stdout
