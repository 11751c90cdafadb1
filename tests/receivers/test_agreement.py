"""Each language's order check and verification agree with those of Python, for any input."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.ed25519 import parse_private_key
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import SignatureError, TimestampRefused, parse_secret
from outbox.core.model.headers import parse_lines
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.receiver.lane_order import LaneOrder
from outbox.receiver.message import BadMessage
from outbox.receiver.verification import verify
from outbox.testing.sender import SECRET, FakeSender
from tests.core.test_message_formats import BATCHED, FORMATS, NOW, PLAIN, deliveries, sent
from tests.receiver.test_edge_values import EDGES, REFUSED
from tests.receivers.programs import LineProgram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.model.delivery import Delivery
    from outbox.receiver.lane_order import Observation
    from tests.receivers.programs import Language

pytestmark = [pytest.mark.one_major, pytest.mark.together("receivers")]

ROUNDED_BY_JAVASCRIPT = {
    "2^53 + 1",
    "the largest signed integer of 64 bits",
    "the largest integer of 64 bits",
    # A double holds it, and prints other digits.
    "one more",
    "one below the smallest integer of 64 bits",
    "a long negative integer",
    "an integer of 30 digits",
    "an integer of 309 digits",
    "an integer of 4,300 digits",
    "a number in a member",
}
"""Payloads that are exact in Python, and refused in JavaScript."""
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

# ------------------------------------------------------------------ the order check

# Near each other, so that operations concern the same numbers; and the largest ones.
numbers = st.integers(1, 12) | st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**63 - 2, 2**63 - 1])


@st.composite
def ranges(draw: st.DrawFn) -> list[int]:
    ends = draw(st.lists(numbers, min_size=2, max_size=2))
    return sorted(ends)


@st.composite
def operations(draw: st.DrawFn) -> list[Any]:
    kind = draw(st.sampled_from(["observe", "observe", "observe", "close", "progress", "unav"]))
    number = draw(numbers)
    if kind == "observe":
        previous = draw(st.integers(max(0, number - 4), number - 1) | st.just(0))
        return ["observe", number, previous, draw(st.integers(0, 9)) == 0]
    if kind == "close":
        return ["close", number]
    if kind == "progress":
        return ["progress", number, draw(st.lists(ranges(), max_size=2))]
    return ["unavailable", *draw(ranges())]


def applied(operation: list[Any], order: LaneOrder) -> Any:
    """The result of Python's order check."""
    match operation:
        case ["observe", sequence, previous, lane_ends]:
            return as_json(order.observe(sequence, previous, lane_ends=lane_ends))
        case ["close", sequence]:
            return order.close(sequence)
        case ["progress", sequence, dead_lettered]:
            return order.apply_progress(sequence, [(lo, hi) for lo, hi in dead_lettered])
        case ["unavailable", lo, hi]:
            return order.mark_unavailable(lo, hi)
    raise AssertionError(operation)


def as_json(observed: Observation) -> dict[str, Any]:
    return {
        "kind": observed.kind,
        "missing": observed.missing,
        "holes": observed.holes,
        "was": observed.was,
        "lost": observed.lost,
    }


def plain(value: Any) -> Any:
    """As JSON has it."""
    return orjson.loads(orjson.dumps(value))


@pytest.fixture(scope="session")
def order(language: Language) -> Iterator[LineProgram]:
    program = LineProgram(language, "order")
    yield program
    program.close()


@pytest.mark.slow
@FIXTURES
@given(from_start=st.booleans(), steps=st.lists(operations(), max_size=14))
def test_the_order_check_agrees(
    order: LineProgram, from_start: bool, steps: list[list[Any]]
) -> None:
    lane = LaneOrder(from_start=from_start)
    results = [applied(step, lane) for step in steps]
    found = order.exchange({"from_start": from_start, "operations": steps})
    assert found["results"] == plain(results)
    state = lane.to_state()
    assert found["state"] == plain(
        {
            "high": state.high,
            "ended": state.ended,
            "missing": state.missing,
            "holes": state.holes,
            "unknown": state.unknown,
        }
    )


@pytest.mark.slow
def test_the_ranges_of_a_lane_are_bounded_alike(order: LineProgram) -> None:
    steps: list[list[Any]] = [["observe", 3 * n + 3, 3 * n + 2, False] for n in range(1100)]
    lane = LaneOrder()
    results = [applied(step, lane) for step in steps]
    found = order.exchange({"from_start": False, "operations": steps})
    assert found["results"] == plain(results)
    assert found["state"]["missing"] == plain(lane.to_state().missing)
    assert found["state"]["unknown"] == plain(lane.to_state().unknown)


