from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model import pattern
from outbox.errors import UsageError

words = st.sampled_from(["outbox", "order", "paid", "Item_2", "_", "7"])
types = st.lists(words, min_size=1, max_size=5).map(".".join)
patterns = st.builds(
    lambda segments, last: ".".join([*segments, *last]),
    st.lists(words | st.just("*"), min_size=1, max_size=4),
    st.sampled_from([(), (), ("**",)]),
) | st.just("**")


def matches(text: str, event_type: str) -> bool:
    return pattern.parse(text).fullmatch(event_type) is not None


def reference(text: str, event_type: str) -> bool:
    """Return what a pattern means, segment by segment."""
    wanted, segments = text.split("."), event_type.split(".")
    if segments[0] == "outbox" and len(segments) > 1 and wanted[0] != "outbox":
        return False
    if wanted[-1] == "**":
        wanted.pop()
        if len(segments) <= len(wanted):
            return False
        segments = segments[: len(wanted)]
    return len(wanted) == len(segments) and all(
        want in ("*", segment) for want, segment in zip(wanted, segments, strict=True)
    )


@given(patterns, types)
def test_a_pattern_matches_like_the_reference(text: str, event_type: str) -> None:
    assert matches(text, event_type) == reference(text, event_type)


@given(st.lists(patterns | st.just(pattern.PROBE), max_size=8), types | st.just(pattern.PROBE))
def test_a_set_finds_the_patterns_that_match_individually(
    texts: list[str], event_type: str
) -> None:
    many = pattern.Patterns()
    for n, text in enumerate(texts):
        many.add(text, n)
    assert many.matching(event_type) == {
        n for n, text in enumerate(texts) if matches(text, event_type)
    }


@given(types, st.data())
def test_a_type_matches_itself_with_any_segment_but_outbox_blanked(
    event_type: str, data: st.DataObject
) -> None:
    segments = event_type.split(".")
    n = data.draw(st.integers(0, len(segments) - 1))
    blanked = ".".join([*segments[:n], "*", *segments[n + 1 :]])
    assert matches(event_type, event_type)
    operational = event_type.startswith("outbox.")
    assert matches(blanked, event_type) == (n > 0 or not operational)
    assert matches("**", event_type) == (not operational)


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("order.paid", ["order.paid"], ["order", "order.paid.x", "Order.paid", "orderxpaid"]),
        ("order.*", ["order.paid"], ["order", "order.item.added", "border.paid"]),
        ("order.**", ["order.paid", "order.item.added"], ["order", "orders.paid"]),
        ("*.added", ["item.added"], ["added", "order.item.added", "outbox.added"]),
        ("*.*.**", ["a.b.c", "a.b.c.d"], ["a.b", "outbox.b.c"]),
        ("*", ["order", "outbox", "outboxes"], ["order.paid"]),
        ("**", ["order", "outbox", "outboxes.x", "a.outbox.b"], ["outbox.lane.ended"]),
        ("outbox.*", ["outbox.ended"], ["outbox", "outbox.lane.ended", "outbox.probe"]),
        (
            "outbox.**",
            ["outbox.ended", "outbox.probe.x", "outbox.probes"],
            ["outbox", "outbox.probe"],
        ),
        ("outbox.probe", ["outbox.probe"], ["outbox.probes"]),
        ("outbox", ["outbox"], ["outbox.ended"]),
    ],
)
def test_documented_examples_match(text: str, yes: list[str], no: list[str]) -> None:
    assert [t for t in yes + no if matches(text, t)] == yes


@pytest.mark.parametrize("event_type", ["", "a\n", "a.b\n", "a.", ".a", "a..b", "ä", "a.٣", "a b"])
def test_an_invalid_type_matches_nothing(event_type: str) -> None:
    for text in ("**", "*", "a.*", "*.b", "a.**", "*.**"):
        assert not matches(text, event_type)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a b",
            " a",
            "a\n",
            "ä",
            "٣",
            "-a",
            "a.-b",
            "a/b",
            "a\x00",
            "a\udcff",
        ),
        *(
            "**.a",
            "a.**.b",
            "**.**",
            "a*",
            "*a",
            "***",
            "a.b*",
            "(a)",
            "a|b",
            "[a-z]",
            "\\w",
            "^a$",
        ),
    ],
)
def test_an_invalid_pattern_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="type pattern"):
        pattern.parse(text)
    with pytest.raises(UsageError, match="type pattern"):
        pattern.Patterns().add(text, 1)


@given(st.text(max_size=20))
def test_any_text_is_a_pattern_or_rejected(text: str) -> None:
    try:
        compiled = pattern.parse(text)
    except UsageError:
        return
    allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.*")
    assert set(text) <= allowed
    literal = text.replace("*", "x")
    assert (compiled.fullmatch(literal) is not None) == reference(text, literal)


def test_a_pattern_is_limited_to_the_length_of_a_type() -> None:
    longest = "a" * pattern.TYPE_BYTES_MAX
    assert matches(longest, longest)
    with pytest.raises(UsageError, match="longer than 255 bytes"):
        pattern.parse(longest + "a")
