from __future__ import annotations

import pytest

from outbox.errors import UsageError
from outbox_brokers.rabbitmq.target import StreamTarget, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        (
            "rabbitmq-stream://rabbit.example/orders",
            StreamTarget(False, "rabbit.example", 5552, "orders"),
        ),
        (
            "rabbitmq-stream+tls://rabbit.example/orders",
            StreamTarget(True, "rabbit.example", 5551, "orders"),
        ),
        (
            "rabbitmq-stream://[::1]:1234/a%20b?vhost=%2Fshop&create=1",
            StreamTarget(False, "::1", 1234, "a b", "/shop", True),
        ),
        (
            "rabbitmq-stream://10.0.0.1/orders?create=0",
            StreamTarget(False, "10.0.0.1", 5552, "orders"),
        ),
    ],
)
def test_a_url_names_the_streams_of_an_endpoint(url: str, target: StreamTarget) -> None:
    assert parse_url(url) == target
    assert target.stream_of("lane-1") == f"{target.stream}.lane-1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://rabbit.example/orders", "rabbitmq-stream://"),
        ("rabbitmq-stream://user:secret@rabbit.example/orders", "outbox endpoint credentials"),
        ("rabbitmq-stream://rabbit.example", "names no stream"),
        ("rabbitmq-stream://rabbit.example/a/b", "name of a stream"),
        ("rabbitmq-stream://rabbit.example/%ff", "UTF-8"),
        ("rabbitmq-stream://rabbit.example/a%00", "cannot be printed"),
        ("rabbitmq-stream://rabbit.example/" + "a" * 136, "longer than 135 bytes"),
        ("rabbitmq-stream://rabbit.example/a?create=yes", "create=1"),
        ("rabbitmq-stream://rabbit.example/a?vhost=", "vhost is empty"),
        ("rabbitmq-stream://rabbit.example/a?vhost=a&vhost=b", "given twice"),
        ("rabbitmq-stream://rabbit.example/a?tls=0", "there is vhost=… and create=…"),
        ("rabbitmq-stream://rabbit.example/a?create", "malformed options"),
    ],
)
def test_other_urls_are_refused_with_one_line(url: str, words: str) -> None:
    with pytest.raises(UsageError, match="url: ") as error:
        parse_url(url)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
