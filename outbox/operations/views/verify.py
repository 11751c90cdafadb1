"""Result of `outbox verify`, and its JSON form."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.verify.guarantees import count_rows, run_checks
from outbox.operations.verify.repair import ADVICE
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.verify.guarantees import AuditFinding


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of all checks."""

    findings: list[AuditFinding]
    about: dict[str, int]
    seconds: float

    @property
    def violations(self) -> int:
        """Total number of violations."""
        return sum(finding.violations for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """JSON form, as printed by `--json`."""
        return {
            "violations": self.violations,
            "checks": [
                {
                    "name": f.check.name,
                    "guarantee": f.check.guarantee,
                    "violations": f.violations,
                    "examples": f.examples,
                    "action": ADVICE[f.check.name] if f.violations else None,
                }
                for f in self.findings
            ],
            "counts": self.about,
            "seconds": self.seconds,
        }


async def run_audit(connection: Connection[Any], schema: str) -> Audit:
    """Run all checks, and measure the time."""
    started = time.monotonic()
    with map_errors(schema):
        about = await count_rows(connection)
        findings = [finding async for finding in run_checks(connection)]
    return Audit(findings, about, round(time.monotonic() - started, 3))
