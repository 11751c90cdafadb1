"""Connection reuse: whether the requests of an endpoint may share connections (keep-alive).

HTTP/1.1 has no request ids: the order of responses on a connection is all that assigns them to
requests (RFC 9112, 9.3.2).  A receiver that sends a byte too many, such as a second response to
one request, therefore acknowledges the next request before it has processed it.  This cannot be
detected if the bytes arrive after the next request was sent.  So one sight of unsolicited data is
evidence against all responses of that receiver, and for `DISTRUST_S` each of its connections
carries one request only: surplus bytes then belong to no later request.

The time of the last sight is stored with the state of the endpoint, for the next owner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DISTRUST_S = 86400.0
"""Seconds without connection reuse after unsolicited data was received."""
RENEW_AFTER_S = 3600.0
"""Seconds after which unsolicited data is stored again, which renews the distrust; earlier sights
are not, because a receiver may send such data with every response."""


@dataclass(frozen=True, slots=True)
class ConnectionReuse:
    """What decides whether an endpoint's connections are reused; times are epoch seconds."""

    keep_alive: bool = True
    """The endpoint's setting."""
    unsolicited_at: float | None = None
    """When its receiver sent unsolicited data; None: never."""

    def is_distrusted(self, now: float) -> bool:
        """Whether its receiver sent unsolicited data lately."""
        return self.unsolicited_at is not None and now < self.unsolicited_at + DISTRUST_S

    def is_allowed(self, now: float) -> bool:
        """Whether a connection may carry more than one request."""
        at = self.unsolicited_at  # Checked for each request: without a call for most endpoints.
        return self.keep_alive and (at is None or not self.is_distrusted(now))

    def record_unsolicited(self, now: float) -> ConnectionReuse:
        """The state after unsolicited data; this one if the last sight is recent."""
        if self.unsolicited_at is not None and now < self.unsolicited_at + RENEW_AFTER_S:
            return self
        return replace(self, unsolicited_at=now)

    def clamp_times(self, now: float) -> ConnectionReuse:
        """Limit stored times to `now`, after the clock was set back."""
        if self.unsolicited_at is None or self.unsolicited_at <= now:
            return self
        return replace(self, unsolicited_at=now)
