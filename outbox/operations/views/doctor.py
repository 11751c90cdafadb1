"""How the doctor's findings are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.doctor import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.doctor import Finding


def examined(schema: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """All of them, and how many need somebody."""
    return {
        "schema": schema,
        "problems": sum(f.severity is Severity.PROBLEM for f in findings),
        "warnings": sum(f.severity is Severity.WARNING for f in findings),
        "findings": findings,
    }
