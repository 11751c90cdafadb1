from __future__ import annotations

import pytest

from outbox.core.model import duration
from outbox.core.model.duration import MAX_S
from outbox.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5d", 129600.0), ("0", 0.0)],
)
def test_a_duration_is_parsed_with_its_unit(text: str, seconds: float) -> None:
    assert duration.parse(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "x", "1w", "-1", "1e9", "1.", " 1", "\u0661s", "1s\n", "\udcff"]
)
def test_an_invalid_duration_is_rejected_with_a_one_line_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time such as"):
        duration.parse(text)


def test_durations_round_trip_up_to_a_century() -> None:
    for text in ("36525d", "876600h", "3155760000s", "3155759999.999999s"):
        seconds = duration.parse(text)
        assert seconds <= MAX_S
        assert duration.parse(duration.exact(seconds)) == pytest.approx(seconds, abs=1e-6)
    for text in ("36526d", "9999999999s", "9999999999d", "36525.000001d"):
        with pytest.raises(UsageError, match="longer than a century"):
            duration.parse(text)


def test_a_time_that_is_over_is_rounded_to_none() -> None:
    assert duration.rounded(-3.0) == "0s"


def test_a_time_since_the_infinite_past_can_be_formatted() -> None:
    assert duration.rounded(float("inf")) == "forever"
