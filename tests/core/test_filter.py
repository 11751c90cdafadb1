from __future__ import annotations

import pytest

from outbox.core.model.filter import validate_filter
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
        # A string literal may contain anything.
        '@.a == "** ? /* ( \\" \\\\1 $x"',
        '@."a?b" == "x\\\\1"',
        # Escaped: a backslash and a digit, both literal.
        '@.a like_regex "\\\\\\\\1"',
        '@.date == "2026-01-01"',
        '@.größe == "ü"',
    ],
)
def test_valid_conditions_are_accepted(text: str) -> None:
    validate_filter(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("@.**.a == 1", "every level"),
        ("@.**{2}.a == 1", "every level"),
        ("exists(@.a ? (@ > 1))", "a nested filter"),
        ("@.a == 1) ? (@.b == 2", '"\\)" has no opening bracket|nested filter'),
        ("@.a == 1)", "has no opening bracket"),
        ("(@.a == 1", 'a "\\)" is missing'),
        ('@.a == "x', "a string is not closed"),
        ('@.a == "x\\"', "a string is not closed"),
        ("@.a /* ** */ == 1", "comments"),
        ("@.\\u0061 == 1", "backslash"),
        ('@.a like_regex "(a)\\\\1"', "back-references"),
        ('@.a LIKE_REGEX   "(a)\\\\1"', "back-references"),
        ('@.a like_regex "(a)\\x5c1"', "back-references"),
        ('@.a like_regex "(a)\\u005c1"', "back-references"),
        ('@.a like_regex "(a)\\u{5c}\\x31"', "back-references"),
        ('@.a like_regex "\\\\\\\\\\\\1"', "back-references"),
        ("@.n[*] > @.n[*]", "compare with a constant"),
        ("@.a == $.b", "compare their difference"),
        ("1 == 1 && (((@.a))) != (1 + -@.b)", "compare with a constant"),
        ("@.a[@.b] <> 1 + $.c", "compare with a constant"),
        ("@.n[0, 0][0, 0][0, 0] == 1", "use one subscript"),
        ("@.n[(1), 2] == 1", "use one subscript"),
        ("@.n[(1] == 1", 'a "]" has no opening bracket'),
        ("@.n[1 == 1", 'a "]" is missing'),
        ("@.keyvalue() .KeyValue ().value == 1", "is allowed only once"),
        ('@.a like_regex "(?=a*b)a"', "lookaround"),
        ('@.a like_regex "x(?<!a*b)a"', "lookaround"),
        ("@.a == $x", "variables such as \\$x are not allowed"),
        ('@.a == $"x"', "variables such as"),
        ('@.t.datetime() < "2026-01-01".datetime()', "time zone"),
        ("@.t . Date() == @.u", "time zone"),
        ("@.a == 1\n", "control character"),
        ("@.a == \x00", "control character"),
        ("@.a == \udc80", "control character"),
        ("@.a == " + "1" * 1024, "longer than 1024 bytes"),
        ('@.a == "' + "é" * 510 + '"', "longer than 1024 bytes"),
    ],
)
def test_invalid_conditions_are_rejected_with_a_one_line_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        validate_filter(text)
    assert str(caught.value).startswith("filter: ")
    assert "\n" not in str(caught.value)
