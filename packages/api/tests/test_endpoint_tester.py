"""Test deliveries for the API: what their duration shows to a tenant."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.stored_response import stored_response
from outbox.destinations import endpoint_test
from outbox.destinations.endpoint_test import EndpointTestResult
from outbox.network.egress import EgressPolicy
from outbox_api.endpoint_tester import EndpointTester
from tests.support.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def duration(monkeypatch: pytest.MonkeyPatch) -> Callable[[Failure, float, str | None], float]:
    """Measures a test delivery that fails after some seconds, in virtual time."""

    def measure(failure: Failure, fails_after_s: float, tenant: str | None) -> float:
        async def send(*_: Any, **__: Any) -> EndpointTestResult:
            await asyncio.sleep(fails_after_s)
            response = stored_response(AttemptResult.failed(failure, "", fails_after_s))
            return EndpointTestResult("shop", "POST", "https://a.example/", response, "", "")

        async def transport(_: EndpointTester) -> None: ...

        async def run() -> float:
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            endpoint: Any = SimpleNamespace(url="https://a.example/")
            await EndpointTester(EgressPolicy()).run_test(endpoint, tenant)
            return loop.time() - started_at

        monkeypatch.setattr(endpoint_test, "send_test_delivery", send)
        monkeypatch.setattr(EndpointTester, "_get_transport", transport)
        return run_virtual(run())

    return measure


def test_a_tenant_cannot_time_how_a_connection_fails(
    duration: Callable[[Failure, float, str | None], float],
) -> None:
    for failure in (Failure.EGRESS_REFUSED, Failure.DNS, Failure.CONNECT):
        for fails_after_s, shown_s in ((0.0001, 1.0), (0.9, 1.0), (1.5, 2.0)):
            assert duration(failure, fails_after_s, "acme") == pytest.approx(shown_s)
    assert duration(Failure.TIMEOUT, 0.25, "acme") == pytest.approx(0.25)


def test_operators_do_not_wait(
    duration: Callable[[Failure, float, str | None], float],
) -> None:
    assert duration(Failure.DNS, 0.25, None) == pytest.approx(0.25)
