"""Keys that encrypt secrets at rest: their format, and what is rejected."""

from __future__ import annotations

import pytest

from outbox.core.model.encryption_keys import KEYS_MAX, format_key, parse_keys
from outbox.errors import UsageError

ONE, TWO = format_key(b"1" * 32), format_key(b"\xfb\xff" * 16)


def test_the_first_key_stays_first_with_any_separator() -> None:
    for text in (f"{ONE} {TWO}", f"{ONE},{TWO}", f"\n{ONE}\n{TWO}\n", f"{ONE}, {TWO} {ONE}"):
        first, second = parse_keys(text)
        assert (first.value, second.value) == (b"1" * 32, b"\xfb\xff" * 16)
    assert parse_keys("") == ()


def test_an_id_identifies_a_key_and_does_not_reveal_it() -> None:
    first, second = parse_keys(f"{ONE} {TWO}")
    assert first.id != second.id
    assert len(first.id) == 8
    assert first.id not in ONE
    assert "1111" not in repr(first)
    assert ONE not in repr(first)


def test_both_base64_alphabets_are_accepted() -> None:
    encoded = TWO.removeprefix("obkey_")
    other = encoded.replace("-", "+").replace("_", "/") + "="
    assert other.rstrip("=") != encoded
    assert parse_keys(f"obkey_{other}") == parse_keys(TWO)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "obkey_",
        "obkey_" + "A" * 42,
        "obkey_" + "A" * 44,
        ONE.removeprefix("obkey_"),
        "whsec_" + "A" * 43,
        "obkey_" + "é" * 43,
        ONE.upper(),
    ],
)
def test_an_invalid_key_is_rejected_and_never_shown(text: str) -> None:
    with pytest.raises(UsageError, match="create one with outbox rekey --generate") as caught:
        parse_keys(f"{ONE} {text}")
    assert text.removeprefix("obkey_") not in str(caught.value) or len(text) < 7
    assert ONE not in str(caught.value)


def test_too_many_keys_are_rejected() -> None:
    many = " ".join(format_key(bytes([i]) * 32) for i in range(KEYS_MAX + 1))
    with pytest.raises(UsageError, match="11 keys; the limit is 10"):
        parse_keys(many)
