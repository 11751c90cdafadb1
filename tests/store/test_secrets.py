"""Encryption of secrets in the tables, and key rotation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import orjson
import pytest

from outbox.core.messages.signature import parse_secret
from outbox.core.model import endpoint_config
from outbox.core.model.compat import CompatSetting
from outbox.core.model.encryption_keys import format_key, parse_keys
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.errors import CannotRun, Conflict
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints.apply import apply_file
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.secrets import (
    CLEAR,
    SIGNING,
    AlteredSecret,
    UnreadableSecret,
    UnreadableText,
    Vault,
)
from outbox.store.delivery.endpoints import find_endpoint, read_endpoints
from outbox_doctor.maintenance import rotate_key
from tests.support.relay import register

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

OLD, NEW = (Vault(parse_keys(format_key(bytes([i]) * 32))) for i in (1, 2))
BOTH = Vault(parse_keys(f"{format_key(bytes([2]) * 32)} {format_key(bytes([1]) * 32)}"))
CREDENTIAL = "Bearer hunter2"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def add(db: Connection[Any], vault: Vault, name: str = "shop", **values: Any) -> Any:
    settings = EndpointSettings(
        name=name,
        url="https://example.com/",
        headers={"Authorization": CREDENTIAL, "X-Env": "prod"},
        **values,
    )
    return await endpoint_changes.add_endpoint(db, "relay", settings, actor="test", vault=vault)


async def everything(db: Connection[Any]) -> str:
    """All stored values, as text."""
    tables = await db.fetch(
        "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') "
        "AND relnamespace = 'relay'::regnamespace AND NOT relispartition"
    )
    rows = [await db.fetch(f'SELECT t::text FROM "{t["relname"]}" t') for t in tables]
    return str(rows)


# ------------------------------------------------------------------ the vault


def test_a_text_round_trips_with_a_different_ciphertext_each_time() -> None:
    endpoint = uuid4()
    first, second = (OLD.seal("whsec_é", endpoint, SIGNING) for _ in range(2))
    assert first != second
    assert "whsec" not in first
    assert first.startswith(f"sealed:{OLD.key_id}:")
    assert OLD.open(first, endpoint, SIGNING) == "whsec_é"
    assert BOTH.open(first, endpoint, SIGNING) == "whsec_é"
    assert BOTH.key_id == NEW.key_id


def test_without_a_key_texts_are_stored_in_clear() -> None:
    assert CLEAR.seal("x", uuid4(), SIGNING) == "x"
    assert OLD.open("x", uuid4(), SIGNING) == "x"


def test_a_ciphertext_is_bound_to_its_endpoint_and_purpose() -> None:
    endpoint = uuid4()
    sealed = OLD.seal("x", endpoint, SIGNING)
    for other, what in ((uuid4(), SIGNING), (endpoint, "header x")):
        with pytest.raises(AlteredSecret, match="is not what was encrypted for it"):
            OLD.open(sealed, other, what)


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_any_changed_byte_is_detected(at: int) -> None:
    endpoint = UUID(int=7)
    head, _, data = OLD.seal("a secret that is long", endpoint, SIGNING).rpartition(":")
    changed = "A" if data[at] != "A" else "B"
    with pytest.raises(AlteredSecret, match="the table was changed"):
        OLD.open(f"{head}:{data[:at]}{changed}{data[at + 1 :]}", endpoint, SIGNING)


@pytest.mark.parametrize("rest", ["", ":", "?:", ":x", f"{OLD.key_id}:", f"{OLD.key_id}:é"])
def test_an_invalid_ciphertext_is_reported_as_locked(rest: str) -> None:
    with pytest.raises(UnreadableSecret):
        OLD.open(f"sealed:{rest}", uuid4(), SIGNING)


def test_a_missing_key_is_named() -> None:
    sealed = OLD.seal("x", uuid4(), SIGNING)
    for vault in (CLEAR, NEW):
        with pytest.raises(UnreadableSecret, match=f"key {OLD.key_id}; set OUTBOX_KEY"):
            vault.open(sealed, uuid4(), SIGNING)


# ----------------------------------------------------------------- the tables


async def test_no_secret_is_in_the_tables(db: Connection[Any]) -> None:
    made = await add(db, OLD)
    await endpoint_changes.update_endpoint(
        db,
        "relay",
        "shop",
        lambda s: endpoint_config.parse_one(
            {"headers": {"X-Key": "hunter3", "Authorization": None}}, s
        ),
        actor="test",
        vault=OLD,
    )
    rotated = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="t", vault=OLD)
    private = await endpoint_secrets.rotate_secret(
        db, "relay", "shop", actor="t", vault=OLD, ed25519=True
    )
    text = await everything(db)
    for secret in (made.secret, rotated.secret, CREDENTIAL, "hunter", "whsec_", "whsk_"):
        assert secret not in text
    assert private.secret.startswith("whpk_")
    (found,) = await read_endpoints(db, [made.id], OLD)
    assert dict(found.headers.own) == {"X-Key": "hunter3", "Authorization": CREDENTIAL}
    newest, *older = found.secrets_at(0)
    assert newest.public_text == private.secret
    assert older == [parse_secret(rotated.secret), parse_secret(made.secret)]
    assert "hunter" not in repr(found)


async def test_an_endpoint_with_unreadable_secrets_does_not_stop_others(
    db: Connection[Any],
) -> None:
    await add(db, CLEAR, "clear")
    made = await add(db, OLD, "shop")
    ids = [r["id"] for r in await db.fetch("SELECT id FROM endpoint ORDER BY name")]
    clear, shop = await read_endpoints(db, ids, NEW)
    assert clear.usable
    assert not shop.usable
    assert shop.problem == (
        f"its signing secret is encrypted with the key {OLD.key_id}; set OUTBOX_KEY to that key"
    )
    with pytest.raises(CannotRun, match='endpoint "shop": its signing secret is encrypted'):
        await find_endpoint(db, "relay", "shop", CLEAR)
    assert (await find_endpoint(db, "relay", "shop", BOTH)).id == made.id


async def test_no_secret_is_written_with_a_key_that_other_relays_lack(db: Connection[Any]) -> None:
    await add(db, OLD)
    for vault in (CLEAR, NEW):
        with pytest.raises(
            UnreadableSecret, match=f"secrets are encrypted with the key {OLD.key_id}"
        ):
            await add(db, vault, "second")
        with pytest.raises(UnreadableSecret):
            await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="t", vault=vault)
        with pytest.raises(UnreadableSecret):
            await endpoint_changes.update_endpoint(
                db,
                "relay",
                "shop",
                lambda s: endpoint_config.parse_one({"headers": {"X-Env": "test"}}, s),
                actor="t",
                vault=vault,
            )
    # With a new first key, secrets are written with the key that all relays have, until `rekey`.
    await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="t", vault=BOTH)
    assert await keys_in_use(db) == [OLD.key_id, OLD.key_id]
    await rotate_key.rotate_key(db, "relay", BOTH, actor="t")
    await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="t", vault=BOTH)
    assert await keys_in_use(db) == [NEW.key_id] * 3


async def test_a_new_key_is_used_when_every_relay_has_it(db: Connection[Any]) -> None:
    store = ReplicaStore(db, None)
    await register(store, name="old")
    with pytest.raises(Conflict, match=f"the relay old does not have the key {OLD.key_id}"):
        await add(db, OLD)
    await db.execute("DELETE FROM replica")
    await register(store, name="new", keys=BOTH.key_ids)
    await add(db, OLD)
    assert await keys_in_use(db) == [OLD.key_id]


async def keys_in_use(db: Connection[Any]) -> list[str | None]:
    rows = await db.fetch("SELECT key_id FROM endpoint_secret ORDER BY endpoint_id, id")
    return [row["key_id"] for row in rows]


@pytest.mark.parametrize(
    "headers",
    ['{"X": {}}', '{"X": {"sealed": 5}}', '{"X": {"sealed": "x"}}', '{"X": 5}', '{"X": null}'],
)
async def test_an_unreadable_row_does_not_block_others(db: Connection[Any], headers: str) -> None:
    await add(db, OLD, "broken")
    await add(db, OLD, "good")
    await db.execute("UPDATE endpoint SET headers = $1::text::jsonb WHERE name = 'broken'", headers)
    ids = [r["id"] for r in await db.fetch("SELECT id FROM endpoint ORDER BY name")]
    broken, good = await read_endpoints(db, ids, OLD)
    assert good.usable
    assert broken.problem is not None
    assert "its header x is neither a text nor encrypted" in broken.problem
    done = await rotate_key.rotate_key(db, "relay", BOTH, actor="t")
    assert (done.done, len(done.locked), done.left) == (2, 1, 1)


async def test_without_the_key_other_settings_can_be_changed(db: Connection[Any]) -> None:
    made = await add(db, OLD)
    for vault in (CLEAR, NEW):
        ((_, settings),) = await endpoints.list_settings(db, "relay", limit=10)
        assert all(isinstance(v, UnreadableText) for v in settings.headers.values())
        document = {"endpoints": [{**endpoint_config.to_file_values(settings), "lanes": 2}]}
        await apply_file(db, "relay", endpoint_config.parse_file(document), actor="t", vault=vault)
        done = await endpoint_changes.update_endpoint(
            db,
            "relay",
            "shop",
            lambda s: endpoint_config.parse_one({"lanes": 3}, s),
            actor="t",
            vault=vault,
        )
        assert list(done.changed) == ["lanes"]
    (there,) = await read_endpoints(db, [made.id], OLD)
    assert dict(there.headers.own)["Authorization"] == CREDENTIAL


# ------------------------------------------------------------------ rekeying


async def test_all_secrets_are_encrypted_with_the_new_key(db: Connection[Any]) -> None:
    made = [await add(db, CLEAR, f"e{i}") for i in range(3)]
    await endpoint_secrets.rotate_secret(db, "relay", "e0", actor="t")
    assert await rotate_key.count_secrets(db, "relay") == [rotate_key.SecretCount(None, 4 + 6)]
    done = await rotate_key.rotate_key(db, "relay", OLD, actor="ann")
    assert (done.key, done.endpoints, done.done, done.secrets) == (OLD.key_id, 3, 3, 10)
    assert CREDENTIAL not in await everything(db)
    seen: list[int] = []
    again = await rotate_key.rotate_key(
        db, "relay", BOTH, actor="ann", on_progress=lambda d: seen.append(d.done)
    )
    assert (again.secrets, seen) == (10, [1, 2, 3])
    assert await rotate_key.count_secrets(db, "relay") == [rotate_key.SecretCount(NEW.key_id, 10)]
    assert (await rotate_key.rotate_key(db, "relay", NEW, actor="ann")).secrets == 0
    clear = await rotate_key.rotate_key(db, "relay", NEW.in_clear(), actor="ann")
    assert (clear.key, clear.secrets) == (None, 10)
    found = await read_endpoints(db, [m.id for m in made], CLEAR)
    assert all(dict(f.headers.own)["Authorization"] == CREDENTIAL for f in found)
    reported = await db.fetch("SELECT actor, data FROM journal WHERE kind = 'secrets_rekeyed'")
    assert [r["actor"] for r in reported] == ["ann"] * 3


async def test_an_unreadable_secret_is_not_changed(db: Connection[Any]) -> None:
    await add(db, CLEAR, "good")
    await add(db, OLD, "lost")
    before = await db.fetchval("SELECT headers::text FROM endpoint WHERE name = 'lost'")
    done = await rotate_key.rotate_key(db, "relay", NEW, actor="ann")
    assert (done.done, done.secrets, len(done.locked), done.left) == (2, 3, 1, 3)
    assert done.locked[0].startswith('endpoint "lost": its signing secret is encrypted with')
    assert before == await db.fetchval("SELECT headers::text FROM endpoint WHERE name = 'lost'")


async def test_a_header_that_resembles_a_ciphertext_is_encrypted(db: Connection[Any]) -> None:
    made = await add(db, CLEAR)
    resembling = OLD.seal("x", made.id, "header x-env")
    text = orjson.dumps({"X-Env": resembling}).decode()
    await db.execute("UPDATE endpoint SET headers = $1::text::jsonb", text)
    await rotate_key.rotate_key(db, "relay", OLD, actor="ann")
    (found,) = await read_endpoints(db, [made.id], OLD)
    assert dict(found.headers.own) == {"X-Env": resembling}


async def test_key_rotation_requires_the_key_on_every_running_relay(db: Connection[Any]) -> None:
    await add(db, OLD)
    store = ReplicaStore(db, None)
    for name, vault in (("old", OLD), ("both", BOTH)):
        await register(store, name=name, keys=vault.key_ids)
    with pytest.raises(Conflict, match=f"the relay old does not have the key {NEW.key_id}"):
        await rotate_key.rotate_key(db, "relay", BOTH, actor="ann")
    assert await rotate_key.count_secrets(db, "relay") == [rotate_key.SecretCount(OLD.key_id, 3)]
    assert (await rotate_key.rotate_key(db, "relay", BOTH, actor="ann", force=True)).secrets == 3
    await db.execute("UPDATE replica SET expires_at = clock_timestamp() WHERE name = 'old'")
    assert (await rotate_key.rotate_key(db, "relay", BOTH, actor="ann")).secrets == 0


async def test_readable_secrets_of_an_endpoint_are_rotated(db: Connection[Any]) -> None:
    made = await add(db, OLD)
    other = Vault(parse_keys(format_key(bytes([9]) * 32)))
    unreadable = other.seal("whsec_lost", made.id, SIGNING)
    await db.execute(
        "INSERT INTO endpoint_secret (endpoint_id, id, secret) VALUES ($1, 2, $2)",
        made.id,
        unreadable,
    )
    done = await rotate_key.rotate_key(db, "relay", BOTH, actor="t")
    assert (done.secrets, len(done.locked), done.left) == (3, 1, 1)
    # An ended relay does not prevent the rotation.
    await db.execute("UPDATE endpoint_secret SET expires_at = now() WHERE id = 2")
    done = await rotate_key.rotate_key(db, "relay", BOTH, actor="t")
    assert (done.locked, done.left) == ((), 0)


async def test_compat_secrets_are_rotated_for_their_purpose(db: Connection[Any]) -> None:
    made = await add(db, OLD)
    compat = CompatSetting().parse("compat", {"preset": "outpost", "secret": "hub-4711"})
    await endpoint_changes.update_endpoint(
        db, "relay", "shop", lambda s: replace(s, compat=compat), actor="t", vault=OLD
    )
    signed = []
    for vault in (OLD, NEW):
        (found,) = await read_endpoints(db, [made.id], vault)
        assert found.problem is None
        assert found.headers.computed is not None
        signed.append(found.headers.computed.lines("id", 1, b"body"))
        await rotate_key.rotate_key(db, "relay", BOTH, actor="t")
    assert signed[0] == signed[1] != ""


async def test_concurrent_writes_are_also_rotated(database: Database, db: Connection[Any]) -> None:
    for name in "abc":
        await add(db, OLD, name)
    beside = await database.connect(server_settings={"search_path": "relay"})
    statements = 0
    pending: list[asyncio.Task[Any]] = []

    def meanwhile(done: rotate_key.RekeyProgress) -> None:
        nonlocal statements
        statements += 1
        if statements == 2:
            # A writer that has only the old key, behind the current position.
            pending.append(
                asyncio.ensure_future(
                    endpoint_secrets.rotate_secret(beside, "relay", "a", actor="t", vault=OLD)
                )
            )

    done = await rotate_key.rotate_key(db, "relay", BOTH, actor="t", on_progress=meanwhile)
    await asyncio.gather(*pending, return_exceptions=True)
    left = {each.key for each in await rotate_key.count_secrets(db, "relay")}
    assert (done.left, left) == (0, {NEW.key_id})
