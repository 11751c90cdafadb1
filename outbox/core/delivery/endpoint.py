"""An endpoint as its owner has it: settings, secrets, and stored state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.core.model.endpoint_settings import DeclaredSettings
from outbox.core.model.headers import EndpointHeaders
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import ENVELOPE, MessageFormat
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.stored_response import without_content
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network
    from uuid import UUID

    from outbox.core.delivery.circuit_breaker import BreakerRecord
    from outbox.core.delivery.connection_reuse import ConnectionReuse
    from outbox.core.delivery.operational_events import ReportedState
    from outbox.core.messages.signature import SigningKey
    from outbox.core.model.response import AttemptResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(DeclaredSettings[EndpointHeaders, frozenset[int]]):
    """Configuration and stored state of a destination; times are epoch seconds.

    `batch_max` is the maximum number of deliveries per request, sent as an array; None: one per
    request.  For a broker, the deliveries of one append.
    """

    headers: EndpointHeaders = field(repr=False)
    retryable: frozenset[int]
    id: UUID
    state: str
    """State set by the operator: `active`, `paused`, `disabling`, `removing`, …"""
    secrets: tuple[tuple[SigningKey, float | None], ...] = field(repr=False)
    """Signing keys with their expiry; None: no expiry."""
    networks: tuple[IPv4Network | IPv6Network, ...]
    """Networks allowed for this endpoint, in addition to those allowed by the relay."""
    identity: str | None = field(repr=False)
    """Client certificate and private key (PEM), for mutual TLS."""
    blocks: bool
    """A dead letter blocks its lane until an operator decides."""
    generation: int
    resumes: int
    """A number that increases when an operator resumes the endpoint."""
    applied_resumes: int
    """`resumes`, as last applied by an owner."""
    health: BreakerRecord
    """Stored by the last owner."""
    reported: ReportedState
    """The states that operational events have reported, and that have not ended."""
    reuse: ConnectionReuse
    """Whether its connections are reused."""
    message_format: MessageFormat = ENVELOPE
    problem: str | None = None
    """Why the endpoint cannot be used as it is configured."""
    failure: type[CannotRun] = CannotRun
    """The kind of the problem, which is raised where the endpoint must be usable."""
    secret_altered: bool = False
    """Whether the problem is an alarm: a secret was changed in the table."""

    @property
    def ends(self) -> bool:
        """It is being disabled or removed: its pending deliveries are dead-lettered."""
        return self.state not in ("active", "paused")

    @property
    def usable(self) -> bool:
        """Whether deliveries may be sent to it, now or after it is resumed."""
        return not self.ends and self.problem is None

    @property
    def holds_missing(self) -> bool:
        """Whether a delivery whose event is gone holds its lane, instead of being dead-lettered."""
        return self.on_missing == "hold"

    def kept_response(self, response: AttemptResult, outcome: AttemptOutcome) -> AttemptResult:
        """What is kept of a response in the log."""
        keep = self.keep_responses
        if keep == "all" or (keep == "failed" and outcome is not AttemptOutcome.DELIVERED):
            return response
        return without_content(response)

    @property
    def lane_names(self) -> list[str]:
        """The names of the lanes of the current generation."""
        return [lane_name(self.id, self.generation, slot) for slot in range(self.lanes)]

    @property
    def credentials(self) -> tuple[str, ...]:
        """The credentials in its headers, which must not be stored or logged."""
        if not self.headers.own:
            return ()
        # Also without the scheme ("Bearer"), because receivers may echo only the token.
        values = [value for _, value in self.headers.own]
        return (*values, *(value.rpartition(" ")[2] for value in values if " " in value))

    def secrets_at(self, now: float) -> list[SigningKey]:
        """The valid signing keys; two during a rotation."""
        return [secret for secret, ends_at in self.secrets if ends_at is None or now < ends_at]
