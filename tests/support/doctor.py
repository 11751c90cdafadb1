"""What `outbox doctor` finds, asked for one check at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.doctor import Finding, Look, Severity, examine

if TYPE_CHECKING:
    from asyncpg import Connection

PATH = {"server_settings": {"search_path": "relay"}}


async def findings(db: Connection[Any], **options: Any) -> list[Finding]:
    return [f async for f in examine(Look(db, "relay", **options))]


async def told(db: Connection[Any], check: str, **options: Any) -> list[Finding]:
    """What is not as it should be, by one check."""
    found = [f for f in await findings(db, **options) if f.check == check]
    assert found, check
    return [f for f in found if f.severity is not Severity.OK]


async def the_one(db: Connection[Any], check: str, **options: Any) -> Finding:
    (finding,) = await told(db, check, **options)
    assert finding.do
    return finding


def sql_of(finding: Finding) -> str:
    """The statement that the doctor gives, as it can be run."""
    assert finding.do
    begin = min(i for word in ("ALTER ", "GRANT ", "SELECT ") if (i := finding.do.find(word)) >= 0)
    return finding.do[begin:].partition("; events")[0]
