"""No number of a payload is rounded in silence: it is exact, or refused with a way on."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from typing import Any, get_args

import pytest

from outbox.core.brokers.message import messages_of
from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.signature import format_secret
from outbox.core.model.headers import parse_lines
from outbox.core.model.message_format import UNBATCHED, FormatName, MessageFormat
from outbox.receiver import (
    BadMessage,
    MemoryDatabase,
    Receiver,
    Request,
    UnreadablePayload,
    Verifier,
    read_message,
    verify,
)
from tests.receiver.deliveries import DAY, SECRET, delivery, signed
from tests.receiver.streams.rigs import Settings

TEXT = format_secret(SECRET)
REFUSED: Any = object()
FORMATS = [name for name in get_args(FormatName) if name != "thin"]
DEEP = "[" * 5000 + "]" * 5000

EDGES: dict[str, tuple[str, Any]] = {
    "2^53 + 1": ("9007199254740993", 9007199254740993),
    "the largest signed integer of 64 bits": (str(2**63 - 1), 2**63 - 1),
    "the largest integer of 64 bits": (str(2**64 - 1), 2**64 - 1),
    "one more": (str(2**64), 2**64),
    "one below the smallest integer of 64 bits": (str(-(2**63) - 1), -(2**63) - 1),
    "an integer of 30 digits": ("1" * 30, int("1" * 30)),
    "an integer of 309 digits": ("9" * 309, int("9" * 309)),
    "an integer of 4,300 digits": ("9" * 4300, int("9" * 4300)),
    "an integer of 5,000 digits": ("9" * 5000, REFUSED),
    "a short decimal": ("0.1", 0.1),
    "a decimal with zeros at its end": ("12.50", 12.5),
    "the sum of two floats": ("0.30000000000000004", 0.1 + 0.2),
    "an average of PostgreSQL": ("3.3333333333333333", REFUSED),
    "a float with 17 digits, as of C, PHP and .NET": ("0.10000000000000001", 0.1),
    "an exact decimal of 18 digits": ("100000000000000000.0", 1e17),
    "a decimal of 25 digits": ("1234567890123456.123456789", REFUSED),
    "a small decimal of 18 digits": ("0.0000000000000000123456789012345678", REFUSED),
    "a number of 400 digits before the point": ("9" * 400 + ".5", REFUSED),
    "a decimal that a float makes zero": ("0." + "0" * 400 + "1", REFUSED),
    "a UUID with an exponent in it": (
        '"0d0a2e3e-1234-4000-8000-000000000000"', "0d0a2e3e-1234-4000-8000-000000000000"),
    "a long text of digits": ('"12345678901234567890"', "12345678901234567890"),
    "a date of digits and points": ('"2026.01.31.00.00.00.000"', "2026.01.31.00.00.00.000"),
    "a long negative integer": ("-9223372036854775809", -(2**63) - 1),
    "an exponent": ("1.5e+30", 1.5e30),
    "an exponent above a float's": ("1e400", REFUSED),
    "an exponent below a float's": ("1e-400", REFUSED),
    "a capital exponent below a float's": ("-1E-0400", REFUSED),
    "zero with an exponent": ("0e-999", 0.0),
    "a negative zero": ("-0.0", -0.0),
    "numbers in a string": ('"1234567890123456.123456789 1e400"',) * 2,
    "numbers beside a string": ('["\\"", 1234567890123456.123456789, "]"]', REFUSED),
    "a name that is a number": ('{"12345678901234567890123": 1}', {"12345678901234567890123": 1}),
    "a number in a member": ('{"a":[{"b":12345678901234567890123}]}',
                             {"a": [{"b": 12345678901234567890123}]}),
    "1,000 levels": ("[" * 1000 + "]" * 1000, "1,000 levels"),
    "5,000 levels": (DEEP, REFUSED),
    "5,000 levels in a member": ('{"a":"\\\\\\"[","b":' + DEEP + "}", REFUSED),
    "brackets in a string": ('"' + "[" * 5000 + '"', "[" * 5000),
}  # fmt: skip
"""Texts of payloads: the value that the receiver gives a handler, or REFUSED."""
EDGES["numbers in a string"] = (EDGES["numbers in a string"][0], "1234567890123456.123456789 1e400")

exactly = partial(json.loads, parse_float=Decimal, parse_int=Decimal)


def levels(value: Any) -> int:
    """The levels of a list in lists."""
    count = 0
    while isinstance(value, list):
        count += 1
        value = value[0] if value else None
    return count


def attempt(name: FormatName, text: str, **options: Any) -> Any:
    """The message that a verifier reads of a delivery with this payload."""
    headers, body = signed(delivery(7, payload=text.encode()), format_name=name)
    (message,) = verify(headers, body, TEXT, **options).messages
    return message


def test_a_payload_is_exact_or_refused_in_every_format() -> None:
    wrong = []
    for format_name in FORMATS:
        for name, (text, expected) in EDGES.items():
            message = attempt(format_name, text)
            if message.data_text != text:
                wrong.append(f"{format_name}, {name}: data_text {str(message.data_text)[:60]}")
            try:
                data = message.data
            except UnreadablePayload as error:
                if expected is not REFUSED:
                    wrong.append(f"{format_name}, {name}: {error}")
                elif not ("parse=" in str(error) and "data_text" in str(error)):
                    wrong.append(f"{format_name}, {name}: no way on: {error}")
                elif len(str(error)) > 300:
                    wrong.append(f"{format_name}, {name}: {len(str(error))} characters")
                continue
            if expected == "1,000 levels":
                # A comparison of such a value is recursive.
                assert levels(data) == 1000
            elif expected is REFUSED or data != expected or type(data) is not type(expected):
                wrong.append(f"{format_name}, {name}: {str(data)[:60]}")
    assert not wrong, "\n".join(wrong)


def test_every_payload_of_a_batch_is_read_alone() -> None:
    for format_name in set(FORMATS) - set(UNBATCHED):
        batch = [
            delivery(n, payload=text.encode()) for n, (text, _) in enumerate(EDGES.values(), 1)
        ]
        prepared = prepare_batch(batch, 0, message_format=MessageFormat(format_name))
        lines = prepared.attempt(1, int(DAY.timestamp()), [SECRET])
        read = verify(parse_lines(lines), prepared.body, TEXT, now=DAY.timestamp()).messages
        wrong = []
        for message, (name, (text, expected)) in zip(read, EDGES.items(), strict=True):
            assert message.data_text == text, name
            try:
                _ = message.data
                is_refused = False
            except UnreadablePayload:
                is_refused = True
            if is_refused is not (expected is REFUSED):
                wrong.append(name)
        assert not wrong, wrong


def test_parse_reads_what_the_default_refuses() -> None:
    for format_name in FORMATS:
        for name, (text, expected) in EDGES.items():
            if "levels" in name:
                continue
            data = attempt(format_name, text, parse=exactly).data
            assert data == exactly(text), (format_name, name)
            if expected is REFUSED and isinstance(data, Decimal):
                # Not its value, as a text of another length: the same digits.
                assert data.compare_total(Decimal(text)) == 0, name


def test_messages_of_a_stream_are_read_alike() -> None:
    (sent,) = messages_of(Settings(), [delivery(7, payload=b"1e400")], 6)
    message = read_message(dict(sent.headers), sent.body)
    assert message is not None
    with pytest.raises(UnreadablePayload, match="1e400"):
        _ = message.data
    message = read_message(dict(sent.headers), sent.body, parse=Decimal)
    assert message is not None
    assert message.data == Decimal("1e400")


@pytest.mark.parametrize(
    "body", [b'{"id":', b'{"data":[}', b'{"data":"\\', b'{"data":"\\ud800"}', b'{"data":1e400}x']
)
def test_what_is_not_json_is_no_delivery(body: bytes) -> None:
    (sent,) = messages_of(Settings(), [delivery(7, payload=b"1e400")], 6)
    with pytest.raises(BadMessage):
        read_message(dict(sent.headers), body)
    with pytest.raises(BadMessage):
        read_message(dict(sent.headers), sent.body[:-1])


async def test_the_receiver_responds_422_and_says_what_to_do() -> None:
    database = MemoryDatabase()
    receiver = Receiver(TEXT, database)
    seen: list[Any] = []
    receiver.on("order.paid")(lambda message, _: seen.append(message.data))

    @receiver.on("order.noted")
    def noted(message: Any, _: Any) -> None:
        seen.append(message.data_text)

    def send(sequence: int, kind: str, text: str) -> Any:
        headers, body = signed(delivery(sequence, type=kind, payload=text.encode()))
        return receiver.handle(Request("POST", headers, body))

    response = send(1, "order.paid", '{"total":1234567890123456.123456789}')
    assert response.status == 422
    assert "1234567890123456.123456789" in response.text
    assert "parse=" in response.text
    assert seen == []
    # A handler that reads the text is not refused.
    assert send(1, "order.noted", "1e400").status == 200
    assert send(2, "order.paid", str(2**64)).status == 200
    assert seen == ["1e400", 2**64]


def test_an_error_of_parse_is_a_refusal_if_the_payload_is_the_cause() -> None:
    statuses = []
    for error in (ValueError("no order"), KeyError("a bug")):

        def parse(_: str, error: Exception = error) -> Any:
            raise error

        receiver = Receiver(TEXT, MemoryDatabase(), parse=parse)
        receiver.on("**")(lambda message, _: message.data)
        headers, body = signed(delivery(1))
        response = receiver.handle(Request("POST", headers, body))
        statuses.append((response.status, "no order" in response.text))
    assert statuses == [(422, True), (500, False)]


def test_the_payload_is_parsed_once_and_only_when_it_is_read() -> None:
    calls = []

    def parse(text: str) -> Any:
        calls.append(text)
        return json.loads(text)

    headers, body = signed(delivery(7))
    (message,) = Verifier(TEXT, parse=parse).verify(headers, body).messages
    assert calls == []
    assert message.data is message.data
    assert calls == ['{"n": 7}']
    assert message.data_text == '{"n": 7}'


def test_other_payloads_have_no_text() -> None:
    for name in ("envelope", "raw", "cloudevents", "cloudevents-binary"):
        given = delivery(7, payload=b"\xff", content_type="image/png")
        headers, body = signed(given, format_name=name)
        (message,) = verify(headers, body, TEXT, parse=json.loads).messages
        assert (message.data, message.data_text) == (b"\xff", None), name
    headers, body = signed(delivery(7), format_name="thin")
    (message,) = verify(headers, body, TEXT, parse=json.loads).messages
    assert (message.data, message.data_text) == (None, None)
