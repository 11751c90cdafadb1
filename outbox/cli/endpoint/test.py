"""`outbox endpoint test`: send one test delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_async, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.output import emit_pairs
from outbox.core.model.destination import is_stream
from outbox.destinations.endpoint_validation import policy_of
from outbox.store.connection.secrets import Vault
from outbox.store.delivery import endpoints

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.destinations.endpoint_test import EndpointTestResult


def _show(result: EndpointTestResult) -> None:
    response, findings = result.response, result.findings
    emit_pairs(
        [
            ("sent", f"{result.method} {result.url}"),
            ("response", response.get("status") or response.get("failure")),
            ("detail", None if findings else response.get("detail")),
            *(
                ("problem" if each.is_error else "warning", f"{each.finding}; {each.action}")
                for each in findings
            ),
            ("time", f"{response['elapsed_ms']:.0f} ms"),
            ("headers", response.get("headers")),
            ("body", response.get("body")),
            ("outcome", result.meaning),
        ]
    )


def _is_failed(result: EndpointTestResult) -> bool:
    if is_stream(result.url):
        return "failure" in result.response
    return not 200 <= result.response.get("status", 0) <= 299


@command.command(
    epilog="""\b
Examples:
  outbox endpoint test billing
  outbox endpoint test billing --json | jq .response.status
"""
)
@click.argument("name")
@print_result(_show, failed=_is_failed)
def test(settings: Settings, name: str) -> EndpointTestResult:
    """Send one signed test delivery from this machine.

    It has the type outbox.test and a separate lane, so it does not affect other
    deliveries. Prints the response, and how the relay would treat it. Exit code 1
    unless the response is 2xx.

    A broker is examined instead: access, version and settings. Nothing is written to its
    stream. Exit code 1 if deliveries would wait.
    """
    vault = Vault.from_settings(settings)
    endpoint = run_operation(settings, endpoints.find_endpoint, name, vault)
    return run_async(_send(settings, endpoint))


async def _send(settings: Settings, endpoint: Endpoint) -> EndpointTestResult:
    # Imported here, because no other endpoint command needs an HTTP client or a broker's.
    from outbox.destinations.broker_check import run_broker_test
    from outbox.destinations.endpoint_test import send_test_delivery
    from outbox.destinations.http.transport import HttpTransport

    if is_stream(endpoint.url):
        return await run_broker_test(endpoint, policy_of(settings))
    transport = HttpTransport(policy_of(settings), proxy=settings.outbound_proxy)
    try:
        return await send_test_delivery(transport, endpoint)
    finally:
        await transport.aclose()
