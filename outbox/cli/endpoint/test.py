"""`outbox endpoint test`: one delivery, outside of all lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import database, json_option, run_async, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.output import emit_json, emit_pairs
from outbox.destinations.http.endpoint_validation import policy_of
from outbox.store import endpoints
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.destinations.http.test_delivery import Trial

EXIT_REFUSED = 1


@command.command(
    epilog="""\b
Examples:
  outbox endpoint test billing
  outbox endpoint test billing --json | jq .status
"""
)
@click.argument("name")
@json_option
@settings_options
@click.pass_context
def test(ctx: click.Context, settings: Settings, name: str, as_json: bool) -> None:
    """Send one signed test delivery, now and from this machine.

    It has the type outbox.test and a lane of its own, so it is not in anybody's
    way.  Says what came back, and what the relay would make of that.  Exit code
    1 unless the answer is 2xx.
    """

    vault = Vault.of(settings)

    async def go() -> Trial:
        # Imported here: no other command of these needs an HTTP client.
        from outbox.destinations.http.router import Outbound
        from outbox.destinations.http.test_delivery import attempt

        async with database(settings) as connection:
            endpoint = await endpoints.find(connection, settings.schema_name, name, vault)
        policy = policy_of(settings)
        transport = Outbound(policy, proxy=settings.leaves_by)
        try:
            return await attempt(transport, endpoint)
        finally:
            await transport.aclose()

    trial = run_async(go())
    if as_json:
        emit_json(trial.as_json())
    else:
        told = trial.summary
        emit_pairs(
            [
                ("sent", f"{trial.method} {trial.url}"),
                ("answer", told.get("status") or told["failure"]),
                ("detail", told.get("detail")),
                ("time", f"{told['elapsed_ms']:.0f} ms"),
                ("headers", told.get("headers")),
                ("body", told.get("body")),
                ("outcome", trial.meaning),
            ]
        )
    if trial.answer.status is None or not 200 <= trial.answer.status <= 299:
        ctx.exit(EXIT_REFUSED)
