"""Secrets that are given: stored for signing, encrypted like others, and shown nowhere."""

from __future__ import annotations

import base64
import hmac
import time
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from outbox.cli import summary
from outbox.core.messages.ed25519 import format_private_key
from outbox.core.messages.signature import format_secret
from outbox.core.model import endpoint_config
from outbox.core.model.compat import CompatSetting
from outbox.core.model.encryption_keys import format_key, parse_keys
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.headers import WIDELY_ACCEPTED_BYTES, parse_lines
from outbox.core.model.secret_text import GivenSecret
from outbox.errors import Conflict, UsageError
from outbox.operations import status
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints.apply import apply_file
from outbox.operations.endpoints.secrets import rotate_secret
from outbox.store.connection.secrets import CLEAR, UnreadableSecret, Vault
from outbox.store.delivery.endpoints import read_endpoints

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.operations.endpoints.changes import NewEndpoint, Updated
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/"
KEY, OTHER = bytes(range(32)), bytes(range(40))
HEX = "whsec_" + "0123456789abcdef" * 4
EVERYTHING = """
SELECT (SELECT string_agg(e::text, ' ') FROM endpoint e)
    || (SELECT string_agg(s::text, ' ') FROM endpoint_secret s)
    || (SELECT string_agg(j::text, ' ') FROM journal j)
"""

