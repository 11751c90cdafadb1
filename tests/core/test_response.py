from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model.response import (
    DETAIL_CHARS_MAX,
    RESPONSE_BODY_BYTES_MAX,
    AttemptResult,
    Failure,
    one_line,
)
from outbox.core.model.response_policy import (
    EVERY_FAILURE,
    RETRY_AFTER_S_MAX,
    AttemptOutcome,
    classify,
    retry_after_s,
)
from outbox.core.model.stored_response import (
    STORED_BODY_CHARS_MAX,
    STORED_SUCCESS_BODY_CHARS_MAX,
    STORED_VERSION,
    describe_response,
    generalize_elapsed_s,
    generalize_failure,
    stored_response,
    stored_success,
)

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC).timestamp()


def outcome(status: int, *, maybe_sent_before: bool = False) -> AttemptOutcome:
    return classify(AttemptResult.completed(status, 0.1), maybe_sent_before=maybe_sent_before)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 226, 299])
def test_2xx_is_delivered(status: int) -> None:
    assert outcome(status) is AttemptOutcome.DELIVERED


@pytest.mark.parametrize("status", [408, 421, 425, 429, 500, 502, 503, 504, 529, 599])
def test_retryable_statuses_are_retried(status: int) -> None:
    assert outcome(status) is AttemptOutcome.RETRY


@pytest.mark.parametrize("status", [101, 300, 301, 302, 307, 308, 400, 401, 404, 409, 410])
def test_any_other_status_is_a_refusal(status: int) -> None:
    assert outcome(status) is AttemptOutcome.REFUSED


def test_a_policy_may_retry_every_refusal_but_410() -> None:
    for status in range(100, 600):
        got = classify(
            AttemptResult.completed(status, 0.1), maybe_sent_before=False, retryable=EVERY_FAILURE
        )
        if status in range(200, 300):
            assert got is AttemptOutcome.DELIVERED
        else:
            assert got is (AttemptOutcome.REFUSED if status == 410 else AttemptOutcome.RETRY)


def test_409_to_a_number_that_may_have_been_sent_before_is_a_success() -> None:
    assert outcome(409, maybe_sent_before=True) is AttemptOutcome.DELIVERED
    assert outcome(400, maybe_sent_before=True) is AttemptOutcome.REFUSED
    assert outcome(503, maybe_sent_before=True) is AttemptOutcome.RETRY


@pytest.mark.parametrize("failure", Failure)
def test_a_failure_without_a_status_is_retried(failure: Failure) -> None:
    response = AttemptResult.failed(failure, "it went wrong", 0.1)
    for maybe_sent_before in (False, True):
        assert classify(response, maybe_sent_before=maybe_sent_before) is AttemptOutcome.RETRY


@pytest.mark.parametrize("status", [0, 99, 600, 999])
def test_an_invalid_status_counts_as_a_server_error(status: int) -> None:
    assert outcome(status) is AttemptOutcome.RETRY
    none = frozenset[int]()
    response = AttemptResult.completed(status, 0.1)
    assert classify(response, maybe_sent_before=False, retryable=none) is AttemptOutcome.REFUSED


def test_retryable_statuses_are_configurable_per_endpoint() -> None:
    own = frozenset({404, 409, 200})

    def outcome_of(status: int, *, before: bool = False) -> AttemptOutcome:
        return classify(
            AttemptResult.completed(status, 0.1), maybe_sent_before=before, retryable=own
        )

    assert outcome_of(404) is AttemptOutcome.RETRY
    assert outcome_of(503) is AttemptOutcome.REFUSED
    assert outcome_of(409) is AttemptOutcome.RETRY
    assert outcome_of(409, before=True) is AttemptOutcome.DELIVERED
    assert outcome_of(200) is AttemptOutcome.DELIVERED


def test_a_result_has_either_a_status_or_a_failure() -> None:
    result, failed = (
        AttemptResult.completed(200, 0.0),
        AttemptResult.failed(Failure.RESET, "", 0.0),
    )
    assert (result.status, result.failure) == (200, None)
    assert (failed.status, failed.failure) == (None, Failure.RESET)


# --------------------------------------------------------------- Retry-After


