"""The limits of a request's body: size, depth, and the number of its items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.connection.migrate import migrate
from outbox_api import request_body
from outbox_api.limits import (
    BODY_DEPTH_MAX,
    CONFIG_ENDPOINTS_MAX,
    EVENT_BYTES_MAX,
    MIB,
    PAYLOAD_BODY_BYTES_MAX,
)
from outbox_api.problem import Problem
from outbox_api.request_parsing import validate
from outbox_api.routes import ROUTES
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

EVENTS = next(route.bodies for route in ROUTES if route.operation_id == "post_events")


async def set_limit(database: Database, payload_bytes_max: int) -> None:
    async with database.at_hand() as connection:
        await migrate(connection, "relay", payload_bytes_max=payload_bytes_max)


def body(payload_bytes: int) -> bytes:
    return b'{"type":"a.b","payload":"' + b"x" * (payload_bytes - 2) + b'"}'


async def test_the_largest_payload_is_published(database: Database, api: Api) -> None:
    await set_limit(database, 3 * MIB)
    assert (await api.post("/v1/events", data=body(3 * MIB))).status == 201
    size = "SELECT max(octet_length(payload::text)) FROM outbox"
    assert await fetchval(database, size) == 3 * MIB
    # The limit of the payload is checked by the database, and is named.
    refused = await api.post("/v1/events", data=body(3 * MIB + 1))
    assert (refused.status, refused.detail) == (
        422, f"payload: {3 * MIB + 1} bytes as JSON, the limit is {3 * MIB}"
    )  # fmt: skip
    binary = b'{"type":"a.b","content_type":"a/b","payload_base64":"' + b"AAAA" * MIB + b'"}'
    assert (await api.post("/v1/events", data=binary)).status == 201
    # In Base64, a payload that is not JSON takes a third more.
    refused = await api.post("/v1/events", data=body(4 * MIB + EVENT_BYTES_MAX))
    assert refused.status == 413
    assert f"larger than {4 * MIB + EVENT_BYTES_MAX} bytes" in refused.detail


async def test_a_body_without_a_length_has_the_same_limit(database: Database, api: Api) -> None:
    await set_limit(database, 2 * MIB)
    headers = {"Authorization": f"Bearer {api.secret}", "Content-Type": "application/json"}

    async def chunks(count: int) -> Any:
        yield b'{"type":"a.b","payload":"'
        for _ in range(count):
            yield b"x" * (MIB // 8)
        yield b'"}'

    for count, status in ((15, 201), (22, 413)):
        async with api.session.post(
            api.url + "/v1/events", data=chunks(count), headers=headers
        ) as response:
            assert response.status == status


async def test_a_lower_limit_of_payloads_does_not_lower_that_of_bodies(
    database: Database, api: Api
) -> None:
    await set_limit(database, 4096)
    escaped = b'{"type":"a.b","payload":"' + b"\\u0061" * 4000 + b'"}'
    assert (await api.post("/v1/events", data=escaped)).status == 201
    assert (await api.post("/v1/events", data=b" " * PAYLOAD_BODY_BYTES_MAX)).status == 400


async def test_the_limit_is_read_again(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.post("/v1/events", data=body(2 * MIB))).status == 413
    monkeypatch.setattr(request_body, "PAYLOAD_LIMIT_KEEP_S", 0.0)
    await set_limit(database, 2 * MIB)
    assert (await api.post("/v1/events", data=body(2 * MIB))).status == 201


def _nested(opening: str, closing: str, depth: int) -> bytes:
    """An event whose payload has this depth, with the object around it."""
    inner = opening * (depth - 1) + "1" + closing * (depth - 1)
    return f'{{"type":"a.b","payload":{inner}}}'.encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"":', "}")])
def test_the_depth_of_a_body_is_that_of_its_parser(opening: str, closing: str) -> None:
    request_body.parse(_nested(opening, closing, BODY_DEPTH_MAX), EVENTS)
    with pytest.raises(Problem) as caught:
        request_body.parse(_nested(opening, closing, BODY_DEPTH_MAX + 1), EVENTS)
    assert caught.value.kind.status == 400
    assert "depth" in caught.value.detail or "recursion" in caught.value.detail.lower()


async def test_a_body_that_is_too_deep_is_a_400(api: Api) -> None:
    for body in (b"[" * 100_000, _nested("[", "]", 100_000), _nested('{"":', "}", 100_000)):
        assert (await api.post("/v1/events", data=body)).status == 400
    # A number that a float cannot hold is parsed by another parser, whose depth is smaller.
    deep = _nested("[", "]", BODY_DEPTH_MAX).replace(b"1", b"0." + b"1" * 40)
    assert (await api.post("/v1/events", data=deep)).status < 500


def test_every_list_in_a_request_is_limited_and_checked_up_to_the_first_error() -> None:
    models = {m for route in ROUTES for m in (*route.bodies, route.query) if m is not None}
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


MODELS = {model: None for route in ROUTES for model in route.bodies}


@pytest.mark.parametrize("model", MODELS)
def test_validation_stops_at_the_first_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox_api import request_parsing

    counts: list[int] = []
    describe = request_parsing.describe_errors

    def counted(errors: Any, *rest: Any) -> str:
        counts.append(len(errors))
        return describe(errors, *rest)

    monkeypatch.setattr(request_parsing, "describe_errors", counted)
    fields = list(model.model_fields)
    for value in ([[]] * 3000, {f"k{n}": 1 for n in range(3000)}, [{"x": 1, "y": 2}] * 3000):
        for name in fields:
            with pytest.raises(Problem):
                validate(model, {name: value, "no_such_field": 1}, "the body")
            try:
                validate(model, {name: value}, "the body")
            except Problem:
                assert counts[-1] <= 1 + len(fields), name
