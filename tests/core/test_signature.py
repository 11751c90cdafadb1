from __future__ import annotations

import base64
import hmac
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from outbox.core.messages.signature import (
    MalformedHeader,
    MissingHeader,
    RepeatedHeader,
    SignatureError,
    SignatureMismatch,
    TimestampTooNew,
    TimestampTooOld,
    VerifiedSignature,
    format_secret,
    parse_secret,
    sign,
    verify,
)
from outbox.errors import UsageError

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
NOW = 1_770_000_000
ID = "85ec77cc-b7b7-5c53-9b7d-f4ef5b9de9d1"
BODY = '{"type":"order.paid","data":{"a":"é"}}'.encode()

secrets = st.binary(min_size=24, max_size=64)
anything = st.text(st.characters(exclude_categories=()))


def headers(secret: bytes = SECRET, body: bytes = BODY, timestamp: int = NOW) -> dict[str, str]:
    return {
        "webhook-id": ID,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, ID, timestamp, body),
    }


def test_the_test_vector_of_the_specification_verifies() -> None:
    secret = parse_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


ids = st.text(st.characters(codec="ascii", exclude_characters="."), min_size=1)


@given(secrets, st.binary(max_size=200), ids)
def test_a_signed_request_verifies_and_returns_its_contents(
    secret: bytes, body: bytes, message_id: str
) -> None:
    signed = {
        "Webhook-Id": message_id,
        "WEBHOOK-TIMESTAMP": str(NOW),
        "webhook-signature": sign(secret, message_id, NOW, body),
    }
    assert verify(signed, body, [secret], NOW) == VerifiedSignature(message_id, NOW)


@given(st.binary(max_size=130), st.binary(max_size=200))
def test_a_secret_of_any_length_signs_as_the_standard_library_does(
    secret: bytes, body: bytes
) -> None:
    expected = hmac.digest(secret, f"{ID}.{NOW}.".encode() + body, "sha256")
    assert sign(secret, ID, NOW, body) == f"v1,{base64.b64encode(expected).decode()}"


@given(secrets, st.text(st.characters(exclude_categories=("Cs",)), max_size=100))
def test_an_independent_library_accepts_our_signatures(secret: bytes, text: str) -> None:
    timestamp = int(datetime.now(tz=UTC).timestamp())
    body = text.encode()
    independent = Webhook(format_secret(secret))
    independent.verify(body, headers(secret, body, timestamp), json_parse=False)
    with pytest.raises(WebhookVerificationError):
        independent.verify(body + b"x", headers(secret, body, timestamp), json_parse=False)


@given(secrets, st.text(st.characters(exclude_categories=("Cs",)), max_size=100))
def test_we_accept_signatures_of_an_independent_library(secret: bytes, text: str) -> None:
    # Its `sign` accepts only text, and times in UTC.
    at = datetime.fromtimestamp(NOW, tz=UTC)
    signature = Webhook(format_secret(secret)).sign(ID, at, text)
    foreign_headers = headers() | {"webhook-signature": signature}
    assert verify(foreign_headers, text.encode(), [secret], NOW).message_id == ID


def test_both_secrets_verify_during_rotation() -> None:
    both = headers()
    both["webhook-signature"] += " " + sign(OTHER, ID, NOW, BODY)
    for accepted in ([SECRET], [OTHER], [OTHER, SECRET]):
        verify(both, BODY, accepted, NOW)
    verify(headers(), BODY, [OTHER, SECRET], NOW)


def signed_at(timestamp: int) -> dict[str, str]:
    return {
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(SECRET, ID, timestamp, BODY),
    }