# ------------------------------------------------------------------ verification


@pytest.fixture(scope="session")
def verifier(language: Language) -> Iterator[LineProgram]:
    program = LineProgram(language, "verify")
    yield program
    program.close()


def by_python(
    headers: list[tuple[str, str]], body: bytes, secrets: list[str], **options: Any
) -> dict[str, Any]:
    """What Python reads, in the form of the program."""
    try:
        verified = verify(headers, body, secrets, now=NOW, **options)
    except SignatureError as error:
        return {"error": "timestamp" if isinstance(error, TimestampRefused) else "signature"}
    except BadMessage:
        return {"error": "message"}
    messages = [
        {
            "delivery_id": each.delivery_id,
            "event_id": each.event_id,
            "type": each.type,
            "timestamp": each.timestamp,
            "tenant": each.tenant,
            "key": each.key,
            "lane": each.lane,
            "sequence": each.sequence,
            "previous_sequence": each.previous_sequence,
            "replay_of": each.replay_of,
            "backfill": each.backfill,
            "lane_ends": each.lane_ends,
            "format": each.format,
            "content_type": each.content_type or None,  # Go has "" for both.
            "data_text": each.data_text,
            "data": {"base64": base64.b64encode(each.data).decode()}
            if each.data_text is None and each.data is not None
            else None,
        }
        for each in verified.messages
    ]
    return dict(plain({"messages": messages}))


def by_program(
    program: LineProgram,
    headers: list[tuple[str, str]],
    body: bytes,
    secrets: list[str],
    *,
    formats: list[str] | None = None,
    header_prefix: str = "X-",
) -> dict[str, Any]:
    found: dict[str, Any] = program.exchange(
        {
            "headers": dict(headers),
            "body": base64.b64encode(body).decode(),
            "secrets": secrets,
            "formats": formats,
            "header_prefix": header_prefix,
            "now": NOW,
        }
    )
    found.pop("text", None)
    for message in found.get("messages", ()):
        message.pop("refused", None)
    return found


@pytest.mark.slow
@FIXTURES
@given(
    delivery=deliveries(),
    name=st.sampled_from(FORMATS),
    lane_ends=st.booleans(),
    prefix=st.sampled_from(["X-", "Acme-"]),
    formats=st.none() | st.lists(st.sampled_from(FORMATS), min_size=1, max_size=2),
)
def test_a_delivery_is_read_alike(
    verifier: LineProgram,
    delivery: Delivery,
    name: FormatName,
    lane_ends: bool,
    prefix: str,
    formats: list[FormatName] | None,
) -> None:
    headers, body = sent(delivery, name, lane_ends=lane_ends, prefix=prefix)
    options: dict[str, Any] = {"formats": formats, "header_prefix": prefix}
    expected = by_python(headers, body, [SECRET], **options)
    assert formats is not None or "messages" in expected
    assert by_program(verifier, headers, body, [SECRET], **options) == expected


def test_the_text_of_a_payload_at_the_edge_is_read_alike(
    verifier: LineProgram, language: Language
) -> None:
    """And where a language rounds numbers, it refuses what it would round."""
    wrong = []
    for name in FORMATS:
        for edge, (text, expected) in EDGES.items():
            if name == "thin":
                continue
            headers, body = sent(PLAIN._replace(payload=text.encode()), name)
            given = {
                "headers": dict(headers),
                "body": base64.b64encode(body).decode(),
                "secrets": [SECRET],
                "now": NOW,
            }
            (message,) = verifier.exchange(given)["messages"]
            if message["data_text"] != text:
                wrong.append(f"{name}, {edge}: {message['data_text'][:60]}")
            is_refused = message.get("refused") is not None
            must_be = expected is REFUSED or edge in ROUNDED_BY_JAVASCRIPT
            if language.name == "typescript" and is_refused is not must_be:
                wrong.append(f"{name}, {edge}: {message['refused']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@FIXTURES
@given(delivery=deliveries(), name=st.sampled_from(FORMATS), data=st.data())
def test_a_forgery_is_refused_alike(
    verifier: LineProgram, delivery: Delivery, name: FormatName, data: st.DataObject
) -> None:
    headers, body = sent(delivery, name)
    what = data.draw(st.sampled_from(["body", "header", "removed", "time", "secret"]))
    secrets = [SECRET]
    if what == "body":
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.binary(min_size=1, max_size=2)) + body[at:]
    elif what == "removed":
        del headers[data.draw(st.integers(0, len(headers) - 1))]
    elif what == "secret":
        secrets = ["whsec_" + base64.b64encode(b"another secret of the test").decode()]
    else:
        n = data.draw(st.integers(0, len(headers) - 1))
        if what == "time":
            n = [each for each, _ in headers].index("webhook-timestamp")
        header, value = headers[n]
        at = data.draw(st.integers(0, len(value)))
        other = data.draw(st.characters(min_codepoint=33, max_codepoint=126))
        headers[n] = (header, value[:at] + other + value[at + 1 :])
    expected = by_python(headers, body, secrets)
    assert by_program(verifier, headers, body, secrets) == expected


