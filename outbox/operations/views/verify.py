"""An audit as a whole, and how it is told to programs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.verify.promises import audit, counts
from outbox.operations.verify.repair import ADVICE
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.verify.promises import Finding


@dataclass(frozen=True, slots=True)
class Audit:
    """What all checks found."""

    findings: list[Finding]
    about: dict[str, int]
    seconds: float

    @property
    def violations(self) -> int:
        """How many exceptions there are in all."""
        return sum(finding.violations for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "violations": self.violations,
            "checks": [
                {
                    "name": f.check.name,
                    "promise": f.check.promise,
                    "violations": f.violations,
                    "examples": f.examples,
                    "do": ADVICE[f.check.name] if f.violations else None,
                }
                for f in self.findings
            ],
            "counts": self.about,
            "seconds": self.seconds,
        }


async def audited(connection: Connection[Any], schema: str) -> Audit:
    """Ask everything that there is to ask."""
    started = time.monotonic()
    with map_errors(schema):
        about = await counts(connection)
        findings = [finding async for finding in audit(connection)]
    return Audit(findings, about, round(time.monotonic() - started, 3))
