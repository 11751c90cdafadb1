"""Tables fit the terminal without breaking words."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING

import orjson
from hypothesis import given
from hypothesis import strategies as st

from outbox.cli.output import (
    DISPENSABLE,
    SHORTEST,
    echo,
    emit_document,
    emit_json,
    fit,
    style,
)

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


def test_a_style_is_kept_and_one_in_a_value_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    hostile = "\x1b[8mhidden\nFALSE LINE"
    echo(f"{style('a', bold=True)} {hostile}", style(hostile, fg="red"))
    escaped = r"\u001b[8mhidden\u000aFALSE LINE"
    assert capsys.readouterr().out == (f"\x1b[1ma\x1b[0m {escaped}\n\x1b[31m{escaped}\x1b[0m\n")


def test_a_file_is_exact_unless_it_goes_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emit_document("a: \u202e\n")
    assert capsys.readouterr().out == "a: \u202e\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    emit_document("a: \u202e\n")
    assert capsys.readouterr().out == "a: \\u202e\n"