def test_signatures_of_unknown_versions_are_ignored() -> None:
    mixed = headers()
    mixed["webhook-signature"] = f"v1a,AAAA v2,xx {mixed['webhook-signature']} nonsense"
    verify(mixed, BODY, [SECRET], NOW)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"webhook-id": ""}, MissingHeader, "webhook-id"),
        ({"webhook-timestamp": ""}, MissingHeader, "webhook-timestamp"),
        ({"webhook-signature": ""}, MissingHeader, "webhook-signature"),
        ({"webhook-id": "msg.1"}, MalformedHeader, 'webhook-id contains a "."'),
        ({"Webhook-Id": ID}, RepeatedHeader, "webhook-id"),
        ({"WEBHOOK-SIGNATURE": "v1,x"}, RepeatedHeader, "webhook-signature"),
        ({"webhook-signature": " ".join(["v1,x"] * 33)}, MalformedHeader, "more than 32"),
        ({"webhook-timestamp": "now"}, MalformedHeader, "webhook-timestamp"),
        ({"webhook-timestamp": "1.77e9"}, MalformedHeader, "webhook-timestamp"),
        ({"webhook-timestamp": "-1"}, MalformedHeader, "webhook-timestamp"),
        ({"webhook-timestamp": "9" * 400}, MalformedHeader, "webhook-timestamp"),
        ({"webhook-timestamp": f"{NOW} "}, MalformedHeader, "webhook-timestamp"),
        ({"webhook-timestamp": "١٢٣"}, MalformedHeader, "webhook-timestamp"),
        (signed_at(NOW - 301), TimestampTooOld, "301 s ago"),
        (signed_at(NOW + 301), TimestampTooNew, "301 s in the future"),
        # Not valid: an error of the time would have the sender keep a forged request.
        ({"webhook-timestamp": str(NOW - 301)}, SignatureMismatch, "secret"),
        ({"webhook-timestamp": str(NOW + 301)}, SignatureMismatch, "secret"),
        ({"webhook-timestamp": str(NOW + 1)}, SignatureMismatch, "secret"),
        ({"webhook-timestamp": f"0{NOW}"}, SignatureMismatch, "secret"),
        ({"webhook-id": "another"}, SignatureMismatch, "secret"),
        ({"webhook-id": "odd\udce9"}, SignatureMismatch, "secret"),
        ({"webhook-id": "odd\ud800"}, MalformedHeader, "webhook-id"),
        ({"webhook-signature": "v1,\ud800"}, MalformedHeader, "webhook-signature"),
        ({"webhook-signature": "v1"}, MalformedHeader, "webhook-signature"),
        ({"webhook-signature": "v1a,AAAA"}, MalformedHeader, "webhook-signature"),
        ({"webhook-signature": "v1,"}, SignatureMismatch, "secret"),
        ({"webhook-signature": "v1,é\udce9"}, SignatureMismatch, "secret"),
        ({"webhook-signature": sign(OTHER, ID, NOW, BODY)}, SignatureMismatch, "secret"),
        ({"webhook-signature": sign(SECRET, ID, NOW, BODY)[:-2]}, SignatureMismatch, "secret"),
    ],
)
def test_each_failure_has_its_own_error(
    change: dict[str, str], error: type[SignatureError], says: str
) -> None:
    with pytest.raises(SignatureError, match=says) as caught:
        verify(headers() | change, BODY, [SECRET], NOW)
    assert type(caught.value) is error


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_an_absent_header_is_missing(name: str) -> None:
    absent = headers()
    del absent[name]
    with pytest.raises(MissingHeader) as caught:
        verify(absent, BODY, [SECRET], NOW)
    assert caught.value.header == name


def test_the_tolerance_is_inclusive_and_can_be_chosen() -> None:
    verify(headers(), BODY, [SECRET], NOW + 300)
    verify(headers(), BODY, [SECRET], NOW - 300)
    with pytest.raises(TimestampTooOld):
        verify(headers(), BODY, [SECRET], NOW + 11, tolerance_s=10)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 63))
def test_a_changed_body_never_verifies(body: bytes, at: int) -> None:
    i = at % len(body)
    changed = body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :]
    with pytest.raises(SignatureMismatch):
        verify(headers(body=body), changed, [SECRET], NOW)


@given(st.dictionaries(st.sampled_from(list(headers())), anything, max_size=3))
def test_any_header_value_raises_only_verification_errors(
    change: dict[str, str],
) -> None:
    if all(headers()[name] == value for name, value in change.items()):
        return
    with pytest.raises(SignatureError):
        verify(headers() | change, BODY, [SECRET], NOW)


def test_verifying_without_a_secret_is_an_error() -> None:
    with pytest.raises(UsageError):
        verify(headers(), BODY, [], NOW)


@given(secrets)
def test_secrets_round_trip_also_without_prefix_and_padding(secret: bytes) -> None:
    text = format_secret(secret)
    for form in (text, text.removeprefix("whsec_")):
        assert parse_secret(form) == parse_secret(form.rstrip("=")) == secret


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        "a password of more than 24 characters",
        base64.b64encode(b"x" * 23).decode(),
        base64.b64encode(b"x" * 65).decode(),
        "whsec_whsec_" + base64.b64encode(b"x" * 32).decode(),
        "whsk_" + base64.b64encode(b"x" * 32).decode(),
        "whsec_not base64 at all, really not!",
        "whsec_" + "é" * 32,
        "whsec_" + "A" * 33,
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        "whsec_" + base64.b64encode(b"x" * 32).decode() + "\n",
        "whpk_" + base64.b64encode(b"x" * 32).decode(),
    ],
)
def test_an_invalid_secret_is_rejected_without_being_shown(text: str) -> None:
    with pytest.raises(UsageError, match="secret") as caught:
        parse_secret(text)
    hidden = text.removeprefix("whsec_")
    assert not hidden or hidden not in str(caught.value)


@pytest.mark.parametrize("size", [0, 23, 65])
def test_keys_of_an_invalid_size_are_rejected(size: int) -> None:
    with pytest.raises(UsageError, match="24 to 64"):
        format_secret(b"x" * size)
