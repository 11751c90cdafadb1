"""The requests of one lane: the next one is built while the previous one is in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outbox.core.messages.batch import prepare_request
from outbox.core.messages.message import prepare
from outbox.destinations.http.request import signed_request
from outbox.relay.delivery.attempt import PreparedRequest

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Send
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.signing_clock import SigningClock
    from outbox.core.messages.signature import SigningKey
    from outbox.destinations.interface import Recipient, Request


class RequestSource(Protocol):
    """What an endpoint's requests are built from; changed settings replace the recipient."""

    endpoint: Endpoint
    recipient: Recipient
    lasting_keys: list[SigningKey] | None
    """The signing keys, unless one of them ends."""
    signing: SigningClock


class RequestCache:
    """Builds the requests of a lane, and keeps one that was built ahead."""

    __slots__ = ("_source", "prepared", "signed_by")

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        self.prepared: PreparedRequest | None = None
        """The request that follows when the current delivery succeeds."""
        self.signed_by: float | None = None
        """The choice of `SigningClock` for the request in flight, or the last one."""

    def build(self, send: Send, started_at: float, *, keep_alive: bool) -> Request:
        """Build an attempt's request, signed now.

        Args:
            started_at: epoch seconds.
            keep_alive: whether the connection may carry other requests.
        """
        source = self._source
        endpoint, recipient = source.endpoint, source.recipient
        self.signed_by = ahead_s = source.signing.choose()
        at_s = int(started_at if ahead_s is None else started_at + ahead_s)
        keys = source.lasting_keys or endpoint.secrets_at(started_at)
        message = None
        prepared, self.prepared = self.prepared, None
        if prepared is not None and prepared.request.recipient is recipient:
            was = prepared.send
            if was is send or (
                was.delivery is send.delivery
                and not send.batch
                and was.previous_seq == send.previous_seq
                and was.lane_ends == send.lane_ends
            ):
                request = prepared.request
                is_current = prepared.at_s == at_s and prepared.keys == keys
                if is_current and request.keep_alive is keep_alive:
                    return request
                message = prepared.message
        if message is None:
            message = prepare_request(
                endpoint, send.batch or (send.delivery,), send.previous_seq,
                lane_ends=send.lane_ends, in_array=bool(send.batch),
            )  # fmt: skip
        return signed_request(recipient, message, send.attempt, at_s, keys, keep_alive=keep_alive)

    def prefetch(self, send: Send, now: float, *, keep_alive: bool) -> None:
        """Build the request of the next delivery, a first attempt, unless this was done.

        Args:
            now: epoch seconds.
            keep_alive: that of the request in flight.
        """
        if self.prepared is not None:
            return
        source = self._source
        endpoint = source.endpoint
        message = prepare(
            send.delivery, send.previous_seq, lane_ends=send.lane_ends,
            headers=endpoint.headers, message_format=endpoint.message_format,
        )  # fmt: skip
        # As the request in flight; another choice makes another time.
        at_s = int(now if self.signed_by is None else now + self.signed_by)
        keys = source.lasting_keys or endpoint.secrets_at(now)
        request = signed_request(
            source.recipient, message, send.attempt, at_s, keys, keep_alive=keep_alive
        )
        self.prepared = PreparedRequest(send, message, at_s, keys, request)
