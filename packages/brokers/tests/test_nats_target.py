"""URLs, credentials and stream settings of NATS endpoints."""

from __future__ import annotations

import pytest

from outbox.errors import UsageError
from outbox_brokers.nats.target import (
    NatsCredentials,
    NatsTarget,
    parse_credentials,
    parse_url,
)


def test_a_url_names_host_port_subject_and_stream() -> None:
    assert parse_url("nats://h/a.b_c") == NatsTarget("h", 4222, False, "a.b_c", None)
    assert parse_url("nats+tls://[2001:db8::1]:99/a?stream=S-1") == NatsTarget(
        "2001:db8::1", 99, True, "a", "S-1"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("tls://h/a", "must start with"),
        ("nats://u:p@h/a", "outbox endpoint credentials"),
        ("nats://h", "names no subject"),
        ("nats://h/a.*", "not a subject"),
        ("nats://h/a.>", "not a subject"),
        ("nats://h/a..b", "not a subject"),
        ("nats://h/a/b", "not a subject"),
        ("nats://h/$JS.API", "not a subject"),
        ("nats://h/" + ".".join("a" * 17), "16 tokens"),
        ("nats://h/_INBOX.a", "_INBOX"),
        ("nats://h/a?stream=", "name of a stream"),
        ("nats://h/a?stream=A.B", "name of a stream"),
        ("nats://h/a?strem=A", "unknown option 'strem'; there is stream=…"),
        ("nats://h/a?stream=A&stream=B", "given twice"),
    ],
)
def test_a_url_that_is_not_valid_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=r"^url: ") as raised:
        parse_url(url)
    assert reason in str(raised.value)


def test_credentials_have_three_forms() -> None:
    creds = "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n"
    assert parse_credentials(None) == NatsCredentials()
    assert parse_credentials("u:p:q") == NatsCredentials(user="u", password="p:q")  # noqa: S106
    assert parse_credentials("tok") == NatsCredentials(token="tok")  # noqa: S106
    assert parse_credentials(creds) == NatsCredentials(creds=creds)
    with pytest.raises(UsageError, match="no user"):
        parse_credentials(":secret")
