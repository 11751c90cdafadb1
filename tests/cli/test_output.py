"""Tables fit the terminal without breaking words."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import orjson
from hypothesis import given
from hypothesis import strategies as st

from outbox.cli.output import DISPENSABLE, SHORTEST, emit_json, fit

if TYPE_CHECKING:
    import pytest

NAMES = ("id", "pending", "state", *DISPENSABLE, *SHORTEST)
COLUMNS = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


def test_json_has_no_character_that_controls_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys and payloads are those of publishers; U+009B begins a control sequence in xterm."""
    value = "".join(map(chr, range(0x3000))) + "\ufeff"
    emit_json({"key": value})
    (line,) = capsys.readouterr().out.splitlines()
    reordering = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    assert [each for each in line if unicodedata.category(each) == "Cc"] == []
    assert reordering.isdisjoint(map(unicodedata.bidirectional, line))
    assert orjson.loads(line) == {"key": value}


def test_a_table_that_fits_is_unchanged() -> None:
    assert fit(["id", "url", "lane"], [3, 40, 16], 63) == {0: 3, 1: 40, 2: 16}


def test_text_is_shortened_before_a_column_is_left_out() -> None:
    assert fit(["id", "url", "lane"], [3, 40, 16], 43) == {0: 3, 1: 20, 2: 16}
    assert fit(["id", "url", "lane"], [3, 40, 16], 38) == {0: 3, 1: 33}


@given(columns=COLUMNS, room=st.integers(20, 200), data=st.data())
def test_a_table_fits_or_every_column_has_its_minimum(
    columns: list[str], room: int, data: st.DataObject
) -> None:
    naturals = data.draw(st.lists(st.integers(1, 60), min_size=len(columns), max_size=len(columns)))
    widths = fit(columns, naturals, room)
    total = sum(widths.values()) + 2 * (len(widths) - 1)
    if total > room:
        assert not any(columns[i] in DISPENSABLE for i in widths)
    for i, natural in enumerate(naturals):
        if i in widths and total <= room:
            assert min(natural, SHORTEST.get(columns[i], natural)) <= widths[i] <= natural
        elif i not in widths:
            assert columns[i] in DISPENSABLE
