"""Positions as text: exact, and refused if a character differs."""

from __future__ import annotations

import dataclasses
import string
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from hashlib import sha256
from itertools import accumulate, pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model.position import POSITION_CHARS_MAX, Position, encode, parse_position
from outbox.errors import UsageError

ALPHABET = f"{string.ascii_letters}{string.digits}-_"
INT64_MAX = (1 << 63) - 1
AT = datetime(2027, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
POSITION = Position(UUID(int=7), 3, 41, 1000, AT, ((5, 5), (998, 999), (1002, 1300)))

numbers = st.integers(0, INT64_MAX)
# Distances between ids: the ends of ranges that neither overlap nor touch.
ranges = st.lists(st.integers(2, 1 << 40), max_size=40).map(
    lambda steps: tuple(
        (lo, hi - 2) for lo, hi in list(pairwise(accumulate(steps, initial=1)))[::2]
    )
)
positions = st.builds(
    Position,
    st.uuids(),
    numbers,
    numbers,
    numbers,
    st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)),
    ranges,
)


def content_of(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))[:-4]


def text_of(content: bytes) -> str:
    """A text with a right checksum."""
    return urlsafe_b64encode(content + sha256(content).digest()[:4]).decode().rstrip("=")


@given(positions)
def test_a_position_is_parsed_from_its_text(position: Position) -> None:
    text = encode(position)
    assert set(text) <= set(ALPHABET)
    assert parse_position(text) == position


@given(positions, st.data())
def test_a_changed_character_is_refused(position: Position, data: st.DataObject) -> None:
    text = encode(position)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(ALPHABET.replace(text[place], "")))
    with pytest.raises(ValueError, match=r"^position: [^\n]+$"):
        parse_position(text[:place] + other + text[place + 1 :])


@given(positions, st.data())
def test_a_text_that_is_cut_off_is_refused(position: Position, data: st.DataObject) -> None:
    text = encode(position)
    with pytest.raises(ValueError, match=r"^position: "):
        parse_position(text[: data.draw(st.integers(0, len(text) - 1))])


@given(st.text(max_size=100) | st.text(ALPHABET, max_size=100))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^position: [^\n]+$"):
        parse_position(text)


@given(st.binary(max_size=60))
def test_numbers_that_are_no_position_are_refused_or_have_this_text_only(content: bytes) -> None:
    text = text_of(b"\x01" + content)
    try:
        position = parse_position(text)
    except UsageError:
        return
    assert encode(position) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "altered or cut off", id="empty"),
        pytest.param("a b", "base64url", id="a space"),
        pytest.param(f"{encode(POSITION)}\n", "base64url", id="a line break"),
        pytest.param(f"{encode(POSITION)}=", "base64url", id="padding"),
        pytest.param("A" * (POSITION_CHARS_MAX + 1), "longer than 65536", id="too long"),
        pytest.param(text_of(b"\x02" + bytes(30)), "another version", id="a later version"),
        pytest.param(text_of(b"\x01" + bytes(10)), "numbers", id="half an incarnation"),
        pytest.param(text_of(b"\x01" + bytes(19)), "numbers", id="three numbers"),
        pytest.param(text_of(content_of(encode(POSITION))[:-1]), "numbers", id="half a range"),
        pytest.param(text_of(b"\x01" + bytes(20) + b"\0\0"), "numbers", id="a range from 0"),
        pytest.param(text_of(b"\x01" + bytes(20) + b"\x01\0\x01\0"), "numbers", id="touching"),
        pytest.param(text_of(b"\x01" + bytes(16) + b"\x80\0\0\0\0"), "numbers", id="a longer zero"),
        pytest.param(
            text_of(b"\x01" + bytes(16) + b"\xff" * 9 + b"\1\0\0\0"), "numbers", id="64 bits"
        ),
        pytest.param(
            text_of(b"\x01" + bytes(19) + b"\xff" * 8 + b"\x7f"), "numbers", id="the year 294247"
        ),
    ],
)
def test_the_error_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^position: .*{message}") as refused:
        parse_position(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": -1}, "-1 is not from 0"),
        ({"timeline": INT64_MAX + 1}, "is not from 0"),
        ({"at": datetime(1969, 12, 31, tzinfo=UTC)}, "is not from 0"),
        ({"seen": ((5, 4),)}, "does not follow"),
        ({"seen": ((0, 4),)}, "does not follow"),
        ({"seen": ((3, 4), (5, 6))}, "does not follow"),
        ({"seen": ((3, 9), (5, 12))}, "does not follow"),
        ({"seen": ((3, INT64_MAX + 1),)}, "does not follow"),
        ({"seen": tuple((n, n) for n in range(1, 60_000, 2))}, "longer than 65536"),
    ],
)
def test_only_a_position_is_encoded(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(dataclasses.replace(POSITION, **change))  # type: ignore[arg-type]


def test_the_first_range_may_begin_at_one() -> None:
    position = dataclasses.replace(POSITION, seen=((1, 1), (3, INT64_MAX)))
    assert parse_position(encode(position)) == position
