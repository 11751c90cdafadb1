"""Single values that users write."""

from __future__ import annotations

import base64
import contextlib
import math
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from itertools import islice

import orjson

from outbox.core.messages.ed25519 import PAIR_BYTES, parse_private_key, parse_public_key
from outbox.core.messages.signature import format_secret, parse_key, parse_secret
from outbox.core.model import duration, pattern, retry_policy, retryable_statuses
from outbox.core.model.api_token import TokenSettings, is_fetch_token, is_token
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.event import check_text, check_type, encode_headers, encode_payload
from outbox.core.model.headers import NO_HEADERS, merge
from outbox.core.model.sql_names import quote_ident, quote_literal, schema_name
from outbox.core.schedules.cron import NICKNAMES, Cron
from outbox.errors import InvalidEvent, UsageError
from tests.fuzz.data import Data, fields, is_text
from tests.fuzz.target import Target, hold, refused

START = datetime(2026, 3, 28, 12, 30, tzinfo=UTC)
TICKS = 5


def durations(raw: bytes) -> None:
    """A parsed duration is finite, and round-trips through its text form."""
    data = Data(raw)
    text = data.text()
    try:
        seconds = duration.parse(text)
    except UsageError as error:
        refused(error, "durations", 200)
    else:
        hold(math.isfinite(seconds) and seconds >= 0, f"{text!r} is {seconds}")
        again = duration.parse(duration.exact(seconds))
        hold(math.isclose(again, seconds, abs_tol=1e-6), f"{seconds} is read back as {again}")
        hold(duration.rounded(seconds), "nothing is shown")
    policy = data.text()
    try:
        read = retry_policy.parse(policy)
    except UsageError as error:
        refused(error, "retry", 500)
    else:
        hold(retry_policy.parse(retry_policy.describe(read)) == read, f"{read} is not read back")
        for attempts in (1, 7, 10_000):
            low, high = read.delay_bounds_s(attempts)
            hold(0 <= low <= high < math.inf, f"attempt {attempts} waits {low} to {high}")
            read.exhausted(attempts, 1.0)
    items = data.text().split(",")
    try:
        chosen = retryable_statuses.parse(items)
    except UsageError as error:
        refused(error, "statuses", 500)
    else:
        bad = [each for each in chosen if not 100 <= each <= 599 or 200 <= each <= 299]
        hold(not bad and HTTPStatus.GONE not in chosen, f"{items} retries {bad}")


def cron(raw: bytes) -> None:
    """A cron run is at the local time of the expression, regardless of the start time."""
    data = Data(raw)
    zone, expression = data.pick(("UTC", "Europe/Berlin", "Australia/Lord_Howe")), data.text()
    name = data.maybe() or zone
    try:
        read = Cron(expression, name)
    except UsageError as error:
        refused(error, "cron")
        return
    moments = list(islice(read.after(START), TICKS))
    hold(moments == sorted(set(moments)) and moments[:1] > [START], f"not in order: {moments}")
    halfway = START + (moments[-1] - START) / 2
    in_two = [*read.between(START, halfway), *read.between(halfway, moments[-1])]
    hold(in_two == moments, f"in one piece {moments}, in two {in_two}")
    hold(read.latest_before(moments[0], moments[-1]) == moments[-1], "another one is the latest")
    minutes, hours = expression.split()[:2] if "@" not in expression else ("*", "*")
    for moment in moments:
        shown = moment.astimezone(read.zone)
        hold(shown.second == 0 and shown.microsecond == 0, f"{moment} is no whole minute")
        # Plain numbers are checked without a second cron parser.
        before = (moment - timedelta(hours=3)).astimezone(read.zone).utcoffset()
        if shown.utcoffset() == before and minutes.isdigit() and hours.isdigit():
            hold((shown.minute, shown.hour) == (int(minutes), int(hours)), f"{shown} is shown")


def patterns(raw: bytes) -> None:
    """A pattern matches what a reference matches by segments, and no other product type."""
    data = Data(raw)
    text, event_type = data.text(), data.text()
    try:
        matches = pattern.parse(text).fullmatch(event_type) is not None
    except UsageError as error:
        refused(error, "pattern")
        return
    hold(matches == _matches(text, event_type), f"{text!r} and {event_type!r}: {matches}")