@pytest.mark.slow
@FIXTURES
@given(some=st.lists(deliveries(), min_size=1, max_size=4), name=st.sampled_from(BATCHED))
def test_a_batch_is_read_alike(
    verifier: LineProgram, some: list[Delivery], name: FormatName
) -> None:
    batch = [each._replace(seq=n) for n, each in enumerate(some, 2)]
    prepared = prepare_batch(batch, 1, message_format=MessageFormat(name, "/shop"))
    lines = prepared.attempt(1, NOW, [parse_secret(SECRET)])
    headers = list(parse_lines(lines))
    expected = by_python(headers, prepared.body, [SECRET])
    assert len(expected["messages"]) == len(some)
    assert by_program(verifier, headers, prepared.body, [SECRET]) == expected


MEMBERS = [
    "id",
    "type",
    "timestamp",
    "tenant",
    "key",
    "lane",
    "sequence",
    "previous_sequence",
    "replay_of",
    "backfill",
    "lane_ends",
    "data",
    "data_base64",
    "content_type",
    "specversion",
]
ODD_VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**53 + 1, 2**63, 1.0, "", "a\0", "x", [], {}, "1.0", "AA==",
    {"lane": "l", "sequence": 3}, {"lane": 5},
]  # fmt: skip


@FIXTURES
@given(
    change=st.dictionaries(st.sampled_from(MEMBERS), st.sampled_from(ODD_VALUES), max_size=3),
    removed=st.sets(st.sampled_from(["id", "type", "lane", "sequence", "data", "timestamp"])),
)
@example(change={"data_base64": "", "content_type": ""}, removed=set())
@example(change={"content_type": ""}, removed={"data"})
def test_a_malformed_envelope_is_read_alike(
    verifier: LineProgram, change: dict[str, Any], removed: set[str]
) -> None:
    sender = FakeSender(SECRET, clock=lambda: float(NOW))
    request = sender.event("a.b", {"n": 1}, key="k")
    members = {k: v for k, v in orjson.loads(request.body).items() if k not in removed} | change
    body = orjson.dumps({k: v for k, v in members.items() if v is not None or k == "data"})
    headers = dict(request.headers)
    headers = resigned(headers, body)
    pairs = list(headers.items())
    assert by_program(verifier, pairs, body, [SECRET]) == by_python(pairs, body, [SECRET])


def resigned(headers: dict[str, str], body: bytes) -> dict[str, str]:
    """The headers with a signature of another body."""
    from outbox.core.messages.signature import sign

    signature = sign(
        parse_secret(SECRET), headers["webhook-id"], int(headers["webhook-timestamp"]), body
    )
    return headers | {"webhook-signature": signature}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_an_asymmetric_signature_is_verified(verifier: LineProgram, name: FormatName) -> None:
    key = parse_private_key("whsk_" + base64.b64encode(bytes(range(32))).decode())
    prepared = prepare(PLAIN, 4, message_format=MessageFormat(name))
    headers = list(parse_lines(prepared.attempt(1, NOW, [key, parse_secret(SECRET)])))
    alone = list(parse_lines(prepared.attempt(1, NOW, [key])))
    other = parse_private_key("whsk_" + base64.b64encode(bytes(32)).decode()).public_text
    for pairs, secrets in (
        (headers, [key.public_text]),
        (headers, [SECRET]),
        (alone, [SECRET, key.public_text]),
    ):
        expected = by_python(pairs, prepared.body, secrets)
        assert "messages" in expected
        assert by_program(verifier, pairs, prepared.body, secrets) == expected
    for secrets in ([SECRET], [other]):
        assert by_program(verifier, alone, prepared.body, secrets) == {"error": "signature"}
    changed = prepared.body + b" "
    assert by_program(verifier, alone, changed, [key.public_text]) == {"error": "signature"}
