"""The dual run: whether customers could tell the senders apart."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.model.compat import CompatSetting
from outbox.core.model.endpoint_config import parse_one
from outbox.core.model.headers import parse_lines
from outbox.destinations.http.transport import HttpTransport
from outbox.errors import NotFound
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.store.connection.secrets import CLEAR
from outbox.web.address import Address
from outbox_adopt.cli.compare import compare_command
from outbox_adopt.peers import comparison as comparison_module
from outbox_adopt.peers import recorder
from outbox_adopt.peers.comparison import (
    DIFFERENCES_MAX,
    METHOD,
    REFUSED_UNPAIRED_MAX,
    ComparedEndpoint,
    Comparison,
    RecordedRequest,
    TooManyUnpaired,
    hashes_of,
)
from outbox_adopt.peers.compat_check import CompatCheck
from outbox_adopt.peers.dual_run import read_compared, recording
from tests.support.ports import free_port
from tests.support.process import outbox
from tests.support.relay import publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Iterable, Mapping

    from outbox.core.model.compat import Compat
    from outbox_adopt.peers.comparison import ComparedEvent, EndpointComparison, Side
    from tests.support.postgres import Database

SHOP = {
    "preset": "custom",
    "header": "X-Shop-Signature",
    "content": "{id}:{timestamp}:{body}",
    "encoding": "base64",
    "value": "{timestamp}/{signature}",
    "headers": {"X-Shop-Id": "{id}"},
}
FORMS: list[Any] = [
    "svix",
    "github",
    "convoy",
    {"preset": "convoy", "content": "{timestamp},{body}", "value": "t={timestamp},{signatures}"},
    "outpost",
    "stripe",
    SHOP,
    {"preset": "custom", "header": "X-Acme-Signature", "content": "{timestamp}:{body}"},
    {
        "preset": "custom",
        "header": "X-Acme-Signature",
        "content": "{id}.{body}",
        "value": "t={timestamp},{signatures},first={signature}",
    },
]
KEYS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3, unique=True)
AT = 1_800_000_000


def request_of(compat: Compat, keys: list[bytes], body: bytes) -> dict[str, str]:
    signer = CompatSigner(compat, [(key, None) for key in keys])
    found = parse_lines(signer.lines("8d2f-11", AT, body))
    standard = {"webhook-id": "8d2f-11", "webhook-timestamp": str(AT)}
    return standard | {name.lower(): value for name, value in found}


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
    for name in map(str.lower, (compat.form.header, *compat.form.headers)):
        assert not check.accepts({each: v for each, v in headers.items() if each != name}, body)
    if other not in keys:
        assert not CompatCheck(compat.form, [other]).accepts(headers, body)


def check_of(form: Any, key: bytes) -> CompatCheck:
    return CompatCheck(CompatSetting().parse("compat", form).form, [key])


@pytest.mark.parametrize(
    ("form", "now", "then"),
    [
        ("svix", "v1,", "v9,"),
        ("svix", "v1,", "v1,v1,"),
        ("stripe", "v1=", "v0="),
        ("convoy", "v1=", "v1=0"),
        ("outpost", "v0=", "v0=0"),
        ("github", "sha256=", "sha256=0"),
        ("shop", "/", "/0"),
    ],
)
def test_a_signature_of_another_version_or_length_is_refused(
    form: str, now: str, then: str
) -> None:
    forms = {"convoy": {"preset": "convoy", "value": "{signatures}"}, "shop": SHOP}
    compat = CompatSetting().parse("compat", forms.get(form, form))
    headers = request_of(compat, [b"key"], b"{}")
    name = compat.form.header.lower()
    check = CompatCheck(compat.form, [b"key"])
    assert check.accepts(headers, b"{}")
    other = headers | {name: headers[name].replace(now, then, 1)}
    assert not check.accepts(other, b"{}")
    # Beside the right one it is ignored, as during a rotation.
    if form == "stripe":
        assert check.accepts(headers | {name: f"{other[name]},{headers[name][13:]}"}, b"{}")


def test_signed_parts_that_no_header_has_are_those_of_standard_webhooks() -> None:
    form = {"preset": "custom", "header": "X-Acme-Signature", "content": "{timestamp}:{body}"}
    check = check_of(form, b"key")
    headers = request_of(CompatSetting().parse("compat", form), [b"key"], b"{}")
    assert check.accepts(headers, b"{}")
    assert not check.accepts(headers | {"webhook-timestamp": "1"}, b"{}")
    assert not check.accepts(headers | {"webhook-timestamp": "\udcff"}, b"{}")
    del headers["webhook-timestamp"]
    assert not check.accepts(headers, b"{}")


def test_parts_of_several_headers_must_agree() -> None:
    form = {
        "preset": "custom",
        "header": "X-Acme-Signature",
        "content": "{timestamp}:{body}",
        "value": "t={timestamp},s={signature}",
        "headers": {"X-Acme-Time": "{timestamp}"},
    }
    check = check_of(form, b"key")
    headers = request_of(CompatSetting().parse("compat", form), [b"key"], b"{}")
    assert check.accepts(headers, b"{}")
    assert not check.accepts(headers | {"x-acme-time": "1"}, b"{}")
    other = headers["x-acme-signature"].replace(str(AT), "1")
    assert not check.accepts(headers | {"x-acme-signature": other}, b"{}")


KEY = b"key"
HEADERS = (METHOD, "content-type", "authorization", "x-custom")


def comparison_of(*names: str) -> Comparison:
    return Comparison(dict.fromkeys(names, ComparedEndpoint(check_of("github", KEY), HEADERS)))


def total_of(comparison: Comparison) -> EndpointComparison:
    (total,) = comparison.finish().endpoints
    return total


def recorded(
    body: bytes,
    at: float = 0,
    event: str = "-",
    *,
    accepted: bool = True,
    headers: tuple[int, ...] = (1, 1, 1, 1),
) -> RecordedRequest:
    return RecordedRequest("acme", event, at, *hashes_of(body), headers, accepted)


def add_all(comparison: Comparison, side: Side, bodies: Iterable[bytes]) -> None:
    for body in bodies:
        comparison.add(side, recorded(body))


def test_requests_are_paired_by_their_bodies_in_their_order() -> None:
    comparison = comparison_of("acme")
    assert comparison.add("theirs", recorded(b"1", 1)) is None
    assert comparison.add("theirs", recorded(b"1", 2)) is None
    first = comparison.add("ours", recorded(b"1", 3, "a"))
    second = comparison.add("ours", recorded(b"1", 4, "b"))
    assert first is not None
    assert second is not None
    assert (first.theirs_at, first.ours_at, first.event) == (1, 3, "a")
    assert (second.theirs_at, second.ours_at, second.event) == (2, 4, "b")
    total = total_of(comparison)
    assert (total.same, total.differs) == (2, False)


def test_the_same_bytes_are_paired_before_equal_json() -> None:
    comparison = comparison_of("acme")
    add_all(comparison, "theirs", (b"[1, 2]", b"[1,2]"))
    add_all(comparison, "ours", (b"[1,2]", b"[ 1,2]"))
    total = total_of(comparison)
    assert (total.same, total.other_bytes, total.only_theirs) == (1, 1, 0)
    assert total.other_order == 1


def test_json_in_other_bytes_is_no_difference() -> None:
    """The database keeps JSON, and not its bytes."""
    comparison = comparison_of("acme")
    add_all(comparison, "theirs", [b'{"a":1,"b":2}'])
    add_all(comparison, "ours", [b'{"b": 2, "a": 1}'])
    total = total_of(comparison)
    assert (total.same, total.other_bytes, total.differs) == (0, 1, False)


def test_what_differs_is_counted_by_its_kind() -> None:
    comparison = comparison_of("acme")
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
        ("theirs", recorded(b"h", 10, headers=(1, 2, 1, 2))),
        ("ours", recorded(b"h", 11)),
    ]
    for side, request in sent:
        comparison.add(side, request)
    report = comparison.finish()
    (total,) = report.endpoints
    assert (total.same, total.other_bytes, total.theirs_refused, total.ours_refused) == (1, 1, 1, 1)
    assert (total.only_theirs, total.only_ours, total.other_order) == (1, 1, 0)
    assert total.other_headers == 1
    assert total.differs
    assert [min(filter(None, (each.theirs_at, each.ours_at))) for each in report.differences] == [
        *(1, 3, 5, 7, 8, 10)
    ]
    assert report.differences[-1].other_headers == ("content-type", "x-custom")


@pytest.mark.parametrize(
    ("theirs", "ours", "others"),
    [("1234", "1234", 0), ("1234", "4123", 3), ("1234", "2341", 1), ("12", "21", 1)],
)
def test_events_that_the_senders_sent_in_another_order_are_counted(
    theirs: str, ours: str, others: int
) -> None:
    comparison = comparison_of("acme")
    add_all(comparison, "theirs", (each.encode() for each in theirs))
    add_all(comparison, "ours", (each.encode() for each in ours))
    total = total_of(comparison)
    assert (total.other_order, total.same) == (others, len(ours) - others)
    assert total.differs == bool(others)


def test_a_refused_request_has_no_place_in_the_order() -> None:
    comparison = comparison_of("acme")
    add_all(comparison, "theirs", [b"1"])
    comparison.add("theirs", recorded(b"2", accepted=False))
    add_all(comparison, "ours", (b"2", b"1"))
    total = total_of(comparison)
    assert (total.other_order, total.same, total.theirs_refused) == (0, 1, 1)


def test_an_order_differs_exactly_if_two_events_are_swapped(rng: random.Random) -> None:
    """Requests of both senders arrive in any mixture."""
    for _ in range(200):
        orders: dict[Side, list[int]] = {}
        left: dict[Side, list[int]] = {}
        for side in ("theirs", "ours"):
            # Nearly sorted, so that both results occur.
            order = sorted(range(6), key=lambda n: n + rng.choice((0, 0, 0, 1.5)))
            orders[side], left[side] = order, list(order)
        comparison = comparison_of("acme")
        while any(left.values()):
            side = rng.choice([side for side in left if left[side]])
            add_all(comparison, side, [b"%d" % left[side].pop(0)])
        total = total_of(comparison)
        assert bool(total.other_order) == (orders["theirs"] != orders["ours"]), orders
        assert total.same + total.other_order == 6


@pytest.mark.parametrize("side", ["theirs", "ours"])
def test_an_endpoint_for_which_nothing_is_alike_differs(side: Side) -> None:
    comparison = comparison_of("acme")
    comparison.add(side, recorded(b"1", 1))
    assert total_of(comparison).differs


def test_an_endpoint_for_which_nothing_was_sent_is_listed_and_differs() -> None:
    comparison = comparison_of("globex", "acme")
    add_all(comparison, "theirs", [b"1"])
    add_all(comparison, "ours", [b"1"])
    report = comparison.finish()
    assert [(each.endpoint, each.is_silent, each.differs) for each in report.endpoints] == [
        ("acme", False, False),
        ("globex", True, True),
    ]
    assert report.differs


def test_forged_requests_are_counted_in_bounded_memory() -> None:
    comparison = comparison_of("acme")

    def forge(numbers: range) -> None:
        for n in numbers:
            for side in ("theirs", "ours"):
                comparison.add(side, recorded(b"%d" % n, accepted=False))

    forge(range(REFUSED_UNPAIRED_MAX))
    tracemalloc.start()
    try:
        forge(range(REFUSED_UNPAIRED_MAX, 10 * REFUSED_UNPAIRED_MAX))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 16 * 1024
    add_all(comparison, "theirs", [b"real"])
    add_all(comparison, "ours", [b"real"])
    report = comparison.finish()
    (total,) = report.endpoints
    assert total.theirs_refused == total.ours_refused == 10 * REFUSED_UNPAIRED_MAX
    assert (total.same, total.only_theirs, total.only_ours) == (1, 0, 0)
    assert report.differences == ()


def test_pairs_leave_nothing_behind_but_the_first_differences() -> None:
    comparison = comparison_of("acme")

    def send(numbers: range) -> None:
        for n in numbers:
            add_all(comparison, "theirs", [b"[%d]" % n])
            add_all(comparison, "ours", [b"[ %d]" % n])

    send(range(DIFFERENCES_MAX))
    tracemalloc.start()
    try:
        send(range(DIFFERENCES_MAX, 3 * DIFFERENCES_MAX))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 16 * 1024
    comparison.add("ours", recorded(b"alone"))
    report = comparison.finish()
    assert len(report.differences) == DIFFERENCES_MAX
    assert report.more_differences == 2 * DIFFERENCES_MAX + 1
    assert report.endpoints[0].other_bytes == 3 * DIFFERENCES_MAX


def test_a_request_with_a_counterpart_is_paired_when_no_other_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison_module, "UNPAIRED_MAX", 2)
    comparison = comparison_of("acme")
    add_all(comparison, "theirs", (b"1", b"2"))
    with pytest.raises(TooManyUnpaired):
        comparison.add("theirs", recorded(b"3"))
    comparison.add("theirs", recorded(b"forged", accepted=False))
    assert comparison.add("ours", recorded(b"1")) is not None
    assert comparison.add("theirs", recorded(b"3")) is None
    assert comparison.add("ours", recorded(b"forged")) is not None


@asynccontextmanager
async def session_at(
    endpoints: Mapping[str, ComparedEndpoint], seen: list[ComparedEvent]
) -> AsyncIterator[tuple[Comparison, aiohttp.ClientSession, str]]:
    comparison = Comparison(endpoints)
    async with (
        recording(comparison, Address("127.0.0.1", 0), seen.append) as at,
        aiohttp.ClientSession() as session,
    ):
        yield comparison, session, at.url


def signed(body: bytes, **headers: str) -> dict[str, str]:
    return request_of(CompatSetting().parse("compat", "github"), [KEY], body) | headers


@pytest.mark.system
async def test_method_content_type_and_configured_headers_are_compared() -> None:
    seen: list[ComparedEvent] = []
    endpoints = {"acme": ComparedEndpoint(check_of("github", KEY), HEADERS)}
    async with session_at(endpoints, seen) as (comparison, session, url):
        json, text = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
        own = {"Authorization": "Bearer a", "X-Custom": "1"}
        for ours, method in (({**own, **json, "User-Agent": "x"}, "POST"), (text, "PUT")):
            headers = signed(b"{}", **own, **json)
            await session.post(f"{url}theirs/acme?a=b", data=b"{}", headers=headers)
            headers = signed(b"{}", **ours)
            await session.request(method, f"{url}ours/acme", data=b"{}", headers=headers)
    first, second = seen
    assert first.is_same
    assert second.other_headers == HEADERS
    assert not second.is_same
    assert total_of(comparison).other_headers == 1


@pytest.mark.system
@pytest.mark.parametrize("name", ["acme.a{b}", "acme/a", "acme a%2F?#", "é"])
async def test_an_endpoint_is_found_by_its_encoded_name(name: str) -> None:
    seen: list[ComparedEvent] = []
    endpoints = {name: ComparedEndpoint(check_of("github", KEY), HEADERS)}
    async with session_at(endpoints, seen) as (_, session, url):
        for side in ("theirs", "ours"):
            at = URL(f"{url}{side}/{quote(name, safe='')}", encoded=True)
            assert (await session.post(at, data=b"{}", headers=signed(b"{}"))).status == 204
        at = URL(f"{url}ours/%ff", encoded=True)
        assert (await session.post(at, data=b"{}")).status == 404
    assert [each.endpoint for each in seen] == [name]


UUID_TEXT = str(UUID(int=7))


@pytest.mark.system
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (UUID_TEXT.encode(), UUID_TEXT),
        (b"evt_1-a:b", "evt_1-a:b"),
        (b"\xff", "-"),
        ("\u202e".encode(), "-"),
        (b"a" * 64, "a" * 64),
        (b"a" * 65, "-"),
        (b"a b", "-"),
    ],
)
async def test_only_an_id_of_an_event_is_kept(given: bytes, kept: str) -> None:
    seen: list[ComparedEvent] = []
    endpoints = {"acme": ComparedEndpoint(check_of("github", KEY), HEADERS)}
    async with session_at(endpoints, seen) as (comparison, _, url):
        body = b"[1]"
        signature = signed(body)["x-hub-signature-256"]
        head = b"X-Hub-Signature-256: %b\r\nX-Event-Id: %b\r\n" % (signature.encode(), given)
        host = URL(url)
        assert host.host is not None
        assert host.port is not None
        for side in (b"theirs", b"ours"):
            reader, writer = await asyncio.open_connection(host.host, host.port)
            writer.write(
                b"POST /%b/acme HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n"
                b"Connection: close\r\n\r\n%b" % (side, head, len(body), body)
            )
            assert (await reader.read()).startswith(b"HTTP/1.1 204")
            writer.close()
    assert [each.event for each in seen] == [kept]
    orjson.dumps([seen, comparison.finish()])


@pytest.mark.system
async def test_bodies_that_are_not_complete_have_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "BODIES_BYTES_MAX", 300)
    monkeypatch.setattr(recorder, "BODY_BYTES_MAX", 200)
    seen: list[ComparedEvent] = []
    endpoints = {"acme": ComparedEndpoint(check_of("github", KEY), HEADERS)}
    async with session_at(endpoints, seen) as (_, session, url):

        async def status_of(size: int) -> int:
            async with session.post(f"{url}theirs/acme", data=b"a" * size) as response:
                return response.status

        host = URL(url)
        slow = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host.host, host.port)
            writer.write(b"POST /theirs/acme HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n")
            writer.write(b"Content-Length: 150\r\n\r\n")
            # Its handler reads from here on.
            assert b"100" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"a" * 140)
            slow.append((reader, writer))
        statuses = [await status_of(201), await status_of(30)]
        assert statuses == [413, 503]
        for _, writer in slow:
            writer.write(b"a" * 10)
        for reader, writer in slow:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 204")
            writer.close()
        assert await status_of(30) == 204


def test_help_says_what_is_compared() -> None:
    text = " ".join((compare_command.help or "").split())
    assert "Path, query and other headers are not compared" in text


@pytest.mark.one_major
async def test_both_senders_are_compared_over_http(database: Database) -> None:
    """Ours is a relay; theirs signs as Svix does, once with another secret."""
    secret = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldY"
    seen: list[ComparedEvent] = []
    compat = CompatSetting().parse("compat", {"preset": "svix", "secret": secret})
    address = Address("127.0.0.1", free_port())
    own = {"X-Custom": "1"}
    name = "acme/a{b}"
    path = quote(name, safe="")
    async with database.at_hand() as db:
        settings = parse_one(
            {
                "name": name,
                "url": f"{address.url}ours/{path}",
                "format": "raw",
                "headers": own,
                "compat": {"preset": "svix", "secret": secret},
                "allow_networks": ["127.0.0.1"],
            }
        )
        await endpoint_changes.add_endpoint(db, "relay", settings, actor="test")
        comparison = Comparison(await read_compared(db, "relay", CLEAR))
        assert (await read_compared(db, "relay", CLEAR, [name])).keys() == {name}
        with pytest.raises(NotFound, match="globex"):
            await read_compared(db, "relay", CLEAR, [name, "globex"])
    transport = HttpTransport(EgressPolicy(["127.0.0.0/8"]))
    async with (
        recording(comparison, address, seen.append) as at,
        aclosing(transport),
        running(database, transport),
        aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as theirs,
    ):
        await publish(database, {"n": 1}, {"n": 2}, {"n": 3}, type="invoice.paid")
        for body, key, more in (
            (b'{"n": 1}', compat.decode(secret), own),
            (b'{"n": 2}', b"another", own),
            (b'{"n": 3}', compat.decode(secret), {}),
        ):
            headers = request_of(compat, [key], body) | more
            url = URL(f"{at.url}theirs/{path}", encoded=True)
            assert (await theirs.post(url, data=body, headers=headers)).status == 204
        elsewhere = f"{at.url}theirs/globex"
        assert (await theirs.post(elsewhere, data=b"{}")).status == 404
        await until(lambda: len(seen) == 3, what="all events from both senders")
    first, second, third = sorted(seen, key=lambda event: event.theirs_at or 0)
    assert (first.same_bytes, first.other_headers) == (True, ())
    assert (second.same_bytes, second.theirs_accepted, second.ours_accepted) == (True, False, True)
    assert third.other_headers == ("x-custom",)
    total = total_of(comparison)
    assert (total.theirs_refused, total.other_headers) == (1, 1)


@pytest.mark.one_major
async def test_compare_without_a_compat_signature_says_what_to_do(database: Database) -> None:
    ended = await outbox("adopt", "compare", "--for", "1s", env={"OUTBOX_DSN": database.dsn})
    assert ended.code == 2
    assert "no endpoint has a compat signature; see outbox endpoint import" in ended.stderr


@pytest.mark.system
@pytest.mark.parametrize("given", ["nohost", "127.0.0.1:99999", "::1:80"])
async def test_an_address_that_is_none_is_one_line(given: str) -> None:
    ended = await outbox("adopt", "compare", "--listen", given)
    assert ended.code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f'outbox: --listen: "{given}"')


@pytest.mark.one_major
async def test_a_silent_endpoint_fails_the_comparison(database: Database) -> None:
    async with database.at_hand() as db:
        compat = {"preset": "github", "secret": "It's a Secret to Everybody"}
        for name in ("hub", "not-compared"):
            values = {"name": name, "url": "https://a.example/", "format": "raw", "compat": compat}
            await endpoint_changes.add_endpoint(db, "relay", parse_one(values), actor="test")
    words = ("--listen", f"127.0.0.1:{free_port()}", "--for", "0.1s", "--only", "hub")
    ended = await outbox("adopt", "compare", *words, env={"OUTBOX_DSN": database.dsn})
    assert ended.code == 1
    assert ended.stdout.splitlines()[-3:] == [
        "! hub: nothing was sent",
        "",
        "they differ; compared: body, signature, method, content-type, configured headers, order; "
        "not compared: path, query, other headers",
    ]
