"""Foreign values are quoted safely in a line that can be displayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.endpoint_config import parse_file
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import RetryPolicy
from outbox.core.model.text import count, one_line, quoted, singular, truncate
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def bomb() -> list[Any]:
    """Nine lists in each of nine lists, nine deep: written out, it does not fit in any memory."""
    value: list[Any] = ["x"] * 9
    for _ in range(8):
        value = [value] * 9
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "a bomb": bomb,
    "deep": deep,
    "digits": lambda: 10**5000,
    "digits below zero": lambda: -(10**5000),
    "text": lambda: "x" * 10**6,
    "mapping": lambda: {"a" * 10**6: bomb()},
    "bytes": lambda: b"\0" * 9999,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_a_large_deep_or_strange_value_is_truncated(name: str) -> None:
    value = VALUES[name]()
    assert len(quoted(value)) < 400
    for field in ("name", "lanes", "filter", "connect_timeout_s", "method", "types"):
        with pytest.raises(UsageError) as caught:
            EndpointSettings(**{"name": "a", "url": "b", field: value})
        assert len(str(caught.value)) < 600
    for field in ("base_s", "factor", "jitter", "attempts_max"):
        with pytest.raises(UsageError) as caught:
            RetryPolicy(**{field: value})
        assert len(str(caught.value)) < 600
    with pytest.raises(UsageError, match="is not the id of an endpoint"):
        parse_file({"endpoints": [{"name": "a", "url": "b", "id": value}]})


def test_short_values_are_quoted_as_they_are() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert quoted(7) == "7"
    assert truncate("shop") == "shop"
    assert truncate("x" * 81) == "x" * 79 + "…"
    assert truncate("a\udcff") == "a?"


def test_a_line_contains_no_terminal_control_sequences() -> None:
    assert one_line("a\n\tb\x1b[2J\u2028c\x00\ud800") == r"a b\u001b[2J c\u0000\ud800"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "event", "0 events"), (1, "delivery", "1 delivery"), (2, "delivery", "2 deliveries")],
)
def test_a_count_agrees_with_its_noun(number: int, noun: str, text: str) -> None:
    assert count(number, noun) == text


@pytest.mark.parametrize(
    ("nouns", "noun"),
    [("deliveries", "delivery"), ("lanes", "lane"), ("dead_letters", "dead_letter")],
)
def test_a_noun_is_found_from_its_plural(nouns: str, noun: str) -> None:
    assert singular(nouns) == noun
