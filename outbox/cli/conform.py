"""`outbox conform`: is a receiver one that a relay can rely on?"""

from __future__ import annotations

import base64
import secrets as random_secrets
import time
import uuid
from typing import TYPE_CHECKING

import click

from outbox.cli.common import json_option, require_http_url, run_async
from outbox.cli.output import emit_json, style
from outbox.config import load
from outbox.core.model.text import safe
from outbox.errors import UsageError

if TYPE_CHECKING:
    from outbox.devtools.conformance.grading import Grade

OTHER_SECRET = "whsec_" + base64.b64encode(b"a secret that nobody has").decode()
VECTORS_AT = 1_770_000_000
VECTORS_ENDPOINT = uuid.UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")


@click.command(
    epilog="""\b
Examples:
  OUTBOX_SECRET=whsec_… outbox conform http://127.0.0.1:9000/hooks
  outbox conform http://127.0.0.1:9000/hooks --processed http://127.0.0.1:9000/processed
  outbox conform --vectors > vectors.json      the same cases, for tests of your own

Give the receiver a database of its own: it is sent events of the type conform.check,
and forgeries, copies, gaps and replays of them. Exit code 1: it fails some of the cases.
"""
)
@click.argument("url", required=False)
@click.option(
    "--secret",
    metavar="SECRET",
    help="The whsec_… that the receiver knows. Better set as OUTBOX_SECRET, which ps hides.",
)
@click.option(
    "--processed",
    metavar="URL",
    help="Answers GET with a JSON array of the ids of all events processed: checks that each "
    "was, once.",
)
@click.option(
    "--checkpoints", is_flag=True, help="It wants checkpoints: there are cases about them, too."
)
@click.option("--batches", is_flag=True, help="It wants batches: there are cases about them, too.")
@click.option("--vectors", is_flag=True, help="Print the cases as JSON, with fixed times.")
@click.option("--config", metavar="FILE", help="Settings; default: ./outbox.toml.")
@json_option
def command(
    url: str | None,
    secret: str | None,
    processed: str | None,
    checkpoints: bool,
    batches: bool,
    vectors: bool,
    config: str | None,
    as_json: bool,
) -> None:
    """Grade a receiver, in whatever language it is written.

    It is sent what a relay sends on its worst days, and what somebody sends who is no
    relay; its answers tell how it does.
    """
    from outbox.testing.sender import SECRET

    if vectors:
        _print_vectors(secret or SECRET, checkpoints, batches)
        return
    if url is None:
        raise UsageError("URL: say where the receiver listens, or --vectors")
    for text in (url, processed):
        if text is not None:
            require_http_url("URL", text)
    settings = load(config=config)
    if secret is None and settings.secret is not None:
        secret = settings.secret.get_secret_value()
    if secret is None:
        raise UsageError("--secret: say which one the receiver knows, or set OUTBOX_SECRET")
    grades = run_async(_grade(url, secret, processed, checkpoints, batches, as_json))
    failed = sum(not grade.passed for grade in grades)
    if as_json:
        emit_json({"cases": len(grades), "failed": failed, "grades": grades})
    else:
        click.echo()
        good = style("conforms", fg="green") if not failed else style("does not conform", fg="red")
        click.echo(f"{len(grades) - failed} of {len(grades)} cases passed: it {good}")
        if processed is None:
            click.echo("whether each event was processed once was not seen; see --processed")
    if failed:
        raise click.exceptions.Exit(1)


async def _grade(
    url: str, secret: str, processed: str | None, checkpoints: bool, batches: bool, as_json: bool
) -> list[Grade]:
    from outbox.devtools.conformance.cases import cases
    from outbox.devtools.conformance.grading import grade

    endpoint_id = uuid.UUID(bytes=random_secrets.token_bytes(16), version=4)
    told = cases(
        secret,
        endpoint_id,
        time.time,
        other_secret=OTHER_SECRET,
        checkpoints=checkpoints,
        batches=batches,
    )

    def show(done: Grade) -> None:
        if as_json:
            return
        if done.passed:
            click.echo(f"  {style('ok', fg='green')}      {done.case}")
        else:
            click.echo(f"  {style('failed', fg='red')}  {done.case}: {safe(done.failure or '')}")
            click.echo(f"          ({done.why})")

    return await grade(url, told, processed_url=processed, told=show)


def _print_vectors(secret: str, checkpoints: bool, batches: bool) -> None:
    from outbox.devtools.conformance.cases import cases, vectors

    told = cases(
        secret,
        VECTORS_ENDPOINT,
        lambda: VECTORS_AT,
        other_secret=OTHER_SECRET,
        checkpoints=checkpoints,
        batches=batches,
    )
    # What is far too large is not worth printing.
    small = tuple(
        case for case in told if sum(len(step.request.body) for step in case.steps) < 1_000_000
    )
    emit_json({"secret": secret, "now": VECTORS_AT, "cases": list(vectors(small))})
