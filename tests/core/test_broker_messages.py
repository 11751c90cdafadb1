"""Messages of brokers, what their results mean, and where a lane goes on."""

from __future__ import annotations

import orjson
import pytest

from outbox.core.brokers.message import end_id, end_message, messages_of
from outbox.core.brokers.port import Appended, Fenced, Foreign, Position, Stop, StopKind
from outbox.core.brokers.results import append_outcome, failed_result
from outbox.core.brokers.take_over import Acknowledge, Hold, HoldReason, LaneBooks, Proceed, decide
from outbox.core.messages.message import prepare
from outbox.core.model.destination import is_stream, scheme_of
from outbox.core.model.headers import NO_HEADERS, EndpointHeaders, parse_lines, valid_headers
from outbox.core.model.message_format import MessageFormat
from outbox.core.model.response import Failure
from outbox.core.model.response_policy import AttemptOutcome
from outbox.destinations.broker_address import credentials_header, credentials_of
from outbox.errors import UsageError
from tests.core.lane_tables import delivery

CREDS = "-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n"


class Settings:
    """The settings that messages depend on."""

    def __init__(self, name: str = "envelope", headers: EndpointHeaders = NO_HEADERS) -> None:
        self.message_format = MessageFormat(name)  # type: ignore[arg-type]
        self.headers = headers


@pytest.mark.parametrize("name", ["envelope", "thin", "raw", "cloudevents", "cloudevents-binary"])
def test_a_message_is_a_request_without_its_http(name: str) -> None:
    settings = Settings(name)
    for each in (
        delivery(7),
        delivery(7)._replace(key="k", tenant="t", replay_of=("lane", 3), backfill_id=4),
        delivery(7)._replace(payload=b"\xff", content_type="a/b"),
        delivery(7)._replace(headers=b'{"traceparent": "00-1", "X-Own": "1"}'),
    ):
        (message,) = messages_of(settings, [each], 5)
        prepared = prepare(each, 5, message_format=settings.message_format)
        lines = [
            line
            for line in parse_lines(prepared.lines)
            if line[0].lower() not in ("user-agent", "webhook-id")
        ]
        assert list(message.headers) == lines
        assert message.body == prepared.body
        assert (message.sequence, message.delivery) == (7, prepared.message_id)


def test_an_end_entry_is_marked_and_names_what_was_before() -> None:
    message = end_message("endpoint-1-0", 8, 5, 4)
    headers = dict(message.headers)
    assert (headers["outbox-control"], headers["X-Sequence"]) == ("end", "8")
    assert headers["X-Previous-Sequence"] == "5"
    assert message.sequence == 8
    assert message.delivery == headers["X-Delivery"] == end_id("endpoint-1-0")
    assert end_id("endpoint-1-1") != end_id("endpoint-1-0")
    assert orjson.loads(message.body) == {
        "control": "end",
        "lane": "endpoint-1-0",
        "sequence": 8,
        "previous_sequence": 5,
        "lanes": 4,
    }


def test_each_message_names_the_one_before() -> None:
    messages = messages_of(Settings(), [delivery(3), delivery(5)], 2)
    previous = [dict(each.headers)["X-Previous-Sequence"] for each in messages]
    assert previous == ["2", "3"]


def test_credentials_are_in_no_message() -> None:
    own = valid_headers({"Authorization": "Bearer secret", "X-Team": "a"}, "X-")
    (message,) = messages_of(Settings(headers=own), [delivery(1)], 0)
    assert "secret" not in str(message.headers)
    assert dict(message.headers)["X-Team"] == "a"


@pytest.mark.parametrize("text", ["user:pass:word", ":password", "token", CREDS])
def test_credentials_are_read_as_they_were_given(text: str) -> None:
    assert credentials_of(credentials_header(text)) == text


@pytest.mark.parametrize("value", ["", "Basic", "Basic !", "Basic dG9rZW4=", "Digest x", "Bearer "])
def test_other_credentials_are_refused_without_being_quoted(value: str) -> None:
    with pytest.raises(UsageError) as refused:
        credentials_of(value)
    assert str(refused.value).startswith("headers: the credentials of a broker are")
    for text in ("", f"a\x00{value}"):
        with pytest.raises(UsageError, match="must be user:password"):
            credentials_header(text)


@pytest.mark.parametrize(
    ("standing", "expected", "decision"),
    [
        (Position(5, "d"), "d", Proceed(5)),
        (Position(5, None), "d", Proceed(5)),
        (Position(6, "d"), None, Proceed(6)),
        (Position(8, "d"), "d", Acknowledge(8)),
        (Position(8, "d"), "other", HoldReason.FOREIGN),
        (Position(8, None), "d", HoldReason.FOREIGN),
        (Position(5, "d"), "other", HoldReason.FOREIGN),
        (Position(4, "d"), "d", HoldReason.FORGOT),
        # It must not be filled again, which is for streams that have lost messages.
        (Position(4, "d"), "other", HoldReason.FOREIGN),
        (Position(0, None), None, HoldReason.FORGOT),
        (Position(10, "d"), None, HoldReason.AHEAD),
        (Foreign("x"), None, HoldReason.FOREIGN),
        (Fenced(3), None, HoldReason.FENCED),
    ],
)
def test_the_position_decides(standing: object, expected: str | None, decision: object) -> None:
    """Of nine sequences, five were delivered and the next two dead-lettered."""
    books = LaneBooks("lane", 5, 7, 9)
    found = decide(standing, books, expected)  # type: ignore[arg-type]
    if isinstance(found, Hold):
        assert found.reason is decision
        assert "lane" in found.detail or found.detail == "x"
    else:
        assert found == decision


def test_a_stop_is_passed_on() -> None:
    stop = Stop(StopKind.UNAVAILABLE, "away")
    assert decide(stop, LaneBooks("lane", 0, 0, 1), None) is stop
    assert failed_result(stop, 0.5).failure is Failure.UNAVAILABLE


def test_only_a_refused_message_is_at_fault() -> None:
    outcomes = {kind: append_outcome(Appended(0, Stop(kind, ""))) for kind in StopKind}
    refused = outcomes.pop(StopKind.REFUSED)
    assert refused is AttemptOutcome.REFUSED
    assert set(outcomes.values()) == {AttemptOutcome.RETRY}
    assert append_outcome(Appended(1)) is AttemptOutcome.DELIVERED


@pytest.mark.parametrize(
    "url", ["http://h", "HTTPS://h/redis://x", "h/p?to=https://x", "1s://h", "://h", "", "mailto:a"]
)
def test_what_has_no_other_scheme_is_for_http(url: str) -> None:
    assert not is_stream(url)


@pytest.mark.parametrize("url", ["redis://h/s", "REDISS://h/s", "ftp://h", "x+y-z.1://h"])
def test_every_other_scheme_is_that_of_a_stream_whatever_is_installed(url: str) -> None:
    assert is_stream(url)
    assert scheme_of(url) == url.partition(":")[0].lower()
