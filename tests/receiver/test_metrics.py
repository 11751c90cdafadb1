"""Exported metrics equal the receiver's counters, have few series, and never fail a request."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.metrics import MeterProvider as Provider
from opentelemetry.metrics import NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outbox import receiver as library
from outbox.core.messages.signature import format_secret
from outbox.receiver import (
    AsyncReceiver,
    Busy,
    Gaps,
    Inbox,
    MemoryDatabase,
    Message,
    Receiver,
    Refuse,
    Request,
)
from outbox.receiver.metrics import PROCESSING_BOUNDS_S, ReceiverMetrics
from outbox.receiver.requests import RequestOutcome
from outbox.testing import FakeSender
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(library.__file__).parents[2]
TEXT = format_secret(SECRET)


class Metrics:
    """A metrics provider, read as an exporter reads it."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def all(self) -> dict[str, Any]:
        """All metrics by name."""
        data = self.reader.get_metrics_data()
        scopes = data.resource_metrics[0].scope_metrics if data is not None else ()
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def __getitem__(self, name: str) -> Any:
        """The only value of a metric."""
        (point,) = self.all()[f"outbox.receiver.{name}"].data.data_points
        return point.value

    def ended(self) -> dict[str, int]:
        """Number of requests by outcome."""
        points = self.all()["outbox.receiver.requests"].data.data_points
        return {each.attributes["outcome"]: each.value for each in points if each.value}

    def timed(self) -> dict[str, int]:
        """Number of requests with a duration, by outcome."""
        points = self.all()["outbox.receiver.request.duration"].data.data_points
        return {each.attributes["outcome"]: each.count for each in points}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    yield made
    made.provider.shutdown()


def request(seq: int, *, secret: bytes = SECRET, attempt: int = 1, **changes: Any) -> Request:
    headers, body = signed(delivery(seq, **changes), secret=secret, attempt=attempt)
    return Request("POST", headers, body)


def fails_by_type(message: Message, _: Any) -> None:
    match message.type:
        case "order.refused":
            raise Refuse("never")
        case "order.busy":
            raise Busy
        case "order.failed":
            raise LookupError


def sent() -> Iterator[Request]:
    """Send requests of every kind."""
    yield from (request(1), request(1, attempt=2), request(2, secret=OTHER))
    for n, bad in enumerate(("refused", "busy", "failed")):
        yield request(1, lane=f"b-1-{n}", type=f"order.{bad}", outbox_id=90 + n)
    # 2 to 4 are missing: after two more deliveries that is overdue.
    yield from (request(5), request(6), request(7), request(2))
    yield request(7, outbox_id=99)


@pytest.mark.parametrize("kind", [AsyncReceiver, Receiver])
async def test_exported_metrics_equal_the_totals(
    kind: type[AsyncReceiver | Receiver], metrics: Metrics
) -> None:
    receiver = kind(
        TEXT, MemoryDatabase(), inbox=Inbox(tolerance=1), meter_provider=metrics.provider
    )
    receiver.on("**")(fails_by_type)
    for each in sent():
        if isinstance(receiver, AsyncReceiver):
            await receiver.handle(each)
        else:
            receiver.handle(each)
    assert metrics.ended() == metrics.timed() == receiver.totals.requests
    assert metrics.ended() == {
        "processed": 5,
        "duplicate": 1,
        "rejected": 1,
        "refused": 1,
        "put_off": 1,
        "failed": 1,
        "conflict": 1,
    }
    totals = receiver.totals
    exported = (metrics["gaps"], metrics["old"], metrics["overdue"], metrics["fetched"])
    assert exported == (totals.gaps, totals.old, totals.overdue, totals.fetched) == (1, 1, 3, 0)
    assert metrics["requests.in_flight"] == 0


async def test_attributes_have_bounded_cardinality(metrics: Metrics) -> None:
    receiver = AsyncReceiver(TEXT, MemoryDatabase(), meter_provider=metrics.provider)
    await receiver.handle(request(1))
    series = {name: len(each.data.data_points) for name, each in metrics.all().items()}
    for n in range(20):
        other = {"lane": f"c-1-{n}", "type": f"order.n{n}", "tenant": f"t{n}", "key": f"k{n}"}
        await receiver.handle(request(1, outbox_id=2 + n, **other))
    assert {n: len(each.data.data_points) for n, each in metrics.all().items()} == series
    attributes = [
        dict(point.attributes)
        for metric in metrics.all().values()
        for point in metric.data.data_points
    ]
    assert all(each == {} or each.keys() == {"outcome"} for each in attributes)
    assert {each["outcome"] for each in attributes if each} == set(RequestOutcome)


async def test_counters_start_at_zero(metrics: Metrics) -> None:
    """A reader of counters takes a series that begins at 1 for one that does not grow."""
    receiver = AsyncReceiver(TEXT, MemoryDatabase(), meter_provider=metrics.provider)
    await receiver.handle(request(1))
    assert [metrics[name] for name in ("gaps", "old", "overdue", "fetched")] == [0, 0, 0, 0]
    points = metrics.all()["outbox.receiver.requests"].data.data_points
    assert {each.attributes["outcome"] for each in points} == set(RequestOutcome)