# Ends a compat signature, as the time does.
END = """
UPDATE endpoint SET compat = compat || '{"until": "2001-01-31T00:00:00Z"}' WHERE name = $1
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


def compat(given: Any = "github", **members: Any) -> Any:
    return CompatSetting().parse("compat", {"preset": given, **members})


async def add(
    db: Connection[Any], secret: GivenSecret | None = None, vault: Vault = CLEAR, **settings: Any
) -> NewEndpoint:
    values = EndpointSettings(**{"name": "a", "url": URL, **settings})
    return await endpoint_changes.add_endpoint(
        db, "relay", values, actor="ann", secret=secret, vault=vault
    )


async def update(db: Connection[Any], vault: Vault = CLEAR, **settings: Any) -> Updated:
    return await endpoint_changes.update_endpoint(
        db, "relay", "a", lambda current: replace(current, **settings), actor="ann", vault=vault
    )


async def put(db: Connection[Any], vault: Vault = CLEAR, **declared: Any) -> Any:
    file = endpoint_config.parse_file({"endpoints": [{"name": "a", "url": URL, **declared}]})
    report = await apply_file(db, "relay", file, actor="ann", vault=vault)
    return report.endpoints[0]


async def stored(db: Connection[Any], vault: Vault = CLEAR) -> Endpoint:
    endpoint_id = await db.fetchval("SELECT id FROM endpoint WHERE name = 'a'")
    (found,) = await read_endpoints(db, [endpoint_id], vault)
    assert found.problem is None
    return found


async def keys(db: Connection[Any], vault: Vault = CLEAR) -> list[Any]:
    return (await stored(db, vault)).secrets_at(time.time())


async def signatures(db: Connection[Any], vault: Vault = CLEAR) -> list[str]:
    """The compat signatures of a request now, of the newest secret first."""
    computed = (await stored(db, vault)).headers.computed
    assert computed is not None
    ((_, value),) = parse_lines(computed.lines("id", int(time.time()), b"body"))
    return value.split(",")


def outpost(*secrets: str) -> list[str]:
    """What the preset outpost sends."""
    digests = [hmac.new(each.encode(), b"body", sha256).hexdigest() for each in secrets]
    return ("v0=" + ",".join(digests)).split(",")


# ---------------------------------------------------------- the signing secret


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (GivenSecret(format_secret(KEY)), KEY),
        (GivenSecret(base64.b64encode(KEY).decode()), KEY),
        (GivenSecret(base64.b64encode(OTHER).decode().rstrip("=")), OTHER),
        (GivenSecret(HEX, "base64"), base64.b64decode(HEX.removeprefix("whsec_"))),
        # HMAC hashes a key that is longer than a block.
        (GivenSecret(HEX, "raw"), sha256(HEX.encode()).digest()),
        (GivenSecret("an own secret, of any text", "raw"), b"an own secret, of any text"),
    ],
)
async def test_an_endpoint_signs_with_a_given_secret(
    db: Connection[Any], given: GivenSecret, key: bytes
) -> None:
    made = await add(db, given)
    assert made.secret is None
    assert await keys(db) == [key]


async def test_a_given_private_key_shows_its_public_key(db: Connection[Any]) -> None:
    made = await add(db, GivenSecret(format_private_key(KEY)))
    assert made.secret is not None
    assert made.secret.startswith("whpk_")
    (key,) = await keys(db)
    assert key.public_text == made.secret


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (GivenSecret(HEX), "secret: some senders decode such hex digits as base64, and some sign"),
        (GivenSecret(HEX.removeprefix("whsec_")), "give the secret encoding: base64 or raw"),
        (GivenSecret("hunter2 hunter2 hunter2"), "secret: must be 24 to 64 bytes in base64"),
        (GivenSecret("whsec_aHVudGVyMg=="), "secret: must hold 24 to 64 bytes, not 7"),
        (GivenSecret("hunter2", "raw"), "secret: must be a text of at least 24 bytes"),
        (GivenSecret("hunter2" * 99, "raw"), "secret: must be a text of at least 24 bytes"),
        (GivenSecret("whsk_hunter2"), "key: must be 'whsk_'"),
        (GivenSecret("whsk_hunter2", "raw"), "secret_encoding: is for shared secrets"),
        (GivenSecret(""), "secret: must hold 24 to 64 bytes, not 0"),
    ],
)
async def test_a_secret_that_cannot_sign_is_refused_and_nothing_is_changed(
    db: Connection[Any], given: GivenSecret, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        await add(db, given)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    await add(db)
    with pytest.raises(UsageError, match=says):
        await rotate_secret(db, "relay", "a", actor="ann", given=given)
    assert await db.fetchval("SELECT count(*) FROM endpoint_secret") == 1


async def test_a_broker_takes_no_signing_secret(db: Connection[Any]) -> None:
    with pytest.raises(UsageError, match="messages of a broker are not signed"):
        await add(db, GivenSecret(format_secret(KEY)), url="nats://example.com/stream")


async def test_given_secrets_rotate_with_an_overlap(db: Connection[Any]) -> None:
    await add(db, GivenSecret(format_secret(KEY)))
    given = GivenSecret(format_secret(OTHER))
    done = await rotate_secret(db, "relay", "a", actor="ann", given=given)
    assert (done.secret, done.live) == (None, 2)
    assert await keys(db) == [OTHER, KEY]
    with pytest.raises(Conflict, match='endpoint "a" signs with this secret already'):
        await rotate_secret(db, "relay", "a", actor="ann", given=given)
    # Back to the first one: it is there once.
    await rotate_secret(db, "relay", "a", actor="ann", given=GivenSecret(format_secret(KEY)))
    assert await keys(db) == [KEY, OTHER]


async def test_a_file_gives_a_secret_once_and_another_one_rotates(db: Connection[Any]) -> None:
    first, second = format_secret(KEY), format_secret(OTHER)
    assert (await put(db, secret=first)).secret is None
    assert (await put(db, secret=first)).action == "keep"
    assert (await put(db)).action == "keep"
    step = await put(db, secret=second)
    assert step.changed == {"secret": ("(not shown)", "another (not shown)")}
    assert await keys(db) == [OTHER, KEY]
    with pytest.raises(UsageError, match=r"^endpoints\[0\].secret: some senders"):
        await put(db, secret=HEX)
    with pytest.raises(UsageError, match=r"^endpoints\[0\].secret_encoding: must be raw or base64"):
        await put(db, secret=HEX, secret_encoding="hex")  # noqa: S106
    with pytest.raises(UsageError, match=r"^endpoints\[0\].secret_encoding: needs secret as well"):
        await put(db, secret_encoding="raw")  # noqa: S106
    assert await keys(db) == [OTHER, KEY]


# ---------------------------------------------------------- the compat signature


async def test_an_endpoint_has_a_compat_signature_beside_its_own(db: Connection[Any]) -> None:
    await add(db, compat=compat("outpost", secret=HEX))
    assert await signatures(db) == outpost(HEX)
    assert len(await keys(db)) == 1
    # Other settings, and other members, keep its secret.
    await update(db, lanes=2)
    await update(db, compat=compat("outpost", until="2199-01-31"))
    assert await signatures(db) == outpost(HEX)
    detail = await endpoints.get_endpoint(db, "relay", "a")
    assert detail.settings["compat"] == {"preset": "outpost", "until": "2199-01-31T00:00:00Z"}
    assert sorted(each.compat for each in detail.secrets) == [False, True]
    # Without the signature, its secrets are gone; with a new one, they are asked for again.
    await update(db, compat=None)
    assert (await stored(db)).headers.computed is None
    assert await db.fetchval("SELECT count(*) FROM endpoint_secret") == 1
    with pytest.raises(UsageError, match=r"compat\.secret: is missing"):
        await update(db, compat=compat("outpost"))


async def test_compat_secrets_rotate_apart_from_the_signing_secret(db: Connection[Any]) -> None:
    await add(db, compat=compat("outpost", secret="one"))  # noqa: S106
    (key,) = await keys(db)
    for n, text in enumerate(("two", "three"), 2):
        done = await rotate_secret(
            db, "relay", "a", actor="ann", given=GivenSecret(text), compat=True
        )
        assert done.live == n
    assert await signatures(db) == outpost("three", "two", "one")
    with pytest.raises(Conflict, match="has 3 live secrets"):
        await rotate_secret(db, "relay", "a", actor="ann", given=GivenSecret("4"), compat=True)
    assert await keys(db) == [key]
    await rotate_secret(db, "relay", "a", actor="ann", overlap_s=0)
    assert await signatures(db) == outpost("three", "two", "one")
    await rotate_secret(
        db, "relay", "a", actor="ann", given=GivenSecret("4"), compat=True, overlap_s=0
    )
    assert await signatures(db) == outpost("4")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compat": True}, "secret: is missing; the secret of a compat signature is given"),
        ({"compat": True, "given": GivenSecret("x")}, "has no compat signature; add one"),
        ({"ed25519": True, "given": GivenSecret("x")}, "ed25519: is for a new key"),
    ],
)
async def test_a_rotation_says_what_it_lacks(
    db: Connection[Any], options: dict[str, Any], says: str
) -> None:
    await add(db)
    with pytest.raises(UsageError, match=says):
        await rotate_secret(db, "relay", "a", actor="ann", **options)


async def test_a_file_gives_a_compat_secret_once_and_another_one_rotates(
    db: Connection[Any],
) -> None:
    given = {"preset": "outpost", "secret": "one"}
    await put(db, compat=given)
    assert (await put(db, compat=given)).action == "keep"
    assert (await put(db, compat={"preset": "outpost"})).action == "keep"
    step = await put(db, compat=given | {"secret": "two", "until": "2199-01-31"})
    assert step.changed == {
        "compat": ("outpost", "outpost until=2199-01-31T00:00:00Z"),
        "compat.secret": ("(not shown)", "another (not shown)"),
    }
    assert await signatures(db) == outpost("two", "one")
    assert (await put(db)).changed == {"compat": ("outpost until=2199-01-31T00:00:00Z", "none")}
    with pytest.raises(UsageError, match=r"^endpoints\[0\].compat.secret: is missing"):
        await put(db, compat="outpost")


async def test_a_new_end_is_not_in_the_past(db: Connection[Any]) -> None:
    """A wrong year would stop the signature at once; one that was reached stays as it is."""
    past, over = {"until": "2001-01-31"}, "compat.until: 2001-01-31T00:00:00Z is in the past"
    given = {"preset": "outpost", "secret": "one"}
    with pytest.raises(UsageError, match=f"^{over}$"):
        await add(db, compat=compat(**given | past))
    with pytest.raises(UsageError, match=rf"^endpoints\[0\].{over}$"):
        await put(db, compat=given | past)
    assert await db.fetchval("SELECT count(*) FROM endpoint") == 0
    await put(db, compat=given | {"until": "2199-01-31"})
    with pytest.raises(UsageError, match=f"^{over}$"):
        await update(db, compat=compat("outpost", **past))
    await db.execute(END, "a")
    assert (await put(db, compat=given | past)).action == "keep"
    assert set((await update(db, timeout_s=9.0)).changed) == {"timeout"}
    with pytest.raises(UsageError, match="2002-01-31T00:00:00Z is in the past"):
        await put(db, compat=given | {"until": "2002-01-31"})
    assert set((await put(db, compat=given)).changed) == {"compat", "timeout"}


async def test_long_headers_of_a_compat_signature_cause_a_warning(db: Connection[Any]) -> None:
    headers = {"X-Long": "a" * (WIDELY_ACCEPTED_BYTES - 20)}
    assert (await add(db, headers=headers)).warnings == ()
    (warning,) = (await update(db, compat=compat(secret="x"))).warnings  # noqa: S106
    assert warning.startswith("headers: the headers have")


async def test_both_secrets_change_at_once(db: Connection[Any]) -> None:
    await put(db, secret=format_secret(KEY), compat={"preset": "outpost", "secret": "one"})
    await put(db, secret=format_secret(OTHER), compat={"preset": "outpost", "secret": "two"})
    assert await keys(db) == [OTHER, KEY]
    assert await signatures(db) == outpost("two", "one")


async def test_another_encoding_of_the_secret_asks_for_it_again(db: Connection[Any]) -> None:
    await add(db, compat=compat("github", secret="aHVudGVyMg=="))  # noqa: S106
    await update(db, compat=compat("outpost"))
    assert await signatures(db) == outpost("aHVudGVyMg==")
    with pytest.raises(UsageError, match=r"compat\.secret: is missing"):
        await update(db, compat=compat("svix"))


async def test_secrets_are_encrypted_and_in_no_journal(db: Connection[Any]) -> None:
    vault = Vault(parse_keys(format_key(bytes([7]) * 32)))
    text = "hunter2-hunter2-hunter2-hunter2"
    given = GivenSecret(text, "raw")
    signing, own = (base64.b64encode(each.encode()).decode() for each in (text, "hub-4711"))
    await add(db, given, vault, compat=compat("outpost", secret="hub-4711"))  # noqa: S106
    await update(db, vault, compat=compat("outpost", secret="hub-4712"))  # noqa: S106
    await rotate_secret(db, "relay", "a", actor="ann", vault=vault)
    everything = await db.fetchval(EVERYTHING)
    for secret in (text, signing, "hub-471", own[:8]):
        assert secret not in everything
    assert await signatures(db, vault) == outpost("hub-4712", "hub-4711")
    for declared in ({"secret": signing}, {"compat": {"preset": "outpost", "secret": "x"}}):
        with pytest.raises(UnreadableSecret, match="secrets are encrypted with the key"):
            await put(db, **declared)
    # A compat secret is bound to its purpose.
    await db.execute("UPDATE endpoint_secret SET compat = NOT compat")
    endpoint_id = await db.fetchval("SELECT id FROM endpoint")
    (found,) = await read_endpoints(db, [endpoint_id], vault)
    assert found.secret_altered


async def test_status_counts_compat_signatures_and_names_the_next_end(db: Connection[Any]) -> None:
    for name, until in (("a", "2198-01-31"), ("b", None), ("c", "2197-01-31"), ("d", "2199-01-31")):
        members = {} if until is None else {"until": until}
        await add(db, name=name, compat=compat(secret="x", **members))  # noqa: S106
    await db.execute(END, "c")
    found = (await status.read_overview(db, "relay")).compat
    assert (found.endpoints, found.ended) == (3, 1)
    assert (found.next_end, found.next_endpoint) == ("2198-01-31T00:00:00Z", "a")
    # An end that was edited by hand fails no status.
    await db.execute("""UPDATE endpoint SET compat = '{"preset": "github", "until": "x"}'""")
    pairs = dict(summary.pairs(await status.read_overview(db, "relay")))
    assert pairs["compat signatures"] == "of 4 endpoints; the next end: a, unreadable"
