from __future__ import annotations

import pytest

from outbox.core.model.response_policy import RETRYABLE
from outbox.core.model.retryable_statuses import parse
from outbox.errors import UsageError


def test_statuses_classes_and_ranges_are_combined() -> None:
    assert parse(["408", "500-504", "503"]) == {408, 500, 501, 502, 503, 504}
    assert parse(["5xx"]) == parse(["5XX"]) == frozenset(range(500, 600))
    assert parse(["408", "421", "425", "429", "5xx"]) == RETRYABLE
    assert parse([]) == frozenset()


def test_410_is_never_retried_even_inside_a_range() -> None:
    assert 410 not in parse(["4xx", "400-420"])
    assert 409 in parse(["4xx"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("200", "success"),
        ("2xx", "success"),
        ("199-200", "success"),
        ("410", "is never retried"),
        ("504-500", "ends before it starts"),
        ("", "not a status"),
        ("600", "not a status"),
        ("6xx", "not a status"),
        ("99", "not a status"),
        ("5x", "not a status"),
        ("500-", "not a status"),
        (" 500", "not a status"),
        ("500\n", "not a status"),
        ("\u0665\u0660\u0660", "not a status"),
    ],
)
def test_an_invalid_status_list_is_rejected_with_a_one_line_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(["429", text])
    assert "\n" not in str(caught.value)
