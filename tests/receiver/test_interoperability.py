"""Signatures are interoperable with the Standard Webhooks libraries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from outbox.core.messages.signature import SignatureError, format_secret
from outbox.errors import CannotRun
from outbox.receiver import verify
from outbox.testing import sign
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed
from tests.support.tiers import sampled
from tests.support.webhooks import Npm, Peer, Pypi, ToSign, ToVerify

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.system

TEXT, ANOTHER = format_secret(SECRET), format_secret(OTHER)
ID = "msg_1"
BODY = '{"type":"order.paid","data":{"a":"é\\u2028 🛒"}}'.encode()


@pytest.fixture(scope="session", params=sampled([Pypi, Npm]), ids=["pypi", "npm"])
def peer(request: pytest.FixtureRequest) -> Peer:
    try:
        return request.param()
    except CannotRun as error:
        pytest.skip(str(error))


def we_accept(what: Iterable[ToVerify]) -> list[bool]:
    def accepts(each: ToVerify) -> bool:
        try:
            verify(each.headers, each.body, each.secret)
        except SignatureError:
            return False
        return True

    return [accepts(each) for each in what]


@pytest.mark.slow
def test_signatures_are_interoperable_both_ways(peer: Peer, rng: random.Random) -> None:
    now = int(time.time())
    alphabet = 'aä"\\\n\0€🛒\ufeff\u2028 '
    asked = [
        ToSign(
            format_secret(rng.randbytes(rng.randint(24, 64))),
            f"msg_{rng.getrandbits(64):x}",
            now - rng.randint(-200, 200),
            "".join(rng.choices(alphabet, k=rng.randint(0, 200))).encode(),
        )
        for _ in range(200)
    ]
    ours = [sign(each.secret, each.id, each.body, timestamp=each.timestamp) for each in asked]
    foreign = [
        mine | {"webhook-signature": signature}
        for mine, signature in zip(ours, peer.signed(asked), strict=True)
    ]
    for headers, accepts in ((ours, peer.accepts), (foreign, we_accept)):
        requests = [
            ToVerify(each.secret, its, each.body) for each, its in zip(asked, headers, strict=True)
        ]
        assert all(accepts(requests))


def test_other_libraries_verify_relay_deliveries(peer: Peer) -> None:
    requests = [signed(delivery(seq, payload=b'{"a": "\xc3\xa9"}')) for seq in range(1, 4)]
    asked = [ToVerify(TEXT, dict(headers), body) for headers, body in requests]
    assert peer.accepts(asked) == we_accept(asked) == [True] * 3


class Case(NamedTuple):
    """A request, and whether it must be accepted."""

    name: str
    headers: dict[str, str]
    accepted: bool = False
    body: bytes = BODY
    secret: str = TEXT


def cases() -> Iterator[Case]:
    now = int(time.time())

    def at(timestamp: int) -> dict[str, str]:
        return sign(TEXT, ID, BODY, timestamp=timestamp)

    good, wrong = at(now), sign(ANOTHER, ID, BODY, timestamp=now)["webhook-signature"]
    right = good["webhook-signature"]

    def signature(value: str) -> dict[str, str]:
        return good | {"webhook-signature": value}

    def time_stamp(value: str) -> dict[str, str]:
        return good | {"webhook-timestamp": value}

    yield Case("as it was sent", good, True)
    yield Case("names in capitals", {k.upper(): v for k, v in good.items()}, True)
    yield Case("an empty body", sign(TEXT, ID, b""), True, body=b"")
    yield Case("no JSON", sign(TEXT, ID, b"\n{"), True, body=b"\n{")
    yield Case("secret: another", good, secret=ANOTHER)
    yield Case("secret: without its prefix", good, True, secret=TEXT.removeprefix("whsec_"))
    yield Case("body: changed", good, body=BODY.replace(b"paid", b"Paid"))
    yield Case("body: longer", good, body=BODY + b"\n")
    yield Case("body: gone", good, body=b"")
    yield Case("id: another", good | {"webhook-id": "msg_2"})
    yield Case("time: 240 s ago", at(now - 240), True)
    yield Case("time: in 240 s", at(now + 240), True)
    yield Case("time: 360 s ago", at(now - 360))
    yield Case("time: in 360 s", at(now + 360))
    yield Case("time: another", time_stamp(str(now - 1)))
    yield Case("time: no number", time_stamp("now"))
    yield Case("time: not a number", time_stamp("NaN"))
    yield Case("time: without end", time_stamp("Infinity"))
    yield Case("time: too large", time_stamp("9" * 400))
    yield Case("time: below nought", time_stamp(f"-{now}"))
    yield Case("time: milliseconds", time_stamp(f"{now}000"))
    for name in good:
        yield Case(f"{name}: missing", {k: v for k, v in good.items() if k != name})
        yield Case(f"{name}: empty", good | {name: ""})
    yield Case("signature: right one last", signature(f"{wrong} {right}"), True)
    yield Case("signature: right one first", signature(f"{right} {wrong}"), True)
    yield Case("signature: unknown ones before", signature(f"v2,xx v1a,{'A' * 86}== {right}"), True)
    yield Case("signature: none right", signature(f"{wrong} {wrong}"))
    yield Case("signature: of an unknown version", signature(right.replace("v1,", "v2,")))
    yield Case("signature: of another kind", signature(right.replace("v1,", "v1a,")))
    yield Case("signature: without a version", signature(right.removeprefix("v1,")))
    yield Case("signature: nothing but a version", signature("v1,"))
    yield Case("signature: not even a comma", signature("v1"))
    yield Case("signature: cut", signature(right[:-4]))
    yield Case("signature: in hexadecimal", signature("v1," + "0" * 64))
    yield Case("signature: with another separator", signature(f"{wrong},{right}"))


def asked_of(table: Iterable[Case]) -> list[ToVerify]:
    return [ToVerify(each.secret, each.headers, each.body) for each in table]


def results(table: Iterable[Case], output: Iterable[bool]) -> dict[str, bool]:
    return {each.name: accepted for each, accepted in zip(table, output, strict=True)}


@pytest.mark.slow
def test_all_libraries_refuse_invalid_requests(peer: Peer) -> None:
    table = list(cases())
    expected = results(table, [each.accepted for each in table])
    assert len(expected) == len(table)
    assert results(table, we_accept(asked_of(table))) == expected
    assert results(table, peer.accepts(asked_of(table))) == expected


def test_differences_to_other_libraries_are_stricter_checks(peer: Peer) -> None:
    """Several texts would mean the same time, and a full stop separates the signed parts."""
    good = sign(TEXT, ID, BODY)
    stricter = [
        Case(
            "a time with a fraction", good | {"webhook-timestamp": good["webhook-timestamp"] + ".5"}
        ),
        Case("a time after a space", good | {"webhook-timestamp": " " + good["webhook-timestamp"]}),
        Case("an id with a full stop", sign(TEXT, "msg.1", BODY)),
    ]
    assert not any(we_accept(asked_of(stricter)))
    assert results(stricter, peer.accepts(asked_of(stricter))) == {e.name: True for e in stricter}
