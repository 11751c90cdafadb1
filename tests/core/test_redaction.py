"""Redaction of secrets that receivers repeat: in every common encoding, and nothing else."""

from __future__ import annotations

import base64
import json
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model import redaction
from outbox.core.model.headers import WIRE_BYTES_MAX, WIRE_COUNT_MAX
from outbox.core.model.redaction import (
    COMPARISONS_MAX,
    KEPT_BODY_BYTES,
    REDACTED,
    SECRET_CHARS_MIN,
    SecretRedactor,
    redact,
)
from outbox.core.model.response import RESPONSE_BODY_BYTES_MAX, AttemptResult
from outbox.core.model.stored_response import stored_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SECRET = "a/b+c=d <e>%&'"


def test_reflected_secrets_are_redacted() -> None:
    secret = "Bearer hunter2"
    response = AttemptResult.completed(
        401,
        0.001,
        headers=(("X-Request-Id", f"for {secret}"), ("Server", "x")),
        body=b'{"authorization": "Bearer hunter2", "x": 1}',
    )
    kept = redact(response, [secret, "x"])
    assert kept.headers == (("X-Request-Id", "for (not kept)"), ("Server", "x"))
    assert kept.body == b'{"authorization": "(not kept)", "x": 1}'
    assert "hunter2" not in str(stored_response(kept))
    assert redact(response, ["another"]) is response


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        SECRET.upper(),
        "a\\/b+c=d <e>%&'",
        quote(SECRET, ""),
        quote(SECRET, "").lower(),
        "a%2fb%2bc%3dd+%3ce%3e%25%26%27",
        escape(SECRET),
        "a/b+c=d &lt;e&gt;%&amp;&#39;",
        SECRET.encode().hex(),
        SECRET.encode().hex().upper(),
        base64.b64encode(SECRET.encode()).decode().rstrip("="),
        base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("="),
    ],
)
def test_reflected_secrets_are_redacted_in_every_encoding(written: str) -> None:
    response = AttemptResult.completed(
        400, 0.001, body=f"x {written} y".encode(), detail=f"Bad: {written}"
    )
    kept = redact(response, [SECRET])
    assert (kept.body, kept.detail) == (b"x (not kept) y", "Bad: (not kept)")


