"""`outbox conform`: test a receiver against the protocol."""

from __future__ import annotations

import base64
import secrets as random_secrets
import time
import uuid
from typing import TYPE_CHECKING, Any, get_args

import click

from outbox.cli.common import json_option, require_http_url, run_async
from outbox.cli.output import echo, emit_json, style
from outbox.config import load
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.message_format import FormatName
from outbox.core.model.setting_types import HeaderPrefix
from outbox.errors import UsageError

if TYPE_CHECKING:
    from outbox_devtools.conformance.grading import CaseGrade

OTHER_SECRET = "whsec_" + base64.b64encode(b"a secret that nobody has").decode()
VECTORS_AT = 1_770_000_000
VECTORS_ENDPOINT = uuid.UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")


@click.command(
    epilog="""\b
Examples:
  OUTBOX_SECRET=whsec_… outbox conform http://127.0.0.1:9000/hooks
  outbox conform http://127.0.0.1:9000/hooks --processed http://127.0.0.1:9000/processed
  outbox conform --vectors > vectors.json      test vectors for your own tests

Use a receiver with a separate database, and a handler for the types conform.**: it is sent
events of these types, and forged, duplicate, missing and replayed ones. Exit code 1 means that
a case failed.
"""
)
@click.argument("url", required=False)
@click.option(
    "--secret",
    metavar="SECRET",
    help="Signing secret of the receiver, whsec_…; prefer OUTBOX_SECRET, because ps shows flags.",
)
@click.option(
    "--processed",
    metavar="URL",
    help="URL that returns a JSON array of the ids of all processed events; used to check that "
    "each was processed exactly once.",
)
@click.option("--batches", is_flag=True, help="Also test batches.")
@click.option("--binary", is_flag=True, help="Also test payloads that are not JSON.")
@click.option(
    "--header-prefix",
    default=DEFAULT_PREFIX,
    metavar="PREFIX",
    show_default=True,
    help="Prefix of the endpoint's header names (its setting header_prefix).",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(get_args(FormatName)),
    default="envelope",
    show_default=True,
    help="Format of the endpoint (its setting format).",
)
@click.option("--vectors", is_flag=True, help="Print the cases as JSON, with fixed times.")
@click.option("--config", metavar="FILE", help="Settings file; default: ./outbox.toml.")
@json_option
def command(
    url: str | None,
    secret: str | None,
    processed: str | None,
    batches: bool,
    binary: bool,
    header_prefix: str,
    format_name: FormatName,
    vectors: bool,
    config: str | None,
    as_json: bool,
) -> None:
    """Test a receiver, in any language, against the delivery protocol.

    Sends valid deliveries, duplicates, gaps, replays and forged requests, and checks
    the receiver's responses.
    """
    from outbox.testing.sender import SECRET

    HeaderPrefix().validate("--header-prefix", header_prefix)
    case_options = {
        "batches": batches,
        "binary": binary,
        "header_prefix": header_prefix,
        "format_name": format_name,
    }
    if vectors:
        _print_vectors(secret or SECRET, case_options)
        return
    if url is None:
        raise UsageError("URL: give the URL of the receiver, or --vectors")
    for text in (url, processed):
        if text is not None:
            require_http_url("URL", text)
    settings = load(config=config)
    if secret is None and settings.secret is not None:
        secret = settings.secret.get_secret_value()
    if secret is None:
        raise UsageError("--secret: give the signing secret of the receiver, or set OUTBOX_SECRET")
    grades = run_async(_grade(url, secret, processed, case_options, as_json))
    failed = sum(not grade.passed for grade in grades)
    if as_json:
        emit_json({"cases": len(grades), "failed": failed, "grades": grades})
    else:
        echo()
        good = style("conforms", fg="green") if not failed else style("does not conform", fg="red")
        echo(f"{len(grades) - failed} of {len(grades)} cases passed: it {good}")
        if processed is None:
            echo("not checked: that each event was processed exactly once; see --processed")
    if failed:
        raise click.exceptions.Exit(1)


async def _grade(
    url: str, secret: str, processed: str | None, case_options: dict[str, Any], as_json: bool
) -> list[CaseGrade]:
    from outbox_devtools.conformance.cases import cases
    from outbox_devtools.conformance.grading import grade

    endpoint_id = uuid.UUID(bytes=random_secrets.token_bytes(16), version=4)
    test_cases = cases(
        secret,
        endpoint_id,
        time.time,
        other_secret=OTHER_SECRET,
        **case_options,
    )

    def show(done: CaseGrade) -> None:
        if as_json:
            return
        if done.passed:
            echo(f"  {style('ok', fg='green')}      {done.case}")
        else:
            echo(f"  {style('failed', fg='red')}  {done.case}: {done.failure or ''}")
            echo(f"          ({done.reason})")

    return await grade(url, test_cases, processed_url=processed, on_grade=show)


def _print_vectors(secret: str, case_options: dict[str, Any]) -> None:
    from outbox_devtools.conformance.cases import cases
    from outbox_devtools.conformance.suite import vectors

    test_cases = cases(
        secret,
        VECTORS_ENDPOINT,
        lambda: VECTORS_AT,
        other_secret=OTHER_SECRET,
        **case_options,
    )
    # Omit the cases with very large bodies.
    small = tuple(
        case
        for case in test_cases
        if sum(len(step.request.body) for step in case.steps) < 1_000_000
    )
    emit_json({"secret": secret, "now": VECTORS_AT, "cases": list(vectors(small))})
