"""What one request costs the relay beside which the API runs: pauses of its loop, and memory.

The walk sends the costliest bodies to every operation of the OpenAPI document.  It measures CPU
time, not the clock, so that a loaded machine does not matter: of each callback of the event loop,
and of each parse in a thread, which may hold the GIL from its beginning to its end and so pauses
the loop as well.  Handlers process large bodies in a thread too, in Python, where the interpreter
switches threads every 5 ms.  The client has its own thread, and its CPU time does not count.
"""

from __future__ import annotations

import asyncio
import gc
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox_api import request_body
from outbox_api.endpoint_config import CONFIG_ENDPOINTS_MAX
from outbox_api.events import TRACED_EVENTS_MAX
from outbox_api.problem import Problem
from outbox_api.request_parsing import validate
from outbox_api.route import REQUEST_BODY_BYTES_MAX, REQUEST_BODY_VALUES_MAX, SMALL_BYTES_MAX
from outbox_api.routes import ROUTES
from tests.support.api import api_document, make_token, serving
from tests.support.costs import (
    MEMORY_BYTES_MAX,
    UNLIMITED,
    connected_client,
    memory_bytes,
    only_on_linux,
    reset_peak,
)
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.costs import Costs
    from tests.support.postgres import Database

DEPTH = 1000
"""One level more than a parser of ours accepts, with the body around it."""
PAYLOAD_ARRAYS = 50_000
"""More than a request may have: the event was published in SQL."""
PUBLISH_ARRAYS = """
SELECT count(publish(type => 'a.b', key => 'k', payload =>
             (SELECT jsonb_agg('[]'::jsonb) FROM generate_series(1, $1::int))))
  FROM generate_series(1, $2::int)
"""


# ------------------------------------------------------------------ the bodies


def _fill(before: bytes, each: bytes, after: bytes, size: int) -> bytes:
    """Repeat an item, comma-separated, up to a size."""
    count = (size - len(before) - len(after)) // (len(each) + 1)
    return before + b",".join([each] * count) + after


