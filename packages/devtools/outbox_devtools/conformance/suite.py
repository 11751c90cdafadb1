"""The suite that collects the cases, and the form of a case; see `cases`."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from outbox.core.model.message_format import UNBATCHED
from outbox.receiver.verification import pairs_of
from outbox.testing.sender import FakeSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from outbox.core.model.message_format import FormatName
    from outbox.receiver.requests import Request

LARGE_BYTES = 256 * 1024
"""The largest payload that can be published by default."""
EVENT_TYPE = "conform.check"


class ExpectedResponse(StrEnum):
    """Which responses to a request conform; see `cases`."""

    TAKEN = "taken"
    REFUSED = "refused"
    STALE = "stale"
    CUT = "cut"
    EITHER = "either"
    EVENTUALLY = "eventually"


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One request and the expected response."""

    request: Request
    expected: ExpectedResponse
    at_once: int = 1
    """Number of concurrent copies sent."""


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """A test case of a few requests."""

    name: str
    reason: str
    """The consequence for a receiver that fails the case."""
    steps: tuple[CaseStep, ...]
    processed: tuple[str, ...] = ()
    """Ids of the events that have to be processed, repeated as often as that."""


@dataclass(slots=True)
class Suite:
    """Collects cases, each with its own lane."""

    secret: str
    other_secret: str
    endpoint_id: UUID
    clock: Callable[[], float]
    ids: Iterator[UUID]
    header_prefix: str
    format_name: FormatName
    lanes: int = 0
    cases: list[ConformanceCase] = field(default_factory=list)

    @property
    def is_metadata_in_body(self) -> bool:
        return self.format_name not in UNBATCHED

    def event_id(self, request: Request) -> str:
        """Return the id of the event in a request."""
        return dict(pairs_of(request.headers))[f"{self.header_prefix}Event-Id"]

    def case(self, name: str, reason: str) -> CaseBuilder:
        self.lanes += 1
        sender = FakeSender(
            self.secret,
            endpoint_id=self.endpoint_id,
            clock=self.clock,
            new_id=lambda: next(self.ids),
            header_prefix=self.header_prefix,
            format_name=self.format_name,
        )
        return CaseBuilder(self, sender, sender.lane(self.lanes), name, reason)


@dataclass(slots=True)
class CaseBuilder:
    suite: Suite
    sender: FakeSender
    lane: str
    name: str
    reason: str
    steps: list[CaseStep] = field(default_factory=list)
    processed: list[str] = field(default_factory=list)

    def event(self, data: object = None, **how: object) -> Request:
        return self.sender.event(EVENT_TYPE, data, lane=self.lane, **how)  # type: ignore[arg-type]

    def step(self, request: Request, expected: ExpectedResponse, *, at_once: int = 1) -> None:
        self.steps.append(CaseStep(request, expected, at_once))

    def taken(self, request: Request, *, again: bool = False) -> Request:
        self.step(request, ExpectedResponse.TAKEN)
        if not again:
            self.processed.append(self.suite.event_id(request))
        return request

    def together(self, *requests: Request, again: Sequence[Request] = ()) -> Request:
        """Send a batch that has to be accepted; the events of `again` were processed before."""
        batch = self.sender.batch(*requests)
        self.step(batch, ExpectedResponse.TAKEN)
        self.processed += [self.suite.event_id(each) for each in requests if each not in again]
        return batch

    def refused(self, request: Request) -> None:
        self.step(request, ExpectedResponse.REFUSED)

    def end(self) -> None:
        self.suite.cases.append(
            ConformanceCase(self.name, self.reason, tuple(self.steps), tuple(self.processed))
        )


def vectors(cases: tuple[ConformanceCase, ...]) -> Iterator[dict[str, object]]:
    """Yield each case as a JSON object; bodies are base64, because some are not UTF-8."""
    for case in cases:
        yield {
            "name": case.name,
            "reason": case.reason,
            "steps": [
                {
                    "method": step.request.method,
                    "headers": dict(step.request.headers),
                    "body": base64.b64encode(step.request.body).decode(),
                    "response": step.expected,
                    "at_once": step.at_once,
                }
                for step in case.steps
            ],
            "processed": list(case.processed),
        }