def test_durations_are_seconds(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(perf_counter=lambda: now.at, at=7.0)
    monkeypatch.setattr("outbox.receiver.decisions.time", now)
    receiver = Receiver(TEXT, MemoryDatabase(), meter_provider=metrics.provider)
    receiver.on("**")(lambda *_: setattr(now, "at", now.at + 0.2))
    receiver.handle(request(1))
    (point,) = metrics.all()["outbox.receiver.request.duration"].data.data_points
    assert point.sum == pytest.approx(0.2)
    assert point.explicit_bounds == PROCESSING_BOUNDS_S
    assert point.bucket_counts[PROCESSING_BOUNDS_S.index(0.25)] == 1


async def test_in_flight_counts_requests_being_processed(metrics: Metrics) -> None:
    receiver = AsyncReceiver(
        TEXT, MemoryDatabase(), in_flight_max=1, meter_provider=metrics.provider
    )
    begun = asyncio.Event()

    @receiver.on("order.paid")
    async def hang(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        preempted = tasks.create_task(receiver.handle(request(1)))
        await begun.wait()
        assert (await receiver.handle(request(2))).outcome is RequestOutcome.PUT_OFF
        assert metrics["requests.in_flight"] == 1
        preempted.cancel()
    assert metrics["requests.in_flight"] == 0
    assert metrics.ended() == {"failed": 1, "put_off": 1}
    # Requests over the limit took no time, and would distort the durations.
    assert metrics.timed() == {"failed": 1}


def test_in_flight_decreases_after_any_exception(metrics: Metrics) -> None:
    receiver = Receiver(TEXT, MemoryDatabase(), meter_provider=metrics.provider)

    @receiver.on("**")
    def stop(*_: Any) -> None:
        assert metrics["requests.in_flight"] == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        receiver.handle(request(1))
    assert metrics["requests.in_flight"] == 0
    assert metrics.ended() == {"failed": 1}


async def test_held_requests_are_not_in_flight(metrics: Metrics) -> None:
    receiver = AsyncReceiver(
        TEXT, MemoryDatabase(), gaps=Gaps.HOLD, hold_s=30, meter_provider=metrics.provider
    )
    receiver.on("**")(lambda *_: None)
    await receiver.handle(request(1))
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(receiver.handle(request(3)))
        await until(lambda: receiver._reorder_buffer.held)
        assert metrics["requests.in_flight"] == 0
        await receiver.handle(request(2))
    assert early.result().outcome is RequestOutcome.PROCESSED
    assert metrics["requests.in_flight"] == 0


@pytest.mark.parametrize("kind", [AsyncReceiver, Receiver])
async def test_fetched_deliveries_are_not_requests(
    kind: type[AsyncReceiver | Receiver], metrics: Metrics
) -> None:
    sender = FakeSender()
    receiver = kind(sender.secret, MemoryDatabase(), fetch=sender, meter_provider=metrics.provider)
    receiver.on("**")(lambda *_: None)
    first, *_ = [sender.event("a.b", n) for n in range(5)]
    if isinstance(receiver, AsyncReceiver):
        await receiver.handle(first)
        await receiver.catch_up()
    else:
        receiver.handle(first)
        receiver.catch_up()
    assert metrics["fetched"] == receiver.totals.fetched == 4
    assert metrics.ended() == {"processed": 1}


class _Broken(Provider):
    """Makes instruments that always fail."""

    def get_meter(self, name: str, *args: Any, **options: Any) -> NoOpMeter:
        def fail(*_: Any) -> None:
            raise LookupError("the exporter is not there")

        def make(*_: Any, **options: Any) -> Any:
            return SimpleNamespace(add=fail, record=fail)

        meter = NoOpMeter(name)
        for kind in ("counter", "up_down_counter", "histogram"):
            setattr(meter, f"create_{kind}", make)
        return meter


def test_a_failing_provider_does_not_fail_requests(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(TEXT, MemoryDatabase(), in_flight_max=1, meter_provider=_Broken())
    receiver.on("**")(lambda *_: None)
    assert [receiver.handle(request(n)).status for n in (1, 2, 4)] == [200, 200, 200]
    assert caplog.text.count("metrics are incomplete") == 1


@pytest.mark.system
def test_the_global_provider_may_be_set_later() -> None:
    """In a separate process: a provider can be set only once."""
    program = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from outbox.receiver import MemoryDatabase, Receiver
from outbox.testing import FakeSender

sender, reader = FakeSender(), InMemoryMetricReader()
receiver = Receiver(sender.secret, MemoryDatabase())
metrics.set_meter_provider(MeterProvider([reader]))
receiver.handle(sender.event("a.b", 1))
(scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
print(scope.scope.name, len(scope.metrics))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout == "outbox.receiver 7\n"


def test_the_guide_lists_every_metric(metrics: Metrics) -> None:
    metering = ReceiverMetrics(metrics.provider)
    metering.request_ended(RequestOutcome.PROCESSED, 0.1)
    metering.in_flight(1)
    metering.lanes_stopped(1)
    guide = (ROOT / "docs" / "reference" / "receiver-library.md").read_text(encoding="utf-8")
    rows = re.findall(r"\n\| `(outbox\.receiver\.[a-z._]+)` \| [a-z -]+ \| `(.+?)` \|", guide)
    assert sorted(rows) == sorted((each.name, each.unit) for each in metrics.all().values())
    assert f"up to {', '.join(f'{each:g}' for each in PROCESSING_BOUNDS_S)} s" in guide