def _entries(size: int) -> bytes:
    return b",".join(b'"k%d":1' % n for n in range(size // 12))


def _values(size: int) -> dict[str, Callable[[], bytes]]:
    """Values of about this size, each costly in its own way."""
    return {
        "numbers": lambda: _fill(b"[", b"1", b"]", size),
        "floats": lambda: _fill(b"[", b"1.5", b"]", size),
        "texts": lambda: _fill(b"[", b'"ab"', b"]", size),
        "nulls": lambda: _fill(b"[", b"null", b"]", size),
        "empty arrays": lambda: _fill(b"[", b"[]", b"]", size),
        "empty objects": lambda: _fill(b"[", b"{}", b"]", size),
        "as many arrays as are allowed": lambda: _fill(b"[", b"[null]", b"]", min(size, 130_000)),
        "as many objects as are allowed": lambda: _fill(b"[", b'{"":1}', b"]", min(size, 130_000)),
        "entries": lambda: b"{" + _entries(size) + b"}",
        "deep arrays": lambda: b"[" * DEPTH + b"]" * DEPTH,
        "deep objects": lambda: b'{"":' * DEPTH + b"1" + b"}" * DEPTH,
        "unclosed": lambda: b"[" * size,
        "long text": lambda: b'"' + b"a" * size + b'"',
        "wide text": lambda: '"\U0001f600'.encode() + b"a" * size + b'"',
        "escapes": lambda: b'"' + b"\\u0101" * (size // 6) + b'"',
        "backslashes": lambda: b'"' + b"\\\\" * (size // 2 - 6) + b'\\u0000"',
        "digits": lambda: b"9" * min(size, 300) + b"0" * (size - 300),
        "fraction": lambda: b"0." + b"9" * size,
        "commas in text": lambda: b'"' + b"," * size + b'"',
    }


def _bodies(fields: list[str], size: int) -> Iterator[tuple[str, bytes]]:
    """Bodies of at most this size: each field with each value, and what has no field."""
    room = size - 100
    yield "unknown fields", b"{" + _entries(room) + b"}"
    yield "a long name", b'{"' + b"a" * room + b'":1}'
    yield "white space", b" " * room + b"{}"
    yield "not JSON", b"\xff" * room
    for name in fields:
        field = f'"{name}":'.encode()
        yield f"{name} again and again", _fill(b"{", field + b"1", b"}", room)
        for what, value in _values(room - 20).items():
            yield f"{name}: {what}", b"{" + field + value() + b"}"


def _of_events(size: int) -> Iterator[tuple[str, bytes]]:
    event = b'{"type":"a.b","key":"k","once_for":"1h","headers":{"A":"b"},"once":"%d"}'
    yield "a thousand events", b'{"events":[' + b",".join(event % n for n in range(1000)) + b"]}"
    wrong = _fill(b'{"events":[', b'{"type":1,"key":1,"x":1}', b"]}", size)
    yield "events that are wrong", wrong
    for what in ("as many arrays as are allowed", "as many objects as are allowed", "floats"):
        value = _values(260_000)[what]
        yield f"a payload: {what}", b'{"type":"a.b","payload":' + value() + b"}"


def _of_declaration(size: int) -> Iterator[tuple[str, bytes]]:
    declared = b'{"name":"n%d","url":"https://e.example/%d","types":["a.*"],"lanes":%d}'
    for lanes in (1, 2):
        several = b",".join(declared % (n, n, lanes) for n in range(CONFIG_ENDPOINTS_MAX))
        yield f"endpoints with {lanes} lanes", b'{"endpoints":[' + several + b"]}"
    large = b'{"name":"n%d","url":"https://e.example/","headers":{"A":"' + b"'" * 950 + b'"}}'
    several = b",".join(large % n for n in range(CONFIG_ENDPOINTS_MAX))
    yield "large endpoints", b'{"endpoints":[' + several + b"]}"
    yield "an endpoint's unknown settings", b'{"endpoints":[{' + _entries(size - 100) + b"}]}"
    long = b'{"endpoints":[{"name":"a","url":"https://e.example/","%s":1}]}'
    yield "a setting with a long name", long % (b"a" * (size - 100))


MORE = {"post_events": _of_events, "put_declaration": _of_declaration}
LIMITS = {route.operation_id: route.body_bytes_max for route in ROUTES}


def _kind(schema: dict[str, Any]) -> bytes:
    relevant = {name: schema[name] for name in schema if name not in ("title", "description")}
    return orjson.dumps(relevant, option=orjson.OPT_SORT_KEYS)


def _operations() -> Iterator[tuple[str, str, str, list[str] | None]]:
    """Method, path, operationId and fields of the body, of everything in the document."""
    described = api_document()
    seen: set[tuple[int, bytes]] = set()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            fields = None
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                if "$ref" in schema:
                    name = schema["$ref"].rpartition("/")[2]
                    schema = described["components"]["schemas"][name]
                # One field of each kind and size.
                kinds = {
                    (LIMITS[operation["operationId"]], _kind(field)): name
                    for name, field in schema["properties"].items()
                }
                fields = [name for kind, name in kinds.items() if kind not in seen]
                seen.update(kinds)
            yield method.upper(), re.sub(r"{\w+}", "7", path), operation["operationId"], fields


# --------------------------------------------------------------------- the walk


@pytest.mark.full
@only_on_linux
def test_the_peak_of_memory_is_measured() -> None:
    for _ in range(3):
        before = reset_peak()
        values = orjson.loads(_fill(b"[", b"[]", b"]", 4 * 1024 * 1024))
        del values
        assert memory_bytes("VmHWM") - before > MEMORY_BYTES_MAX


@pytest.mark.full
@pytest.mark.one_major
@only_on_linux
async def test_no_body_pauses_the_relay_or_fills_its_memory(
    database: Database, costs: Costs
) -> None:
    token = await make_token(database)
    async with serving(database, api_rate_max=100_000.0) as api:
        statuses = await asyncio.to_thread(_walk, api.url, token, costs)
    costs.check()
    assert {200, 201, 413, 422} <= statuses


def _walk(url: str, token: str, costs: Costs) -> set[int]:
    """Send every body; returns the statuses of all responses."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    statuses: set[int] = set()
    for method, path, operation, fields in _operations():
        size = LIMITS[operation] if fields is not None else REQUEST_BODY_BYTES_MAX
        bodies = [("ignored", b"[" * size)] if fields is None else _bodies(fields, size)
        more = MORE[operation](size) if operation in MORE else ()
        for what, body in chain(bodies, more):
            assert len(body) <= size

            def send(method: str = method, path: str = path, body: bytes = body) -> int:
                with connected_client(url) as client:
                    client.request(method, path, body, headers)
                    response = client.getresponse()
                    assert response.status < 500, (method, path, response.read())
                    response.read()
                    return response.status

            # A request that was refused can be repeated.
            name = f"{operation}: {what}"
            statuses.add(costs.measure(name, send, repeatable=lambda status: status >= 400))
    return statuses


@pytest.mark.full
@pytest.mark.one_major
@only_on_linux
async def test_no_trace_pauses_the_relay_or_fills_its_memory(
    database: Database, costs: Costs
) -> None:
    """A response may be large as well: a token of a tenant publishes and reads payloads."""
    token = await make_token(database)
    await fetchval(database, PUBLISH_ARRAYS, PAYLOAD_ARRAYS, TRACED_EVENTS_MAX)
    headers = {"Authorization": f"Bearer {token}"}
    path = f"/v1/trace/k?payload=true&limit={TRACED_EVENTS_MAX}"

    def read(before: str = "") -> Any:
        with connected_client(api.url) as client:
            client.request("GET", path + before, headers=headers)
            response = client.getresponse()
            body = response.read()
        assert response.status == 200, body
        return orjson.loads(body)

    async with serving(database) as api:
        traced = await asyncio.to_thread(costs.measure, "trace", read)
        costs.check()
        outbox_ids = [each["event"]["outbox_id"] for each in traced["events"]]
        while traced["more"]:
            traced = await asyncio.to_thread(read, f"&before={outbox_ids[-1]}")
            outbox_ids += [each["event"]["outbox_id"] for each in traced["events"]]
    assert len(outbox_ids) == TRACED_EVENTS_MAX
    assert outbox_ids == sorted(set(outbox_ids), reverse=True)


@pytest.mark.full
@pytest.mark.one_major
@only_on_linux
async def test_refused_bodies_are_freed_without_the_garbage_collector(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object with many entries is one object for the collector, which may not run for long."""
    monkeypatch.setattr(request_body, "PARSING", UNLIMITED)
    token = await make_token(database)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    payload = b"{" + _entries((REQUEST_BODY_VALUES_MAX - 10) * 12) + b"}"
    async with serving(database) as api:

        def send(start: bytes) -> None:
            with connected_client(api.url) as client:
                client.request("POST", "/v1/events", start + payload + b"}", headers)
                response = client.getresponse()
                response.read()
                assert response.status == 422

        for start in (b'{"type":1,"payload":', b'{"zz":1,"payload":', b'{"type":"a b","payload":'):
            await asyncio.to_thread(send, start)
            before = reset_peak()
            gc.disable()
            try:
                for _ in range(40):
                    await asyncio.to_thread(send, start)
            finally:
                gc.enable()
            assert memory_bytes("VmHWM") - before < MEMORY_BYTES_MAX, start


# ------------------------------------------------------------------ the models


def test_every_list_in_a_request_is_limited_and_checked_up_to_the_first_error() -> None:
    models = {m for route in ROUTES for m in (route.body, route.query) if m is not None}
    checked = 0
    for model in models:
        schema = model.model_json_schema()
        for definition in (schema, *schema.get("$defs", {}).values()):
            for name, field in definition.get("properties", {}).items():
                for form in (field, *field.get("anyOf", ())):
                    if form.get("type") == "array":
                        assert form["maxItems"] <= CONFIG_ENDPOINTS_MAX, (model, name)
                        checked += 1
                    if isinstance(form.get("additionalProperties"), dict):
                        assert form["maxProperties"] <= 64, (model, name)
                        checked += 1
    assert checked > 10


def test_a_request_that_may_take_minutes_has_a_small_body() -> None:
    """Large bodies are held until the response, and only `LARGE_MAX` of all tenants at a time."""
    slow = [route for route in ROUTES if route.long and route.body is not None]
    assert [route.path for route in slow] == ["/v1/erase"]
    assert all(route.body_bytes_max <= SMALL_BYTES_MAX for route in slow)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body is not None])
def test_validation_stops_at_the_first_error(route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox_api import request_parsing

    counts: list[int] = []
    describe = request_parsing.describe_errors

    def counted(errors: Any, *rest: Any) -> str:
        counts.append(len(errors))
        return describe(errors, *rest)

    monkeypatch.setattr(request_parsing, "describe_errors", counted)
    fields = list(route.body.model_fields)
    for value in ([[]] * 3000, {f"k{n}": 1 for n in range(3000)}, [{"x": 1, "y": 2}] * 3000):
        for name in fields:
            with pytest.raises(Problem):
                validate(route.body, {name: value, "no_such_field": 1}, "the body")
            try:
                validate(route.body, {name: value}, "the body")
            except Problem:
                assert counts[-1] <= 1 + len(fields), (route.operation_id, name)


def test_the_number_of_values_is_limited_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(_: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(orjson, "loads", parse)
    model = next(route.body for route in ROUTES if route.body is not None)
    for body in (
        b"[" * 501,
        b"[{" * 251,
        b"1," * 1001,
        b'"' + b"," * 2000 + b'",' + b"1," * 1001,
        b'"\\\\",' * 1001,
        b'"",' * 2001,
    ):
        with pytest.raises(Problem) as caught:
            request_body.parse(body, model, 1000)
        assert caught.value.kind.status == 413, body[:20]


@pytest.mark.parametrize(
    "text", ["," * 300_000, "[" * 60_000, '",[{' * 60_000, "\\" * 99 + ',"' * 150_000]
)
def test_punctuation_in_strings_is_no_value(text: str) -> None:
    model = next(route.body for route in ROUTES if route.operation_id == "post_events")
    assert model is not None
    body: Any = request_body.parse(
        orjson.dumps({"type": "a.b", "payload": [text, {text: 1}]}), model, 1000
    )
    assert body.payload == [text, {text: 1}]
