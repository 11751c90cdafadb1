"""Compat signatures: the forms of other senders, templates, ends and secrets."""

from __future__ import annotations

import base64
import hmac
from datetime import UTC, date, datetime
from hashlib import sha256
from typing import Any

import orjson
import pytest

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.messages.message import prepare
from outbox.core.model.compat import (
    PRESETS,
    Compat,
    CompatSetting,
    describe_end,
    format_until,
)
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.headers import (
    WIDELY_ACCEPTED_BYTES,
    format_lines,
    parse_lines,
    valid_headers,
)
from outbox.core.model.message_format import MessageFormat
from outbox.core.model.secret_text import SECRETS_MAX
from outbox.errors import UsageError
from tests.receiver.deliveries import delivery

AT = 1_800_000_000
URL = "https://example.com/"
EVERY_MEMBER: dict[str, Any] = {
    "preset": "custom",
    "header": "X-Acme-Signature",
    "content": "{id}|{timestamp}|{body}",
    "encoding": "base64",
    "value": "{timestamp} {signature} {signatures}",
    "secret_encoding": "base64",
    "headers": {"X-Acme-Id": "{id}"},
    "until": "2027-01-31T00:00:00Z",
}


def parse(given: Any) -> Compat:
    return CompatSetting().parse("compat", given)


def signed(
    given: Any, body: bytes, *secrets: str, at: int = AT, message_id: str = "msg_1"
) -> dict[str, str]:
    compat = parse(given)
    signer = CompatSigner(compat, [(compat.decode(each), None) for each in secrets])
    return dict(parse_lines(signer.lines(message_id, at, body)))


# ------------------------------------------------------------------- presets

# Convoy, pkg/signature/signature_test.go; it signs its payload as compact JSON.
CONVOY_BODY = b'{"b":{},"e":"123","a":1}'
CONVOY_AT = 1_257_894_000
CONVOY = {
    "preset": "convoy",
    "content": "{timestamp},{body}",
    "value": "t={timestamp},{signatures}",
}


def test_convoy_with_a_time_signs_as_its_own_tests_say() -> None:
    assert signed(CONVOY, CONVOY_BODY, "secret", at=CONVOY_AT) == {
        "X-Convoy-Signature": "t=1257894000,"
        "v1=c97c302e4a991a7d4a72b60c3f9a0c3adb3611cd0acc632994a72ace04d6509c"
    }
    rolled = ("older-expired-secret", "expired-secret", "new-secret")
    assert signed(CONVOY, CONVOY_BODY, *rolled, at=CONVOY_AT) == {
        "X-Convoy-Signature": "t=1257894000,"
        "v1=5b255b0b867c5540679bad7dfa11be73ffd4ee248647646fb325ccbe19167439,"
        "v1=9942b27103f8f5f5ce4cd3751524dbb7087a596487c784655a33f528cd4d7400,"
        "v1=d5589c4f5e51d74e6116c8d5db2704d76cdf88521e2cdd749d2d5091e3d6183c"
    }


def test_convoy_without_a_time_sends_the_hex_of_the_body() -> None:
    expected = hmac.new(b"secret", CONVOY_BODY, sha256).hexdigest()
    assert signed("convoy", CONVOY_BODY, "secret") == {"X-Convoy-Signature": expected}


def test_outpost_signs_as_its_own_tests_say() -> None:
    # internal/destregistry/providers/destwebhook/signature_test.go: the digest of a content, and
    # the header of two signatures.
    content = b'1234567890.{"hello":"world"}'
    digest = "7054f74dae9f73e82b56ca73e8f81450097c698eeda0b00bb8728e89796baf2d"
    assert signed("outpost", content, "test-secret") == {"x-outpost-signature": f"v0={digest}"}
    form = parse("outpost").form
    assert (form.value, form.each, form.separator) == ("v0={signatures}", "{signature}", ",")
    both = signed("outpost", content, "test-secret", "old")["x-outpost-signature"]
    assert both.startswith(f"v0={digest},")


def test_outpost_signs_with_the_text_of_its_secret() -> None:
    # Its default secrets are hex digits with a prefix, and the text itself is the key.
    text = "whsec_" + "0123456789abcdef" * 4
    expected = hmac.new(text.encode(), b"{}", sha256).hexdigest()
    assert signed("outpost", b"{}", text)["x-outpost-signature"] == f"v0={expected}"


