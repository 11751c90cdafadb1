"""The API counts its requests, and a relay shows what it counted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families as parse

from outbox.telemetry import catalogue
from outbox.telemetry.api_series import add_api_series
from outbox.telemetry.meters import Meters
from outbox.telemetry.otlp import OtlpConverter
from outbox.telemetry.prometheus import ExpositionFormat, PrometheusRenderer
from outbox.telemetry.snapshot import Snapshot
from outbox_api import meters, receivers, server
from outbox_api.meters import ApiMeters
from outbox_api.middleware import problem_middleware
from outbox_api.problem import Problem, ProblemKind, Refusal, unavailable
from outbox_api.rate_limit import too_many_requests
from outbox_api.shared import Shared
from tests.support.api import HERE, make_token
from tests.support.relay import current, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.telemetry.catalogue import Metric
    from tests.support.postgres import Database


def counted(metered: ApiMeters) -> Mapping[Metric, Any]:
    """What a relay gets of them, through a pipe."""
    values = orjson.loads(orjson.dumps(metered.to_json()))
    return add_api_series(Snapshot(0.0, 1.0, {}), values).series


def requests(metered: ApiMeters) -> dict[tuple[str, str], int]:
    """Requests by listener and class of their status."""
    found = counted(metered)[catalogue.API_REQUEST_DURATION]
    return {key: buckets.count for key, buckets in found.items() if buckets.count}


def refusals(metered: ApiMeters) -> dict[tuple[str, str], int]:
    """Refused requests by listener and reason."""
    return {key: n for key, n in counted(metered)[catalogue.API_REFUSALS].items() if n}


async def respond(metered: ApiMeters, outcome: Exception | int, listener: str = "api") -> None:
    """Pass a request through the middlewares of a listener."""

    async def handle(_: web.Request) -> web.StreamResponse:
        if isinstance(outcome, Exception):
            raise outcome
        return web.Response(status=outcome)

    async def report(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await problem_middleware("")(request, handle)
        return response

    request: Any = None
    await metered.middleware(listener)(request, report)


async def test_requests_are_counted_by_listener_and_status() -> None:
    now = [0.0]
    metered = ApiMeters(clock=lambda: now.append(now[-1] + 0.02) or now[-1])  # type: ignore[func-returns-value]
    for outcome in (200, 204, 304, Problem(ProblemKind.NOT_FOUND, "")):
        await respond(metered, outcome)
    await respond(metered, 200, "receivers")
    assert requests(metered) == {
        ("api", "2xx"): 2,
        ("api", "3xx"): 1,
        ("api", "4xx"): 1,
        ("receivers", "2xx"): 1,
    }
    assert refusals(metered) == {}
    found = counted(metered)[catalogue.API_REQUEST_DURATION]["api", "2xx"]
    assert found.sum == pytest.approx(0.04)
    assert found.counts[2] == 2, "0.02 s are in the bucket up to 0.025 s"


REFUSED = [
    (too_many_requests("", 1), "rate"),
    (too_many_requests("", 1, Refusal.CONCURRENCY), "concurrency"),
    (unavailable(""), "unavailable"),
    (Problem(ProblemKind.UNAUTHENTICATED, ""), "token"),
    (Problem(ProblemKind.NOT_FOR_TENANTS, ""), "scope"),
    (Problem(ProblemKind.TOO_LARGE, ""), "body_size"),
]


@pytest.mark.parametrize(("problem", "reason"), REFUSED, ids=lambda each: str(each))
async def test_refusals_are_counted_by_their_reason(problem: Problem, reason: str) -> None:
    metered = ApiMeters()
    await respond(metered, problem, "receivers")
    assert refusals(metered) == {("receivers", reason): 1}
    assert requests(metered) == {("receivers", f"{problem.kind.status // 100}xx"): 1}


def test_every_series_of_a_listener_exists_from_the_start() -> None:
    metered = ApiMeters()
    metered.middleware("receivers")
    found = counted(metered)
    of_refusals = found[catalogue.API_REFUSALS]
    assert of_refusals.keys() == {("receivers", each) for each in Refusal}
    assert set(of_refusals.values()) == {0}
    durations = found[catalogue.API_REQUEST_DURATION]
    assert durations.keys() == {("receivers", each) for each in meters.STATUSES}
    for each in Refusal:
        assert each.value in catalogue.API_REFUSALS.description


async def test_a_request_of_a_closed_connection_is_not_in_progress() -> None:
    metered = ApiMeters()
    began, never = asyncio.Event(), asyncio.Event()

    async def handle(_: web.Request) -> web.StreamResponse:
        began.set()
        await never.wait()
        raise AssertionError

    request: Any = None
    task = asyncio.create_task(metered.middleware("api")(request, handle))
    await began.wait()
    in_progress = catalogue.API_REQUESTS_IN_PROGRESS
    assert counted(metered)[in_progress] == {("api",): 1}
    task.cancel()
    await asyncio.wait([task])
    assert counted(metered)[in_progress] == {("api",): 0}
    assert requests(metered) == {("api", "closed"): 1}


async def test_a_relay_shows_them_beside_its_own() -> None:
    metered = ApiMeters(started_at=50.0)
    await respond(metered, 200)
    own = Meters(10.0)
    snapshot = add_api_series(own.snapshot(60.0, {}), metered.to_json())
    text, _ = PrometheusRenderer({}).render(snapshot, ExpositionFormat.TEXT)
    samples = {
        (s.name, *s.labels.values()): s.value for f in parse(text.decode()) for s in f.samples
    }
    assert samples["outbox_api_request_duration_seconds_count", "api", "2xx"] == 1
    assert samples["outbox_api_refusals_total", "api", "rate"] == 0
    assert samples["outbox_events_total",] == 0
    assert snapshot.since(catalogue.API_REFUSALS, ("api", "rate")) == 50
    assert snapshot.since(catalogue.EVENTS, ()) == 10


async def test_a_restarted_api_does_not_count_backwards() -> None:
    """Differences are those of the new process, whose counters began at 0."""
    resource: Any = type("Resource", (), {"schema_url": ""})
    converter = OtlpConverter(resource, "1", delta=True)
    deltas = []
    for started_at, times in ((50.0, 3), (70.0, 1)):
        metered = ApiMeters(started_at)
        for _ in range(times):
            await respond(metered, too_many_requests("", 1))
        snapshot = add_api_series(Meters(10.0).snapshot(started_at + 1, {}), metered.to_json())
        (metrics,) = converter.convert(snapshot).resource_metrics[0].scope_metrics
        (found,) = (m for m in metrics.metrics if m.name == catalogue.API_REFUSALS.name)
        deltas.append(sum(point.value for point in found.data.data_points))  # type: ignore[union-attr]
    assert deltas == [3, 1]


@pytest.mark.one_major
@pytest.mark.system
@pytest.mark.parametrize("listener", [pytest.param("api", marks=pytest.mark.full), "receivers"])
async def test_a_listener_counts_what_it_serves(database: Database, listener: str) -> None:
    metered = ApiMeters()
    running, path = {
        "api": (server.running, "v1/me"),
        "receivers": (receivers.running, "v1/lanes"),
    }[listener]
    secret = await make_token(database)
    async with (
        running(
            current(settings_for(database, dsn_source="test")), HERE, shared=Shared(meters=metered)
        ) as at,
        aiohttp.ClientSession() as session,
    ):
        statuses = []
        for token in (secret, "obx_" + "A" * 43):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(at.url + path, headers=headers) as response:
                statuses.append(response.status)

        # The client has a response before the middleware has returned.
        async def all_are_counted() -> bool:
            return sum(requests(metered).values()) == len(statuses)

        await until(all_are_counted)
    classes = [f"{each // 100}xx" for each in statuses]
    assert requests(metered) == {(listener, each): classes.count(each) for each in set(classes)}
    refused = statuses.count(401)
    assert refused
    assert refusals(metered) == {(listener, "token"): refused}
