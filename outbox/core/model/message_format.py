"""Message formats: how an endpoint wants its deliveries.

envelope             a JSON object with metadata and `data`
thin                 the same object without `data`
raw                  the payload; the metadata is in headers, with a signature of its own
cloudevents          CloudEvents 1.0 in structured mode: a JSON object
cloudevents-binary   the payload; the metadata is in headers, as for `raw` and as `ce-…`
"""

from __future__ import annotations

from typing import Literal, NamedTuple

FormatName = Literal["envelope", "thin", "raw", "cloudevents", "cloudevents-binary"]

JSON_TYPE = "application/json"
"""Content type of JSON payloads, which no other payload can have."""
CLOUDEVENTS_TYPES = "application/cloudevents"
"""Begins the content types of whole CloudEvents, which no payload can have."""
UNBATCHED: tuple[FormatName, ...] = ("raw", "cloudevents-binary")
"""Their body is one payload, so a request has one delivery."""
BATCH_MAX = 1000
"""Deliveries per request."""
DEFAULT_SOURCE = "/outbox"


class MessageFormat(NamedTuple):
    """What an endpoint's settings say about the body of its requests."""

    name: FormatName = "envelope"
    source: str = DEFAULT_SOURCE
    """`source` of CloudEvents: a URI reference."""

    @property
    def fetched(self) -> MessageFormat:
        """The format in which receivers fetch deliveries: with what a thin message leaves out."""
        return ENVELOPE if self.name == "thin" else self


ENVELOPE = MessageFormat()