def test_a_secret_outside_of_ascii_is_redacted_in_json() -> None:
    body = json.dumps({"was": "geheim\u00fc\u20ac"}).encode()
    kept = redact(AttemptResult.completed(400, 0.001, body=body), ["geheim\u00fc\u20ac"])
    assert kept.body == b'{"was": "(not kept)"}'


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_a_secret_inside_a_base64_text_cannot_be_decoded(before: bytes, after: bytes) -> None:
    """Such as the whole request, or a dump of its headers."""
    sent = b"hunter2-hunter3"
    encoded = base64.b64encode(before + sent + after)
    kept = redact(AttemptResult.completed(400, 0.001, body=b"[" + encoded + b"]"), [sent.decode()])
    assert REDACTED.encode() in kept.body
    left = kept.body.replace(REDACTED.encode(), b" ").strip(b"[]").split()
    # At most one byte at each end is left: it shares its character with another byte.
    for part in left:
        for skipped in range(4):
            cut = part[skipped:]
            decoded = base64.b64decode(cut[: len(cut) // 4 * 4] or b"", validate=False)
            assert b"unter" not in decoded


@pytest.mark.parametrize("sent", ["Basic dXNlcjpodW50ZXIyIQ==", "dXNlcjpodW50ZXIyIQ=="])
def test_basic_credentials_are_redacted_when_decoded(sent: str) -> None:
    secrets = [sent, sent.removeprefix("Basic ")]
    body = b"no user user:hunter2!; is hunter2! wrong?"
    kept = redact(AttemptResult.completed(401, 0.001, body=body), secrets)
    assert kept.body == b"no user (not kept); is (not kept) wrong?"


@pytest.mark.parametrize(
    "encode",
    [str, str.upper, lambda text: text.encode().hex()],
    ids=["plain", "upper case", "hex"],
)
def test_a_secret_that_is_cut_off_is_redacted(encode: object) -> None:
    assert callable(encode)
    text = encode("hunter2-hunter3")
    for length in range(6, len(text)):
        body = ("x" * KEPT_BODY_BYTES + text[:length])[-KEPT_BODY_BYTES:].encode()
        kept = redact(AttemptResult.completed(400, 0.001, body=body), ["hunter2-hunter3"])
        assert text[:6].encode() not in kept.body, length


def test_truncation_does_not_move_a_secret_into_the_stored_part() -> None:
    secret = "".join(chr(97 + i % 26) for i in range(3000))
    response = AttemptResult.completed(
        400, 0.001, body=(secret.encode() * 6)[:RESPONSE_BODY_BYTES_MAX]
    )
    assert redact(response, [secret]).body == b"(not kept)" * 3
    assert secret[:50] not in str(stored_response(redact(response, [secret])))


@pytest.mark.parametrize("scheme", ["Bearer", "Basic", "Token", "ApiKey"])
def test_the_scheme_alone_is_no_secret(scheme: str) -> None:
    secret = f"{scheme} hunter2-hunter3"
    response = AttemptResult.completed(
        401,
        0.001,
        headers=(("WWW-Authenticate", scheme),),
        body=f"expected: {scheme}".encode(),
        detail=f"it wants {scheme} ",
    )
    kept = redact(response, [secret, "hunter2-hunter3"])
    assert (kept.body, kept.detail) == (response.body, response.detail)
    for length in range(6, 15):
        body = f"got: {secret[: len(scheme) + 1 + length]}".encode()
        kept = redact(AttemptResult.completed(401, 0.001, body=body), [secret])
        assert b"hunter" not in kept.body


def test_secrets_that_overlap_are_redacted_as_one() -> None:
    response = AttemptResult.completed(400, 0.001, body=b"x abcdefghijkl abcdef ghijkl")
    kept = redact(response, ["abcdefgh", "efghijkl"])
    assert kept.body == b"x (not kept) abcdef ghijkl"


class Forms(tuple[Any, ...]):
    """Forms with the same first characters, which count those that are compared."""

    counted: Counted

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.counted.compared += 1
            yield each


class Counted(dict[str, Any]):
    """The forms by their first characters, which counts positions and comparisons."""

    positions = compared = 0

    def __contains__(self, head: object) -> bool:
        self.positions += 1
        return super().__contains__(head)

    def __getitem__(self, head: str) -> Forms:
        forms = Forms(super().__getitem__(head))
        forms.counted = self
        return forms


def counted(secrets: Iterable[str], response: AttemptResult) -> Counted:
    """Redact a response, and count what that takes."""
    redactor = SecretRedactor(secrets)
    redactor.redact(response)
    assert redactor._forms is not None
    forms = Counted(redactor._forms.by_head)
    redactor._forms = redactor._forms._replace(by_head=forms)
    redactor.redact(response)
    return forms


def long_body(text: str) -> bytes:
    return (text.encode("latin-1") * RESPONSE_BODY_BYTES_MAX)[:RESPONSE_BODY_BYTES_MAX]


@pytest.mark.parametrize("text", ['{"message": "accepted for processing"} ', "Bearer ", "\xe4"])
def test_a_long_response_is_searched_in_one_pass(text: str) -> None:
    """Every attempt with header values of its endpoint costs this, in the loop of the relay."""
    secrets = (f"Bearer {'4711-secret-' * 4}", "4711-secret-" * 4)
    response = AttemptResult.completed(500, 0.001, body=long_body(text))
    found = counted(secrets, response)
    assert KEPT_BODY_BYTES - SECRET_CHARS_MIN < found.positions <= KEPT_BODY_BYTES
    assert found.compared <= COMPARISONS_MAX + len(secrets)


A = base64.b64encode(b"a" * RESPONSE_BODY_BYTES_MAX)[:RESPONSE_BODY_BYTES_MAX]
NEAR = b"a" * RESPONSE_BODY_BYTES_MAX
EVERYWHERE = (("Server", "a" * 1000), ("Via", "a" * 1000), ("Location", "a" * 1000)) * 5


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", [A, NEAR], ids=["Base64", "plain"])
@pytest.mark.parametrize("end", ["", "b"], ids=["found", "nearly found"])
def test_secrets_and_a_body_that_are_made_for_each_other_take_no_longer(
    end: str, body: bytes, status: int
) -> None:
    """Searched without a limit, such a response took 650 passes: other endpoints waited."""
    secrets = ["a" * (6 + n) + end for n in range(WIRE_COUNT_MAX - 4)]
    response = AttemptResult.completed(status, 0.001, headers=EVERYWHERE, body=body)
    kept = SecretRedactor(secrets).redact(response)
    assert not any(secret in str(stored_response(kept)) for secret in secrets)
    found = counted(secrets, response)
    # In the body and in the headers: each text ends after the position that exceeds the limit.
    at_one_position = max(map(len, found.values()))
    assert 0 < found.compared <= 2 * (COMPARISONS_MAX + at_one_position)


def test_what_takes_too_many_comparisons_is_not_kept() -> None:
    headers = (("Retry-After", "5"), ("Server", "abcdef" * 85), ("Via", "abcdef" * 85)) * 10
    response = AttemptResult.completed(500, 0.001, headers=headers, body=b"abcdef " * 2000)
    kept = redact(response, ["abcdefgh"])
    assert kept.body == REDACTED.encode()
    assert set(kept.headers) == {(name, REDACTED) for name, _ in headers}


def test_each_header_is_searched_by_itself() -> None:
    headers = (("Server", "hunter2-"), ("Via", "hunter3"), ("Date", "x"), ("X-Other", "y"))
    kept = redact(AttemptResult.completed(401, 0.001, headers=headers), ["hunter2-hunter3"])
    # The first is the start of the secret, cut off by the receiver; the last is never stored.
    assert kept.headers == (("Server", REDACTED), ("Via", "hunter3"), ("Date", "x"))


def test_as_many_header_values_as_an_endpoint_may_have_are_searched_in_one_pass() -> None:
    """A tenant sets the headers of its endpoints."""
    size = WIRE_BYTES_MAX // WIRE_COUNT_MAX - 10
    body = long_body('{"message": "accepted for processing"} ')
    response = AttemptResult.completed(500, 0.001, body=body)
    secrets = [f"{n}-" + "+<" * (size // 2 - 3) for n in range(WIRE_COUNT_MAX)]
    assert counted(secrets, response).positions <= KEPT_BODY_BYTES


def test_the_forms_of_an_endpoints_secrets_are_built_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many endpoints there are."""
    built: list[tuple[str, ...]] = []
    build = redaction._build_forms

    def counted(secrets: tuple[str, ...]) -> redaction._Forms:
        built.append(secrets)
        return build(secrets)

    monkeypatch.setattr(redaction, "_build_forms", counted)
    redactors = [SecretRedactor([f"secret-{n}"]) for n in range(2000)]
    assert not built
    for _ in range(2):
        for n, redactor in enumerate(redactors):
            response = AttemptResult.completed(401, 0.001, body=b"secret-%d" % n)
            assert redactor.redact(response).body == b"(not kept)"
    assert len(built) == 2000
    response = AttemptResult.completed(401, 0.001, body=b"short")
    assert SecretRedactor(["short"]).redact(response) is response
    assert len(built) == 2000
