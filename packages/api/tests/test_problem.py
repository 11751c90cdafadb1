"""Problem details use the terms of the API, not those of the command line or of Python."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from multidict import MultiDict

from outbox_api.events import EventsQuery, NewEvent, NewEvents
from outbox_api.problem import Problem
from outbox_api.request_body import parse
from outbox_api.request_parsing import read_query, validate
from outbox_api.routes import ROUTES
from outbox_api.validation_errors import describe_errors
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from outbox_api.route import Route
    from tests.support.api import Api
    from tests.support.postgres import Database

URL = "http://127.0.0.1:9/"
ODD: list[Any] = [
    "?", "", [], [1], {}, {"a": 1}, -1, 0, 1.5, True, None, 10**30, ["?"] * 1001, float("nan"),
]  # fmt: skip
MODELS = list(dict.fromkeys(m for r in ROUTES for m in (r.query, *r.bodies) if m is not None))


def strange(detail: str) -> str | None:
    """Words in a problem that only the source code or a command's help explains."""
    found = re.search(
        r"--\w|tuple|literal|dict\b|validation|\bInput\b|another type|\[['\"]|ID…|e\+\d", detail
    )
    return found and f"{found[0]!r} in {detail!r}"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_an_invalid_field_is_rejected_in_plain_words(model: Any) -> None:
    reported = []
    for name in [*model.model_fields, "nothing-of-it"]:
        for value in ODD:
            try:
                validate(model, {name: value}, "the body")
            except Problem as problem:
                reported.append(problem.detail)
    assert reported
    assert [strange(each) for each in reported if strange(each)] == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"events": []}, "events: has 0 items, must have at least one"),
        (
            {"events": [{"type": "a.b"}] * 1001},
            "events: has 1001 items, at most 1000 are allowed in one request",
        ),
        ({"events": [{"type": 7}]}, "events.0.type: must be a string"),
        ({"type": "a.b", "tpye": 1}, 'the body: unknown field "tpye"; did you mean "type"?'),
    ],
)
def test_problems_of_publishing(values: dict[str, Any], says: str) -> None:
    with pytest.raises(Problem) as caught:
        parse(orjson.dumps(values), (NewEvent, NewEvents))
    assert caught.value.detail == says


def test_an_unknown_validation_error_is_reported() -> None:
    reported = describe_errors([{"type": "url_scheme", "loc": ("type",)}], NewEvents, "the body")
    assert reported == "type: must be another type"


@pytest.mark.parametrize("name", ["str", "int", "filter[type]", "list[x]"])
def test_a_field_named_like_an_internal_type_is_unknown(name: str) -> None:
    with pytest.raises(Problem) as caught:
        read_query(MultiDict({name: "x"}), EventsQuery)
    assert caught.value.detail.startswith(f'the query: unknown field "{name}"; known: limit')


def test_quotations_in_a_problem_are_truncated_without_control_characters() -> None:
    with pytest.raises(Problem) as caught:
        validate(NewEvents, {"\x1b[2J" * 100_000: 1}, "the body")
    detail = caught.value.to_json()["detail"]
    assert len(detail) < 1000
    assert detail.isprintable()


MISTAKES = (
    ("POST", "/v1/events", [{"type": "a.b"}], {}, 422,
     'the body: must be a JSON object; send several as {"events": [...]}'),
    ("GET", "/v1/dead-letters", None, {"state": "foo"}, 422,
     "state: must be dead or replaying or replayed or dead_again or discarded or all"),
    ("POST", "/v1/endpoints", {"name": "x", "url": URL, "retries": "patient"}, {}, 422,
     'the body: unknown field "retries"; did you mean "retry"?'),
    ("PUT", "/v1/declaration", {"endpoints": [{"name": "x", "url": URL, "type": "a"}]}, {},
     422, 'endpoints[0]: there is no setting "type"; did you mean "types"?'),
    ("GET", "/v1/events", None, {"since": "1h", "until": "2h"}, 422,
     "until must be later than since"),
    ("POST", "/v1/erase", {}, {}, 422, "specify either tenant or key"),
    ("POST", "/v1/schedules", {"name": "nightly", "cron": "@daily", "type": "a.b"}, {}, 409,
     'schedule "nightly" exists already; use replace to change it'),
    ("DELETE", "/v1/endpoints/shop", None, {}, 409,
     'endpoint "shop" has 3 deliveries pending: wait until they are delivered, or '
     "dead-letter them (use drain or dead_letter)"),
    ("POST", "/v1/dead-letters/replay", {}, {}, 422,
     "select dead letters: by ids, all, or by endpoint, type, tenant, "
     "reason, since, until"),
)  # fmt: skip


