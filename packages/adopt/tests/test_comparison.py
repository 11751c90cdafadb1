"""The dual run: whether customers could tell the senders apart."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.model.compat import CompatSetting
from outbox.core.model.endpoint_config import parse_one
from outbox.core.model.headers import parse_lines
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.store.connection.secrets import CLEAR
from outbox.web.address import Address
from outbox_adopt.peers.comparison import Comparison, RecordedRequest, by_endpoint, hashes_of
from outbox_adopt.peers.compat_check import CompatCheck
from outbox_adopt.peers.dual_run import read_checks, recording
from tests.support.process import outbox
from tests.support.relay import publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.model.compat import Compat
    from outbox_adopt.peers.comparison import ComparedEvent, Side
    from tests.support.postgres import Database

FORMS: list[Any] = [
    "svix",
    "github",
    "convoy",
    {"preset": "convoy", "content": "{timestamp},{body}", "value": "t={timestamp},{signatures}"},
    "outpost",
    "stripe",
    {
        "preset": "custom",
        "header": "X-Shop-Signature",
        "content": "{id}:{timestamp}:{body}",
        "encoding": "base64",
        "value": "{timestamp}/{signature}",
        "headers": {"X-Shop-Id": "{id}"},
    },
]
KEYS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3, unique=True)
AT = 1_800_000_000


def request_of(compat: Compat, keys: list[bytes], body: bytes) -> dict[str, str]:
    signer = CompatSigner(compat, [(key, None) for key in keys])
    found = parse_lines(signer.lines("8d2f-11", AT, body))
    return {name.lower(): value for name, value in found}


@pytest.mark.parametrize("form", FORMS)
@given(keys=KEYS, body=st.binary(max_size=200), other=st.binary(min_size=1, max_size=40))
def test_a_receiver_accepts_its_keys_and_no_others(
    form: Any, keys: list[bytes], body: bytes, other: bytes
) -> None:
    compat = CompatSetting().parse("compat", form)
    headers = request_of(compat, keys, body)
    # One signature alone is of the newest key.
    its = keys if "{signatures}" in compat.form.value else keys[:1]
    assert all(CompatCheck(compat.form, [key]).accepts(headers, body) for key in its)
    check = CompatCheck(compat.form, its)
    assert not check.accepts(headers, body + b" ")
    for name in headers:
        assert not check.accepts({each: v for each, v in headers.items() if each != name}, body)
    if other not in keys:
        assert not CompatCheck(compat.form, [other]).accepts(headers, body)


def recorded(body: bytes, at: float, event: str = "-", *, accepted: bool = True) -> RecordedRequest:
    return RecordedRequest("acme", event, at, *hashes_of(body), accepted)


def test_requests_are_paired_by_their_bodies_in_their_order() -> None:
    comparison = Comparison()
    assert comparison.add("theirs", recorded(b"1", 1)) is None
    assert comparison.add("theirs", recorded(b"1", 2)) is None
    first = comparison.add("ours", recorded(b"1", 3, "a"))
    second = comparison.add("ours", recorded(b"1", 4, "b"))
    assert first is not None
    assert second is not None
    assert (first.theirs_at, first.ours_at, first.event) == (1, 3, "a")
    assert (second.theirs_at, second.ours_at, second.event) == (2, 4, "b")
    (total,) = by_endpoint(comparison.finish())
    assert (total.same, total.differs) == (2, False)


def test_what_differs_is_counted_by_its_kind() -> None:
    comparison = Comparison()
    sent: list[tuple[Side, RecordedRequest]] = [
        ("theirs", recorded(b'{"a": 1, "b": 2}', 1)),
        ("ours", recorded(b'{"b":2,"a":1}', 2)),
        ("theirs", recorded(b"x", 3, accepted=False)),
        ("ours", recorded(b"x", 4)),
        ("ours", recorded(b"y", 5, accepted=False)),
        ("theirs", recorded(b"y", 6)),
        ("theirs", recorded(b"only", 7)),
        ("ours", recorded(b"mine", 8)),
        ("theirs", recorded(b"z", 9)),
        ("ours", recorded(b"z", 9)),
    ]
    for side, request in sent:
        comparison.add(side, request)
    events = comparison.finish()
    (total,) = by_endpoint(events)
    assert (total.same, total.other_bytes, total.theirs_refused, total.ours_refused) == (1, 1, 1, 1)
    assert (total.only_theirs, total.only_ours) == (1, 1)
    assert total.differs
    assert len(events) == 6


def test_an_endpoint_for_which_nothing_is_alike_differs() -> None:
    comparison = Comparison()
    comparison.add("ours", recorded(b"1", 1))
    (total,) = by_endpoint(comparison.finish())
    assert total.differs


@pytest.mark.one_major
async def test_both_senders_are_compared_over_http(database: Database) -> None:
    """Ours is a relay; theirs signs as Svix does, once with another secret."""
    secret = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldY"
    comparison = Comparison()
    seen: list[ComparedEvent] = []
    compat = CompatSetting().parse("compat", {"preset": "svix", "secret": secret})
    checks: dict[str, CompatCheck] = {}
    async with recording(comparison, checks, Address("127.0.0.1", 0), seen.append) as at:
        async with database.at_hand() as db:
            settings = parse_one(
                {
                    "name": "acme.billing",
                    "url": f"{at.url}ours/acme.billing",
                    "format": "raw",
                    "compat": {"preset": "svix", "secret": secret},
                    "allow_networks": ["127.0.0.1"],
                }
            )
            await endpoint_changes.add_endpoint(db, "relay", settings, actor="test")
            checks |= await read_checks(db, "relay", CLEAR)
        transport = HttpTransport(EgressPolicy(["127.0.0.0/8"]))
        async with (
            aclosing(transport),
            running(database, transport),
            aiohttp.ClientSession() as theirs,
        ):
            await publish(database, {"n": 1}, {"n": 2}, type="invoice.paid")
            for body, key in ((b'{"n": 1}', compat.decode(secret)), (b'{"n": 2}', b"another")):
                headers = request_of(compat, [key], body)
                url = f"{at.url}theirs/acme.billing"
                assert (await theirs.post(url, data=body, headers=headers)).status == 204
            elsewhere = f"{at.url}theirs/globex"
            assert (await theirs.post(elsewhere, data=b"{}")).status == 404
            await until(lambda: len(seen) == 2, what="both events from both senders")
    first, second = sorted(seen, key=lambda event: event.theirs_at or 0)
    assert first.is_same
    assert (second.same_bytes, second.theirs_accepted, second.ours_accepted) == (True, False, True)
    (total,) = by_endpoint(comparison.finish())
    assert (total.same, total.theirs_refused) == (1, 1)


@pytest.mark.one_major
async def test_compare_without_a_compat_signature_says_what_to_do(database: Database) -> None:
    ended = await outbox("adopt", "compare", "--for", "1s", env={"OUTBOX_DSN": database.dsn})
    assert ended.code == 2
    assert "no endpoint has a compat signature; see outbox endpoint import" in ended.stderr
