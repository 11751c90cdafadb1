"""Signatures of version v1a, whose verification key cannot create them."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.messages.ed25519 import PrivateKey, parse_private_key, parse_public_key
from outbox.core.messages.signature import (
    MalformedHeader,
    SignatureMismatch,
    parse_key,
    sign,
    sign_ed25519,
    verify,
)
from outbox.errors import UsageError

NOW = 1_770_000_000
SECRET = bytes(range(32))
BODY = b'{"type":"order.paid"}'


def private_key(seed: int = 1) -> PrivateKey:
    return parse_private_key("whsk_" + base64.b64encode(bytes([seed] * 32)).decode())


def headers(signature: str) -> dict[str, str]:
    return {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(NOW),
        "webhook-signature": signature,
    }


KEY = private_key()
PUBLIC = parse_public_key(KEY.public_text)
GOOD = sign_ed25519(KEY, "msg_1", NOW, BODY)


def test_the_first_vector_of_rfc_8032() -> None:
    """RFC 8032, 7.1, test 2."""
    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    for printed in (seed, seed + public):
        key = parse_private_key("whsk_" + base64.b64encode(printed).decode())
        assert key.public_text == "whpk_" + base64.b64encode(public).decode()
        assert base64.b64decode(key.sign(b"\x72")) == signature
    assert parse_public_key(key.public_text).verifies(base64.b64encode(signature).decode(), b"\x72")


# The encodings of the eight points of small order, canonical or not, with the sign bit clear.
# From libsodium's ge25519_has_small_order.
SMALL_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("sign", [0, 0x80])
@pytest.mark.parametrize("encoded", SMALL_ORDER)
def test_a_public_key_of_small_order_is_refused(encoded: str, sign: int) -> None:
    """A signature with the scalar zero verifies for such a key, whatever was signed."""
    key = bytearray.fromhex(encoded)
    key[-1] |= sign
    with pytest.raises(UsageError, match="small order"):
        parse_key("whpk_" + base64.b64encode(key).decode())


def test_a_signed_request_verifies() -> None:
    assert verify(headers(GOOD), BODY, [PUBLIC], NOW).message_id == "msg_1"


def test_each_kind_of_key_ignores_signatures_of_the_other() -> None:
    both = f"{GOOD} {sign(SECRET, 'msg_1', NOW, BODY)}"
    for keys in ([PUBLIC], [SECRET], [SECRET, PUBLIC]):
        verify(headers(both), BODY, keys, NOW)
        verify(headers(f"v1a,x v1,x {both}"), BODY, keys, NOW)
    with pytest.raises(MalformedHeader, match="version v1a"):
        verify(headers(sign(SECRET, "msg_1", NOW, BODY)), BODY, [PUBLIC], NOW)
    with pytest.raises(MalformedHeader, match=r"version v1$"):
        verify(headers(GOOD), BODY, [SECRET], NOW)


def test_a_public_key_is_not_accepted_as_a_secret() -> None:
    """If a public key were accepted as a secret, its holder could sign."""
    known = base64.b64decode(KEY.public_text.removeprefix("whpk_"))
    forged = sign(known, "msg_1", NOW, BODY)
    with pytest.raises(MalformedHeader):
        verify(headers(forged), BODY, [PUBLIC], NOW)


@pytest.mark.parametrize(
    "signature",
    [
        sign_ed25519(private_key(2), "msg_1", NOW, BODY),
        sign_ed25519(KEY, "msg_2", NOW, BODY),
        sign_ed25519(KEY, "msg_1", NOW + 1, BODY),
        sign_ed25519(KEY, "msg_1", NOW, BODY + b" "),
        GOOD[:-4],
        "v1a,",
        "v1a,not base64",
        "v1a,é",
        "v1a," + "A" * 88,
    ],
)
def test_other_values_are_not_signatures(signature: str) -> None:
    with pytest.raises(SignatureMismatch):
        verify(headers(signature), BODY, [PUBLIC], NOW)


@given(st.text())
def test_any_signature_value_raises_only_verification_errors(text: str) -> None:
    with pytest.raises((SignatureMismatch, MalformedHeader)):
        verify(headers(f"v1a,{text}"), BODY, [PUBLIC], NOW)


@pytest.mark.parametrize("text", ["", "whpk_", "whpk_AAAA", "whpk_" + "A" * 44, "whpk_!" * 9])
def test_an_invalid_key_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="whpk_"):
        parse_public_key(text)


def test_a_private_key_is_never_shown() -> None:
    text = "whsk_" + "A" * 30
    with pytest.raises(UsageError, match="whsk_") as caught:
        parse_private_key(text)
    assert "AAAA" not in str(caught.value)


def test_the_prefix_distinguishes_keys() -> None:
    assert parse_key("whsec_" + base64.b64encode(SECRET).decode()) == SECRET
    assert not isinstance(parse_key(KEY.public_text), bytes)
    with pytest.raises(UsageError, match="secret"):
        parse_key("whsk_" + base64.b64encode(SECRET).decode())