def retry_after_of(value: str) -> float | None:
    return retry_after_s((("Content-Type", "text/plain"), ("Retry-After", value)), NOW)


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("3600", 3600.0),
        ("3601", 3600.0),
        ("9" * 5000, 3600.0),
        ("Sat, 31 Jan 2026 12:01:30 GMT", 90.0),
        ("Saturday, 31-Jan-26 12:01:30 GMT", 90.0),
        ("Sat Jan 31 12:01:30 2026", 90.0),
        ("Sat, 31 Jan 2026 11:00:00 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, wait_s: float) -> None:
    assert retry_after_of(value) == wait_s


@pytest.mark.parametrize(
    "value", ["", "soon", "-5", "1.5", "1e3", "٣", "²", "0x10", "Sat, 99 Foo 2026", "\x00", "12 34"]
)
def test_an_invalid_retry_after_is_ignored(value: str) -> None:
    assert retry_after_of(value) is None


def test_a_date_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        assert retry_after_of("Sat Jan 31 12:01:30 2026") == 90.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_retry_after_is_optional_and_case_insensitive() -> None:
    assert retry_after_s((), NOW) is None
    assert retry_after_s((("RETRY-AFTER", "5"),), NOW) == 5.0
    assert retry_after_s((("retry-after", "soon"), ("retry-after", "5")), NOW) == 5.0


@given(st.text())
def test_any_retry_after_is_bounded(value: str) -> None:
    wait_s = retry_after_of(value)
    assert wait_s is None or 0.0 <= wait_s <= RETRY_AFTER_S_MAX


@given(st.datetimes(datetime(1970, 1, 2), datetime(9999, 1, 1)))
def test_any_http_date_is_parsed(at: datetime) -> None:
    at = at.replace(tzinfo=UTC, microsecond=0)
    wait_s = retry_after_of(format_datetime(at, usegmt=True))
    assert wait_s == min(max(at.timestamp() - NOW, 0.0), RETRY_AFTER_S_MAX)


# ------------------------------------------------------------------- summary


def test_a_stored_response_has_trace_headers() -> None:
    response = AttemptResult.completed(
        503,
        0.0421,
        headers=(
            ("Content-Type", "text/plain"),
            ("X-Request-Id", "r-1"),
            ("Set-Cookie", "session=secret"),
            ("X-Other", "y"),
        ),
        body=b"try later",
        detail="the body was cut short",
    )
    assert stored_response(response) == {
        "version": STORED_VERSION,
        "status": 503,
        "detail": "the body was cut short",
        "elapsed_ms": 42.1,
        "headers": {"content-type": "text/plain", "x-request-id": "r-1"},
        "body": "try later",
    }


def test_a_summary_of_a_failure() -> None:
    response = AttemptResult.failed(Failure.CONNECT, "connection\r\nrefused\x00", 0.001)
    assert stored_response(response) == {
        "version": STORED_VERSION,
        "failure": "connect",
        "detail": "connection refused",
        "elapsed_ms": 1.0,
    }


def test_a_success_keeps_less_of_the_response() -> None:
    headers = (("Content-Type", "text/plain"), ("X-Request-Id", "r-1"), ("Set-Cookie", "s"))
    response = AttemptResult.completed(
        200, 0.1, headers=headers, body=b"x" * (STORED_SUCCESS_BODY_CHARS_MAX + 1)
    )
    assert stored_success(response) == {
        "version": STORED_VERSION,
        "headers": {"x-request-id": "r-1"},
        "body": "x" * (STORED_SUCCESS_BODY_CHARS_MAX - 1) + "…",
    }
    assert stored_success(AttemptResult.completed(204, 0.1, headers=(("Server", "nginx"),))) is None


def test_characters_unsafe_for_jsonb_and_terminals_are_replaced() -> None:
    response = AttemptResult.completed(
        400,
        0.1,
        headers=(("Server", "evil\udce9\x1b[2J"),),
        body=b"a\x00b\x1b]0;owned\x07\xff\n\tc",
    )
    stored = stored_response(response)
    assert stored["headers"]["server"] == "evil\ufffd [2J"
    assert stored["body"] == "a\ufffdb\ufffd]0;owned\ufffd\ufffd\n\tc"


@pytest.mark.parametrize("character", ["a", "é", "€", "😀"])
def test_a_long_body_is_truncated_between_characters(character: str) -> None:
    for before in ("", "x"):
        whole = before + character * (STORED_BODY_CHARS_MAX - len(before))
        assert (
            stored_response(AttemptResult.completed(200, 0.0, body=whole.encode()))["body"] == whole
        )
        stored = stored_response(
            AttemptResult.completed(200, 0.0, body=(whole + character).encode())
        )["body"]
        assert stored == whole[:-1] + "…"


@given(
    st.integers(100, 599),
    st.lists(st.tuples(st.sampled_from(["server", "via", "date", "x"]), st.text())),
    st.binary(max_size=20_000),
    st.text(),
)
def test_a_summary_is_always_bounded_json(
    status: int, headers: list[tuple[str, str]], body: bytes, detail: str
) -> None:
    response = AttemptResult.completed(
        status, 1.0, headers=tuple(headers), body=body, detail=detail
    )
    text = orjson.dumps(stored_response(response)).decode()
    # A remaining backslash is not an original one.
    assert "\\u0000" not in text.replace("\\\\", "")
    assert len(text.encode()) < 20_000
    assert len(response.body) <= RESPONSE_BODY_BYTES_MAX


@given(st.text(st.characters(exclude_categories=())))
def test_a_summary_fits_on_one_line(text: str) -> None:
    line = one_line(text)
    line.encode()
    assert len(line) <= DETAIL_CHARS_MAX
    assert line.splitlines() in ([], [line])


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"status": 503, "detail": "cut short"}, "it responded with 503"),
        ({"failure": "connect", "detail": "refused at a:1"}, "refused at a:1"),
        ({"failure": "dns"}, "its name has no address"),
        ({"failure": "of another version"}, "no response"),
        ({}, "no response"),
        (None, "no response"),
    ],
)
def test_a_stored_response_is_described(stored: Any, says: str) -> None:
    assert describe_response(stored) == says


@pytest.mark.parametrize("failure", Failure)
def test_a_failure_is_not_described_as_a_response(failure: Failure) -> None:
    assert "result" not in describe_response({"failure": failure.value})


def test_tenants_see_no_difference_between_ways_not_to_connect() -> None:
    """Neither the failure nor its duration shows whether a name leads into the network."""
    unreachable = (Failure.CONNECT, Failure.DNS, Failure.EGRESS_REFUSED)
    assert {generalize_failure(failure) for failure in unreachable} == {Failure.CONNECT}
    for fast_s, slow_s, shown_s in ((0.0001, 0.4, 1.0), (1.01, 2.0, 2.0)):
        for failure in unreachable:
            for elapsed_s in (fast_s, slow_s):
                assert generalize_elapsed_s(failure, elapsed_s) == shown_s
    assert generalize_elapsed_s(Failure.TIMEOUT, 0.5) == 0.5
    assert generalize_elapsed_s(None, 0.5) == 0.5
