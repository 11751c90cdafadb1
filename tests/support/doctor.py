"""The findings of `outbox doctor`, by check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from outbox_doctor import examination
from outbox_doctor.check import DoctorContext, DoctorFinding, Severity
from outbox_doctor.examination import examine

if TYPE_CHECKING:
    from asyncpg import Connection

PATH = {"server_settings": {"search_path": "relay"}}


async def findings(db: Connection[Any], **options: Any) -> list[DoctorFinding]:
    return (await examine(DoctorContext(db, "relay", **options))).findings


async def findings_of(db: Connection[Any], check: str, **options: Any) -> list[DoctorFinding]:
    """The findings of one check. The others, about a hundred statements, are not run."""
    only: dict[str, Any] = {
        table: tuple(each for each in getattr(examination, table) if each.name == check)
        for table in ("PRECONDITIONS", "LIVE")
    }
    with patch.multiple(examination, **only):
        return [f for f in await findings(db, **options) if f.check == check]


async def reported_findings(db: Connection[Any], check: str, **options: Any) -> list[DoctorFinding]:
    """The problems that one check reports."""
    found = await findings_of(db, check, **options)
    assert found, check
    return [f for f in found if f.severity is not Severity.OK]


async def the_one(db: Connection[Any], check: str, **options: Any) -> DoctorFinding:
    (finding,) = await reported_findings(db, check, **options)
    assert finding.action
    return finding


def sql_of(finding: DoctorFinding) -> str:
    """The statement of a finding, ready to run."""
    assert finding.action
    begin = min(
        i
        for word in ("ALTER ", "GRANT ", "INSERT ", "SELECT ")
        if (i := finding.action.find(word)) >= 0
    )
    return finding.action[begin:].partition("; then")[0]