_MARKS = str.maketrans("_-", "aa")


def _matches(text: str, event_type: str) -> bool:
    wanted, has = text.split("."), event_type.split(".")
    if not all(
        each.isascii() and not each.startswith("-") and each.translate(_MARKS).isalnum()
        for each in has
    ):
        return False
    if has[0] == "outbox" and len(has) > 1 and wanted[0] != "outbox":
        return False
    if event_type == pattern.PROBE and text != pattern.PROBE:
        return False
    if wanted[-1] == "**":
        if len(has) < len(wanted):
            return False
        wanted = [*wanted[:-1], *["*"] * (len(has) - len(wanted) + 1)]
    return len(wanted) == len(has) > 0 and all(
        one in ("*", another) for one, another in zip(wanted, has, strict=True)
    )


def texts(raw: bytes) -> None:
    """Names, types, keys, headers and payloads are rejected in one line, or can be stored."""
    data = Data(raw)
    name, event_type, key, header, value = (data.text() for _ in range(5))
    with contextlib.suppress(UsageError):
        schema_name(name)
        hold(_unquoted(quote_ident(name), '"') == name, f"{name!r} is quoted wrongly")
        name.encode()
    if is_text(name) and "\0" not in name:
        hold(_literal(quote_literal(name)) == name, f"{name!r} is quoted wrongly")
    for check in (
        lambda: check_type(event_type),
        lambda: check_text("key", key, 512),
        lambda: EndpointSettings(name=name, url="https://example.com/"),
        lambda: EndpointSettings(name="-", url="-", types=(event_type, name)),
        lambda: TokenSettings(name=name, scopes=("read",), tenant=key or None),
        lambda: hold(not (is_token(name) and is_fetch_token(name)), "a token is of one kind"),
    ):
        try:
            check()
        except UsageError as error:
            refused(error, "text")
    try:
        encoded = encode_headers({header: value})
    except InvalidEvent as error:
        refused(error, "headers")
        text = orjson.dumps({header: value}) if is_text(header + value) else b"{}"
        hold(
            not merge(NO_HEADERS, text) or len(value) > 8000,
            f"{header!r} is refused, and goes along",
        )
    else:
        carried = merge(NO_HEADERS, encoded.encode() if encoded else None)
        (name_of, value_of) = carried[0]
        hold(name_of == header and value_of == value.strip(" \t"), f"{header!r} becomes {carried}")
        f"{name_of}: {value_of}".encode("ascii")
    _payload(data.rest())


def _payload(raw: bytes) -> None:
    try:
        encoded = encode_payload(raw)
    except InvalidEvent as error:
        refused(error, "payload")
        return
    _jsonb(orjson.loads(encoded))


def _jsonb(value: object) -> None:
    """Require that jsonb can store a payload."""
    if isinstance(value, str):
        hold("\0" not in value and is_text(value), "jsonb cannot hold it")
    elif isinstance(value, dict):
        for name, each in value.items():
            _jsonb(name)
            _jsonb(each)
    elif isinstance(value, list):
        for each in value:
            _jsonb(each)


def _unquoted(text: str, mark: str) -> str:
    """Return what an SQL parser reads of a quoted text: up to the quote that is not doubled."""
    hold(text.startswith(mark), f"{text!r} does not begin with {mark}")
    found: list[str] = []
    i = 1
    while True:
        hold(i < len(text), f"{text!r} is not closed")
        if text[i] == mark:
            if text[i + 1 : i + 2] != mark:
                hold(i == len(text) - 1, f"{text!r} ends early")
                return "".join(found)
            i += 1
        found.append(text[i])
        i += 1


def _literal(text: str) -> str:
    escapes = text.startswith(" E")
    inside = _unquoted(text.removeprefix(" E"), "'")
    if not escapes:
        hold("\\" not in inside, f"{text!r} depends on a setting")
        return inside
    hold(inside.replace("\\\\", "").count("\\") == 0, f"{text!r} has an escape")
    return inside.replace("\\\\", "\\")


