"""`outbox quota`: what each tenant may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, limit_option, note_next_page, print_result, run_operation
from outbox.cli.group import Group
from outbox.cli.output import emit_pairs, emit_table
from outbox.errors import UsageError
from outbox.operations import quotas
from outbox.store.quotas import RESOURCES

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.quotas import Quota, QuotaUse

ALL = "(all tenants)"


def _show_list(rows: list[Quota]) -> None:
    emit_table(
        ["tenant", "endpoints", "lanes", "schedules", "once keys"],
        [[row.tenant or ALL, *(getattr(row, r) for r in RESOURCES)] for row in rows],
        "no quotas",
    )


def _show_use(found: QuotaUse) -> None:
    uses = [(r.replace("_", " "), getattr(found, r)) for r in RESOURCES]
    emit_pairs(
        [("tenant", found.tenant)],
        [(name, f"{use.used:,} of {use.max:,}") for name, use in uses],
        [("older lanes", found.older_lanes or None)],
    )


def _show_set(done: Quota) -> None:
    values = [(r.replace("_", " "), getattr(done, r)) for r in RESOURCES]
    emit_pairs([("tenant", done.tenant or ALL), *values])


@click.group("quota", cls=Group)
def command() -> None:
    """Limit what each tenant may have.

    Quotas limit the endpoints of a tenant and the lanes of all of them together, its
    schedules, and the idempotency keys of its tokens. They apply to API tokens,
    operators and files alike. A tenant without a value of its own has that of all
    tenants. What exists above a quota is kept, and can only be reduced.
    """


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox quota list
  outbox quota list --after acme --json
""",
)
@limit_option
@click.option("--after", metavar="TENANT", help="Only tenants after this one (paging).")
@print_result(_show_list)
def list_(settings: Settings, limit: int, after: str | None) -> list[Quota]:
    """List the quotas that are set, those of all tenants first."""
    rows = run_operation(settings, quotas.list_quotas, limit=limit, after=after)
    return note_next_page(rows, lambda row: row.tenant or "")


@command.command(
    epilog="""\b
Example:
  outbox quota show acme
"""
)
@click.argument("tenant")
@print_result(_show_use)
def show(settings: Settings, tenant: str) -> QuotaUse:
    """Show what a tenant has of what it may have.

    Older lanes are those of older generations and of removed endpoints. The relay
    removes them when nothing refers to them any more: within minutes, or when
    retention has removed their deliveries.
    """
    return run_operation(settings, quotas.read_quota_use, tenant)


@command.command(
    "set",
    epilog="""\b
Examples:
  outbox quota set acme --endpoints 200 --lanes 4096
  outbox quota set --all-tenants --endpoints 20
""",
)
@click.argument("tenant", required=False)
@click.option("--all-tenants", is_flag=True, help="For all tenants without a value of their own.")
@click.option("--endpoints", type=int, metavar="N", help="Maximum of endpoints.")
@click.option("--lanes", type=int, metavar="N", help="Maximum of lanes of all endpoints together.")
@click.option("--schedules", type=int, metavar="N", help="Maximum of schedules.")
@click.option(
    "--once-keys", type=int, metavar="N", help="Maximum of idempotency keys of its tokens."
)
@print_result(_show_set)
def set_(settings: Settings, tenant: str | None, all_tenants: bool, **values: int | None) -> Quota:
    """Set quotas of a tenant, or of all tenants; others keep their values."""
    if all_tenants is (tenant is not None):
        raise UsageError("name a tenant, or give --all-tenants")
    return run_operation(settings, quotas.set_quota, tenant, values, actor=actor())


@command.command(
    epilog="""\b
Example:
  outbox quota unset acme
"""
)
@click.argument("tenant")
@print_result(_show_use)
def unset(settings: Settings, tenant: str) -> QuotaUse:
    """Remove the quotas of a tenant, so that it has those of all tenants."""
    return run_operation(settings, quotas.unset_quota, tenant, actor=actor())
