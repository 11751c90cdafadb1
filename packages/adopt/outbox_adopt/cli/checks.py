"""`outbox adopt status` and `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.cli.common import print_result, run_connected, run_operation
from outbox.cli.output import echo, emit_table
from outbox.core.model.text import count
from outbox_adopt.adoption import DESCRIBED
from outbox_adopt.cli.group import command, table_argument
from outbox_adopt.status import list_adoptions
from outbox_adopt.verify import verify_adoption

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox_adopt.status import AdoptionRow
    from outbox_adopt.verify import AdoptionReport


def _describe_rows(rows: dict[str, int]) -> str:
    return ", ".join(f"{n} {state}" for state, n in sorted(rows.items())) or "none"


def _show_adoptions(adoptions: list[AdoptionRow]) -> None:
    emit_table(
        ["table", "phase", "rows", "since", "cut over"],
        [(a.table, a.phase, _describe_rows(a.rows), a.began_at, a.cut_over_at) for a in adoptions],
        "no table is being adopted; begin with: outbox adopt plan SCHEMA.TABLE …",
    )


@command.command("status", epilog="\b\nExample:\n  outbox adopt status --json")
@print_result(_show_adoptions)
def status_command(settings: Settings) -> list[AdoptionRow]:
    """List the adopted tables, their phases and what became of their rows.

    \b
    Rows:
      rehearsed  published as shadow.*; the old poller sends them
      held       hidden from the old poller, and not yet published
      published  in the outbox
      duplicate  an earlier row has the same idempotency key
      sent       sent by the old poller while they were held
      rejected   no event can be made of them; pending in the old table
    """
    return run_operation(settings, list_adoptions)


def _show_report(report: AdoptionReport) -> None:
    echo(f"{report.table}: {DESCRIBED[report.phase]}")
    echo(f"rows: {_describe_rows(report.rows)}", "")
    emit_table(
        ["check", "guarantee", "violations"],
        [(check.name, check.guarantee, check.violations) for check in report.checks],
        "",
    )
    for check in report.checks:
        if check.violations:
            echo(f"  {check.name}: such as {', '.join(check.ids)}")
            echo(f"    → {check.action}")
    violations = report.violations
    echo("", count(violations, "violation") if violations else "no violations")


@command.command(
    "verify",
    epilog="""\b
Example:
  outbox adopt verify app.events --json

Exit code 1 means that a guarantee is violated.
""",
)
@table_argument
@print_result(_show_report, failed=lambda report: report.violations)
def verify_command(settings: Settings, table: str) -> AdoptionReport:
    """Prove that the adopted table and the outbox agree.

    The table, the ledger and the outbox are compared row by row, in one snapshot.
    """
    return run_connected(
        settings,
        lambda connection: verify_adoption(connection, settings.schema_name, table),
        long=True,
    )