@pytest.mark.one_major
async def test_messages_of_frequent_problems(
    api: Api, database: Database, subtests: pytest.Subtests
) -> None:
    await _furnish(api, database)
    for method, path, body, query, status, says in MISTAKES:
        with subtests.test(method=method, path=path, body=body, query=query):
            response = await api.request(method, path, body, **query)
            assert (response.status, response.detail) == (status, says)


async def _furnish(api: Api, database: Database) -> None:
    await add_endpoint(database, "shop")
    await fetchval(database, "UPDATE lane_counter SET last_seq = 3 RETURNING 1")
    made = {"name": "nightly", "cron": "@daily", "type": "a.b"}
    assert (await api.post("/v1/schedules", made)).status == 201


@pytest.mark.one_major
async def test_no_problem_mentions_command_line_flags(api: Api, database: Database) -> None:
    await add_endpoint(database, "quiet")
    await _furnish(api, database)
    assert (await api.post("/v1/endpoints/quiet/pause")).status == 200
    for _ in range(2):
        assert (await api.post("/v1/endpoints/shop/rotate-secret")).status == 200
    bodies: list[Any] = [
        {}, {"all": True, "ids": [1]}, {"ids": [7]}, {"endpoint": "x"}, {"reason": "x"},
        {"endpoint": "shop", "since": "1h", "until": "2h"}, {"endpoint": "x", "since": "1h"},
        {"type": "?"}, {"type": "outbox.x"}, {"events": [{"type": "?"}]},
        {"tenant": "a", "key": "b"},
        {"name": "shop", "url": URL}, {"name": "?", "url": "?"}, {"name": "x", "url": "ftp://x"},
        {"url": URL, "retry": {"preset": "x"}}, {"url": URL, "filter": "?"}, {"lanes": -1},
        {"name": "x", "url": URL, "tenant": "a", "all_tenants": True}, {"retryable": ["x"]},
        {"name": "nightly", "cron": "@daily", "type": "a.b"},
        {"name": "?", "cron": "?", "type": "?"},
        {"name": "x", "scopes": ["x"]}, {"name": "all", "scopes": ["read"]}, {"overlap": "1d"},
        {"endpoints": []}, {"endpoints": [{}]}, {"endpoints": [{"name": "x", "more": 1}]},
    ]  # fmt: skip
    queries: list[dict[str, Any]] = [
        {}, {"since": "1h", "until": "2h"}, {"type": "?"}, {"after": "x"}, {"endpoint": "x"},
        {"prune": True}, {"dead_letter": True}, {"dead_letter": True, "drain": True},
        {"drain": True},
        {"reason": "x"}, {"limit": 0},
    ]  # fmt: skip
    reported: set[str] = set()
    for route in ROUTES:
        if route.path in ("/v1/doctor", "/v1/verify"):
            continue
        named = ("shop", "quiet", "nightly", "x", "7") if "{" in route.path else ("",)
        for name in named:
            path = re.sub(r"{\w+}", name, route.path)
            known = set(route.query.model_fields if route.query else ())
            for query in [each for each in queries if each.keys() <= known]:
                # Nothing of it goes through, so that one mistake does not hide the next one.
                fits = {name for model in route.bodies for name in model.model_fields}
                for body in [b for b in bodies if b.keys() <= fits] if fits else [None]:
                    if _would_do(route, query):
                        continue
                    response = await api.request(route.method, path, body, **query)
                    if response.status >= 400:
                        reported.add(response.detail)
    assert [strange(each) for each in reported if strange(each)] == []
    assert len(reported) > 40
    assert any("3 deliveries pending" in each for each in reported)
    assert any("is paused; resume it first" in each for each in reported)
    assert any("live secrets, the first" in each for each in reported)


def _would_do(route: Route, query: dict[str, Any]) -> bool:
    """Whether the request would remove what the other requests need."""
    removes = route.method == "DELETE" and query == {"dead_letter": True}
    return removes or route.path.endswith(("/resume", "/test"))
