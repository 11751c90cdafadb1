"""CloudEvents 1.0.2: the attributes of a delivery, and both forms in which they are sent.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md

    id                 the X-Delivery, which with `source` identifies the event to its receiver
    source             a setting of the endpoint
    type, time         of the event
    subject            the event's key
    partitionkey       the same, for brokers (Partitioning extension)
    datacontenttype    of the payload; in binary mode it is the header Content-Type
    traceparent, tracestate      of the event's headers (Distributed Tracing extension)

Attributes of our own are extensions.  Numbers are decimal text, because an Integer of CloudEvents
has 32 bits:

    lane, lanesequence, previoussequence, eventid, tenant, replayof (lane/number), backfill,
    laneends

There is no `sequence` of the public extension: it orders all events of a `source`, and as text,
while our numbers order the deliveries of a lane.

No attribute can have a control character.  A key or tenant that has one is in `encodedkey` or
`encodedtenant` instead, percent-encoded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import orjson

from outbox.core.messages.envelope import add_data, rfc3339
from outbox.core.messages.signed_metadata import ATTRIBUTE_PREFIX, encode_text
from outbox.core.model.message_format import JSON_TYPE

if TYPE_CHECKING:
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.response import Headers

    Attributes: TypeAlias = dict[str, str | bool]

STRUCTURED_TYPE = "application/cloudevents+json; charset=utf-8"
BATCH_TYPE = "application/cloudevents-batch+json; charset=utf-8"
_TRACE = ("traceparent", "tracestate")
# W3C Trace Context recommends to pass on at least 512 characters.
_TRACE_VALUE = re.compile(r"[ -~]{1,512}")
# Control characters, and the code points that are no characters.
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
    + "]"
)


def structured_event(
    delivery: Delivery, message_id: str, previous_seq: int, source: str, *, lane_ends: bool
) -> bytes:
    """The JSON object of a delivery.

    Args:
        message_id: the X-Delivery.
        previous_seq: the last delivered sequence of the lane, 0: none.
        source: the attribute.
        lane_ends: no delivery follows in its lane.
    """
    attributes = _attributes(delivery, message_id, previous_seq, source, lane_ends=lane_ends)
    attributes["datacontenttype"] = delivery.content_type or JSON_TYPE
    return add_data(orjson.dumps(attributes)[:-1], delivery)


def headers_of(
    delivery: Delivery, message_id: str, previous_seq: int, source: str, *, lane_ends: bool
) -> Headers:
    """The headers of the binary form, whose body is the payload; for the arguments see above."""
    attributes = _attributes(delivery, message_id, previous_seq, source, lane_ends=lane_ends)
    return tuple(
        (ATTRIBUTE_PREFIX + name, "true" if value is True else encode_text(str(value)))
        for name, value in attributes.items()
    )


def _attributes(
    delivery: Delivery, message_id: str, previous_seq: int, source: str, *, lane_ends: bool
) -> Attributes:
    attributes: Attributes = {
        "specversion": "1.0",
        "id": message_id,
        "source": source,
        "type": delivery.type,
        "time": rfc3339(delivery.published_at),
        "lane": delivery.lane,
        "lanesequence": str(delivery.seq),
        "previoussequence": str(previous_seq),
        "eventid": str(delivery.event_id),
    }
    key, tenant = delivery.key, delivery.tenant
    if key is not None:
        if _FORBIDDEN.search(key):
            attributes["encodedkey"] = encode_text(key)
        else:
            attributes["subject"] = attributes["partitionkey"] = key
    if tenant is not None:
        if _FORBIDDEN.search(tenant):
            attributes["encodedtenant"] = encode_text(tenant)
        else:
            attributes["tenant"] = tenant
    if delivery.headers is not None:
        carried = {name.lower(): value for name, value in orjson.loads(delivery.headers).items()}
        for name in _TRACE:
            value = carried.get(name)
            if isinstance(value, str) and _TRACE_VALUE.fullmatch(value):
                attributes[name] = value
    if delivery.replay_of is not None:
        attributes["replayof"] = "{}/{}".format(*delivery.replay_of)
    if delivery.backfill_id is not None:
        attributes["backfill"] = str(delivery.backfill_id)
    if lane_ends:
        attributes["laneends"] = True
    return attributes
