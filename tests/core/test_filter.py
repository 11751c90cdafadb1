from __future__ import annotations

import pytest

from outbox.core.model.filter import check
from outbox.errors import UsageError


@pytest.mark.parametrize(
    "text",
    [
        "@.total > 100",
        '@.status == "paid" && (@.total >= 10.5 || @.vip == true)',
        '@.items[*].sku starts with "A"',
        "exists(@.refund)",
        '@.name like_regex "^\\\\d+$" flag "i"',
        "(@.total - @.paid) > 0",
        "100 < @.total",
        "(@.a > 1 && $.b > 1) || !(@.c[0 to 3] <= -1)",
        "exists(@.a) && @.b[$.n] == 1",
        '(@.a like_regex "x") is unknown && 1 == @.b',
        "@.keyvalue().value == 1",
        "@.* > 1",
        # In a text, anything goes.
        '@.a == "** ? /* ( \\" \\\\1 $x"',
        '@."a?b" == "x\\\\1"',
        # Escaped: a backslash and a digit, both as they are.
        '@.a like_regex "\\\\\\\\1"',
        '@.date == "2026-01-01"',
        '@.größe == "ü"',
    ],
)
def test_conditions_that_are_fine(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("@.**.a == 1", "every level"),
        ("@.**{2}.a == 1", "every level"),
        ("exists(@.a ? (@ > 1))", "a filter inside the filter"),
        ("@.a == 1) ? (@.b == 2", '"\\)" closes what was never opened|inside the filter'),
        ("@.a == 1)", "closes what was never opened"),
        ("(@.a == 1", 'a "\\)" is missing'),
        ('@.a == "x', "a text is not closed"),
        ('@.a == "x\\"', "a text is not closed"),
        ("@.a /* ** */ == 1", "comments"),
        ("@.\\u0061 == 1", "backslash"),
        ('@.a like_regex "(a)\\\\1"', "back-references"),
        ('@.a LIKE_REGEX   "(a)\\\\1"', "back-references"),
        ('@.a like_regex "(a)\\x5c1"', "back-references"),
        ('@.a like_regex "(a)\\u005c1"', "back-references"),
        ('@.a like_regex "(a)\\u{5c}\\x31"', "back-references"),
        ('@.a like_regex "\\\\\\\\\\\\1"', "back-references"),
        ("@.n[*] > @.n[*]", "compare with a constant"),
        ("@.a == $.b", "by their difference"),
        ("1 == 1 && (((@.a))) != (1 + -@.b)", "compare with a constant"),
        ("@.a[@.b] <> 1 + $.c", "compare with a constant"),
        ("@.n[0, 0][0, 0][0, 0] == 1", "one subscript at a time"),
        ("@.n[(1), 2] == 1", "one subscript at a time"),
        ("@.n[(1] == 1", 'a "]" closes what was never opened'),
        ("@.n[1 == 1", 'a "]" is missing'),
        ("@.keyvalue() .KeyValue ().value == 1", "may stand in it once"),
        ('@.a like_regex "(?=a*b)a"', "looking ahead"),
        ('@.a like_regex "x(?<!a*b)a"', "looking ahead"),
        ("@.a == $x", "there are no variables, such as \\$x"),
        ('@.a == $"x"', "there are no variables"),
        ('@.t.datetime() < "2026-01-01".datetime()', "time zone"),
        ("@.t . Date() == @.u", "time zone"),
        ("@.a == 1\n", "control character"),
        ("@.a == \x00", "control character"),
        ("@.a == \udc80", "control character"),
        ("@.a == " + "1" * 1024, "longer than 1024 bytes"),
        ('@.a == "' + "é" * 510 + '"', "longer than 1024 bytes"),
    ],
)
def test_conditions_that_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        check(text)
    assert str(caught.value).startswith("filter: ")
    assert "\n" not in str(caught.value)