def test_github_signs_as_its_documentation_says() -> None:
    assert signed("github", b"Hello, World!", "It's a Secret to Everybody") == {
        "X-Hub-Signature-256": "sha256="
        "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    }


def test_svix_and_stripe_send_the_signature_of_each_secret() -> None:
    keys = [base64.b64encode(bytes([n]) * 24).decode() for n in (1, 2)]
    svix = signed("svix", b"{}", f"whsec_{keys[0]}", keys[1])
    digests = [
        base64.b64encode(
            hmac.digest(base64.b64decode(key), f"msg_1.{AT}.{{}}".encode(), sha256)
        ).decode()
        for key in keys
    ]
    assert svix == {
        "svix-id": "msg_1",
        "svix-timestamp": str(AT),
        "svix-signature": f"v1,{digests[0]} v1,{digests[1]}",
    }
    stripe = signed("stripe", b"{}", "whsec_a", "whsec_b")["Stripe-Signature"]
    t, *each = stripe.split(",")
    assert t == f"t={AT}"
    assert each == [
        "v1=" + hmac.new(key, f"{AT}.{{}}".encode(), sha256).hexdigest()
        for key in (b"whsec_a", b"whsec_b")
    ]


def test_every_member_replaces_what_the_preset_says() -> None:
    key = base64.b64encode(b"k").decode()
    digest = base64.b64encode(hmac.digest(b"k", f"m|{AT}|\xff".encode("latin-1"), sha256)).decode()
    assert signed(EVERY_MEMBER | {"until": None}, b"\xff", key, message_id="m") == {
        "X-Acme-Id": "m",
        "X-Acme-Signature": f"{AT} {digest} {digest}",
    }


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("name", ["envelope", "thin", "raw", "cloudevents", "cloudevents-binary"])
def test_what_is_signed_is_the_body_that_is_sent(name: Any) -> None:
    signer = CompatSigner(parse("github"), [(b"k", None)])
    headers = valid_headers({}, computed=signer)
    prepared = prepare(delivery(1), 0, headers=headers, message_format=MessageFormat(name, "/"))
    sent = dict(parse_lines(prepared.attempt(1, AT, [bytes(32)])))
    expected = hmac.new(b"k", prepared.body, sha256).hexdigest()
    assert sent["X-Hub-Signature-256"] == f"sha256={expected}"
    assert sent["webhook-signature"].startswith("v1,")


def test_a_batch_is_signed_as_one_body() -> None:
    signer = CompatSigner(parse("svix"), [(b"k", None)])
    headers = valid_headers({}, computed=signer)
    prepared = prepare_batch([delivery(1), delivery(2)], 0, headers=headers)
    sent = dict(parse_lines(prepared.attempt(1, AT, [bytes(32)])))
    content = b"%b.%d.%b" % (sent["webhook-id"].encode(), AT, prepared.body)
    expected = base64.b64encode(hmac.digest(b"k", content, sha256)).decode()
    assert sent["svix-signature"] == f"v1,{expected}"
    assert sent["svix-id"] == sent["webhook-id"]


@pytest.mark.parametrize("name", ["X-Hub-Signature-256", "x_hub_signature_256"])
def test_neither_an_event_nor_the_endpoint_replaces_a_header_of_the_signature(name: str) -> None:
    signer = CompatSigner(parse("github"), [(b"k", None)])
    headers = valid_headers({name: "own"}, computed=signer)
    assert headers.own == ()
    event = delivery(1)._replace(headers=orjson.dumps({name: "event"}))
    prepared = prepare(event, 0, headers=headers)
    lines = parse_lines(prepared.attempt(1, AT, [bytes(32)]))
    values = [value for n, value in lines if n.lower().replace("_", "-") == "x-hub-signature-256"]
    assert len(values) == 1
    assert values[0].startswith("sha256=")


def test_the_signature_ends_at_its_second() -> None:
    until = datetime.fromtimestamp(AT, UTC).isoformat()
    given = {"preset": "github", "until": until}
    assert signed(given, b"", "k", at=AT - 1)
    assert signed(given, b"", "k", at=AT) == {}


def test_an_old_secret_ends_at_its_time() -> None:
    signer = CompatSigner(parse("stripe"), [(b"new", None), (b"old", AT + 1.0)])
    before, after = (signer.lines("m", at, b"{}") for at in (AT, AT + 1))
    assert before.count("v1=") == 2
    assert after.count("v1=") == 1


@pytest.mark.parametrize("given", [*PRESETS, EVERY_MEMBER])
def test_the_longest_headers_are_no_shorter_than_those_of_any_request(given: Any) -> None:
    if given == "custom":
        given = {"preset": given, "header": "X-A"}
    compat = parse(given)
    signer = CompatSigner(compat, [(b"k", None)] * SECRETS_MAX)
    for prepared in (prepare(delivery(1), 0), prepare_batch([delivery(1), delivery(2)], 0)):
        lines = signer.lines(prepared.message_id, AT, prepared.body)
        assert len(format_lines(tuple(compat.form.longest_headers.items()))) >= len(lines) > 0


def test_headers_of_the_signature_count_in_the_warning_of_their_size() -> None:
    headers = {"X-Long": "a" * (WIDELY_ACCEPTED_BYTES - 100)}
    assert EndpointSettings(name="a", url=URL, headers=headers).warnings == ()
    (warning,) = EndpointSettings(
        name="a", url=URL, headers=headers, compat=parse("stripe")
    ).warnings
    assert warning.startswith("headers: the headers have ")


# ------------------------------------------------------------------ settings


def test_all_members_round_trip_through_storage_without_the_secret() -> None:
    compat = parse(EVERY_MEMBER | {"secret": "c2VjcmV0"})
    assert "c2VjcmV0" not in repr(compat)
    stored = orjson.loads(orjson.dumps(compat.public()))
    assert stored == EVERY_MEMBER
    assert parse(stored) == compat
    settings = EndpointSettings(name="a", url=URL, compat=compat)
    assert "c2VjcmV0" not in str(settings.to_dict())
    assert EndpointSettings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("gitlab", "compat.preset: must be svix or github"),
        ({}, "compat.preset: is missing"),
        (7, "compat: must be a preset or a mapping"),
        ([{"preset": "github", "secret": "hunter2"}], "compat: must be a preset or a mapping"),
        (' {"preset": "github", "secret": "hunter2"}', "compat.preset: must be svix or github"),
        ({"preset": {"secret": "hunter2"}}, "compat.preset: must be svix or github"),
        ({"preset": "svix", "secret_encoding": "hunter2"}, "must be raw or base64"),
        ({"preset": "svix", "secret": ["hunter2"]}, "compat.secret: must be a text"),
        # YAML takes `{secret:hunter2}` for a name.
        ({"preset": "svix", "secret:hunter2": None}, "compat: has no member"),
        ("{", "compat: is not valid JSON"),
        ({"preset": "github", "headr": "x"}, 'no member "headr"; did you mean "header"'),
        ("custom", "compat.header: is missing"),
        ({"preset": "custom", "header": "a b"}, "compat: the header 'a b' is not a header name"),
        ({"preset": "custom", "header": 7}, "compat: the header 7 is not a text"),
        ({"preset": "github", "header": "a" * 201}, "is not a text of 1 to 200 characters"),
        ({"preset": "svix", "headers": {"a" * 201: "x"}}, "is not a text of 1 to 200 characters"),
        ({"preset": "github", "header": "webhook-signature"}, "is set by the relay"),
        ({"preset": "github", "header": "Content_Length"}, "is set by the relay"),
        ({"preset": "svix", "headers": {"Host": "x"}}, "is set by the relay"),
        ({"preset": "svix", "headers": {"Svix_Signature": "x"}}, "is the header of the signature"),
        ({"preset": "svix", "headers": {"a": "{body}"}}, "may contain {id} {timestamp}, and no"),
        ({"preset": "svix", "headers": [1]}, "compat.headers: must be at most 8"),
        ({"preset": "github", "content": "{timestamp}"}, "compat.content: must contain {body}"),
        (
            {"preset": "github", "content": "{body}" * 2},
            "compat.content: may contain each part at most once",
        ),
        (
            {"preset": "svix", "value": "{signatures}" * 2},
            "compat.value: may contain each part at most once",
        ),
        ({"preset": "svix", "headers": {"a": "{id}{id}"}}, "may contain each part at most once"),
        ({"preset": "github", "content": "{body}{secret}"}, "may contain {id} {timestamp} {body}"),
        ({"preset": "github", "content": "{body}}"}, "and no other braces"),
        ({"preset": "github", "content": "{body!r}"}, "and no other braces"),
        ({"preset": "github", "value": "{body}{signature}"}, "compat.value: may contain"),
        ({"preset": "github", "value": "x"}, "must contain {signature} or {signatures}"),
        ({"preset": "github", "value": "{signature}\r\nX-A: 1"}, "printable ASCII characters"),
        ({"preset": "github", "value": "{signature}\n"}, "characters other than printable ASCII"),
        ({"preset": "github", "value": "x" * 201}, "1 to 200 printable ASCII characters"),
        ({"preset": "github", "encoding": "hex2"}, "compat.encoding: must be hex or base64"),
        ({"preset": "github", "until": "soon"}, "compat.until: 'soon' is neither a date"),
        ({"preset": "github", "until": "2027-01-31T12:00"}, "in UTC it is 2027-01-31T12:00Z"),
        ({"preset": "github", "until": 7}, "compat.until: 7 is neither a date"),
        ({"preset": "github", "until": "20270131"}, "compat.until: '20270131' is neither a date"),
        ({"preset": "github", "until": "2027-W04-7"}, "'2027-W04-7' is neither a date"),
        ({"preset": "github", "until": "2027-01-31T12Z"}, "'2027-01-31T12Z' is neither a date"),
        ({"preset": "github", "until": "2027-02-30"}, "'2027-02-30' is neither a date"),
        ({"preset": "github", "secret": ""}, "compat.secret: must be a text of 1 to 512 bytes"),
        ({"preset": "github", "secret": "x" * 513}, "must be a text of 1 to 512 bytes"),
        ({"preset": "github", "secret": 7}, "compat.secret: must be a text"),
        ({"preset": "svix", "secret": "not base64!"}, "compat.secret: must be base64"),
        ({"preset": "svix", "secret": "whsec_"}, "compat.secret: must be base64"),
        ({"preset": "svix", "secret": "whsec_" + "ab" * 16}, "compat.secret_encoding: base64 or"),
        (
            {"preset": "custom", "header": "X-A", "secret": "whsec_MTIz"},
            "compat.secret_encoding: base64 or raw",
        ),
    ],
)
def test_a_wrong_member_is_named_in_one_line_without_the_secret(given: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(given)
    text = str(caught.value)
    assert says in text
    assert text.startswith("compat")
    assert "\n" not in text
    assert "not base64!" not in text
    assert "hunter2" not in text


@pytest.mark.parametrize(("encoding", "key"), [("raw", b"whsec_abcd"), ("base64", b"\x69\xb7\x1d")])
def test_a_secret_that_could_be_meant_in_two_ways_says_its_encoding(
    encoding: str, key: bytes
) -> None:
    compat = parse({"preset": "svix", "secret_encoding": encoding, "secret": "whsec_abcd"})
    assert compat.decode("whsec_abcd") == key


@pytest.mark.parametrize(
    ("given", "at"),
    [
        (date(2027, 1, 31), "2027-01-31T00:00:00Z"),
        ("2027-01-31", "2027-01-31T00:00:00Z"),
        ("2027-01-31T12:00+02:00", "2027-01-31T10:00:00Z"),
        (datetime(2027, 1, 31, 12, tzinfo=UTC), "2027-01-31T12:00:00Z"),
    ],
)
def test_an_end_is_a_date_or_a_time_with_its_zone(given: Any, at: str) -> None:
    until = parse({"preset": "github", "until": given}).until
    assert until is not None
    assert format_until(until) == at


@pytest.mark.parametrize(
    ("until", "says"),
    [
        ("2027-01-31T00:00:00Z", "30 days left"),
        ("2027-01-02T00:00:00Z", "1 day left"),
        ("2027-01-01T01:00:00Z", "ends within a day"),
        ("2027-01-01T00:00:00Z", "ended"),
        ("2027-01-31", "unreadable"),
        ("x", "unreadable"),
    ],
)
def test_an_end_is_counted_down(until: str, says: str) -> None:
    assert describe_end(until, datetime(2027, 1, 1, tzinfo=UTC)) == says


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"headers": {"X-Hub-Signature-256": "1"}},
            "headers: 'X-Hub-Signature-256' is set by the compat signature",
        ),
        ({"url": "nats://example.com/stream"}, "compat: is for HTTP receivers; a broker has no"),
        (
            {"header_prefix": "Acme-", "compat": {"preset": "github", "header": "Acme-Sequence"}},
            "compat: the header acme-sequence is set by the relay",
        ),
    ],
)
def test_it_conflicts_with_no_other_setting(settings: dict[str, Any], says: str) -> None:
    values = {"name": "a", "url": URL, "compat": "github", **settings}
    with pytest.raises(UsageError, match=says):
        EndpointSettings(**values | {"compat": parse(values["compat"])})