def secrets(raw: bytes) -> None:
    """A secret or a key round-trips, or is rejected without being shown."""
    data = Data(raw)
    for prefix in ("whsec_", "whpk_", "whsk_"):
        message = data.text()
        # Most inputs must begin like a secret, or nothing behind the prefix would be tested.
        text = message.removeprefix("!") if message.startswith("!") else prefix + message
        for parse in (parse_secret, parse_key, parse_public_key, parse_private_key):
            try:
                read = parse(text)
            except UsageError as error:
                refused(error, "secret", 300)
                inside = text.removeprefix(prefix)
                hold(len(inside) < 8 or inside not in str(error), f"{error} shows it")
                continue
            if parse is parse_secret:
                assert isinstance(read, bytes)
                hold(parse_secret(format_secret(read)) == read, "is not read back")
            if parse is parse_private_key:
                hold(len(base64.b64decode(text[5:] + "==")) in (32, PAIR_BYTES), "another size")


KEY = base64.b64encode(bytes(range(32))).decode()
PAIR = base64.b64encode(bytes(64)).decode()

TARGETS = (
    Target(
        name="durations",
        one=durations,
        seeds=(
            fields("90s", "standard", "429,5xx,500-504"),
            fields("1.5d", "base=5s,factor=2,cap=1h,jitter=none", "404"),
            fields("999999999d", "stepped,attempts=8,ratio=0.5,age=3d", "1xx,3xx,410-499"),
        ),
        words=(
            *retry_policy.KEYS, *retry_policy.PRESETS, "=", ",", "xx", "-", "inf", "nan", "1e9",
            "0.000001",
        ),
        runs=3000,
    ),
    Target(
        name="cron",
        one=cron,
        seeds=(
            fields("0*/5 * * * *"), fields("130 2 * * *"), fields("20 0 29 2 MON#1"),
            fields("1@daily"), fields("0*/30 1-3 L * 5L"), fields("00 0 1 1 *", "America/St_Johns"),
        ),
        words=(*NICKNAMES, "*/", "L", "#", "MON", "SUN", "JAN", " * * ", "-", ",", "?", "W", "LW",
               "America/New_York", "localtime", "../", "/etc/passwd", "\x00"),
        bytes_max=128,
        runs=75,
    ),
    Target(
        name="patterns",
        one=patterns,
        seeds=(fields("order.*", "order.paid"), fields("**", "outbox.probe"),
               fields("outbox.**", "outbox.probe"), fields("order.**", "order.item.added"),
               fields("order.*", "order.item.added"), fields("order-item.*", "order-item.re-sent"),
               fields("*", "-paid")),
        words=("outbox", "outbox.", "outbox.probe", "**", "*", ".", "order", "-", "\n", "é", "²"),
        bytes_max=300,
        runs=6000,
    ),
    Target(
        name="texts",
        one=texts,
        seeds=(
            fields("shop", "order.paid", "order-7", "X-Api-Key", "secret", '{"a":[1,"b",null]}'),
            fields('a"b\\c', "order.*", "é", "traceparent", "00-1\t", r'"\\\u0000"'),
            fields("obx_" + "a" * 43, "**", "\u2028", "Host", "x", '"\\ud800"'),
        ),
        words=("'", '"', "\\", "\\u0000", "\\ud800", "\\\\u0000", "\x00", "E'", "pg_", "\u2028",
               "information_schema", "\udcff".encode("utf-8", "surrogatepass"), "obx_", "(other)",
               "webhook-", "X-Lane", "\r\n", "1e999", "-0", "NaN", "[[[[", "{}", "\u202e"),
        runs=3000,
    ),
    Target(
        name="secrets",
        one=secrets,
        seeds=(fields(KEY, KEY, KEY), fields(PAIR, PAIR, PAIR), fields("!x", "!whsec_",
        "!whpk_" + KEY)),
        words=(KEY, PAIR, "=", "==", "whsec_", "whpk_", "whsk_", "-", "_", "+/", "\n", "é"),
        bytes_max=400,
        runs=2000,
    ),
)  # fmt: skip
