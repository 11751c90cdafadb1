"""JSON form of doctor findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.doctor import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.doctor import DoctorFinding


def doctor_report(schema: str, findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """JSON form of the report: findings, with the number of problems and warnings."""
    return {
        "schema": schema,
        "problems": sum(f.severity is Severity.PROBLEM for f in findings),
        "warnings": sum(f.severity is Severity.WARNING for f in findings),
        "findings": findings,
    }
