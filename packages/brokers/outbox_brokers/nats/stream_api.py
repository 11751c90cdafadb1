"""Requests to the JetStream API, and what its errors mean.

Reads use STREAM.MSG.GET, to which the stream's leader responds; direct gets may come from a
replica that is behind.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import one_line
from outbox_brokers.nats.connection import JETSTREAM_REPLY_BYTES, Stopped

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from outbox_brokers.nats.connection import Connection

STREAM_NOT_FOUND = 10059
NO_MESSAGE = 10037
WRONG_LAST_SEQUENCE = (10071, 10164)
DUPLICATE_IN_BATCH = 10201
BATCH_INCOMPLETE = 10176
BATCH_DISABLED = 10174
TOO_LARGE = 10054
"""Larger than the stream's max_msg_size."""
_FULL = 10077
STORED_HEADERS_BYTES_MAX = 64 * 1024
"""Bytes of a stored message's headers that are read; a delivery of this relay has fewer."""
_HOLD = {
    10060: "the messages' subject belongs to another stream",
    STREAM_NOT_FOUND: "the stream does not exist",
    10109: "the stream is sealed",
    BATCH_DISABLED: "the stream does not allow atomic batches",
    10111: "the stream does not allow rollup",
}
_NO_RESPONDERS = "503"


class NoResponders(Exception):
    """No stream has the subject, or it has no leader; nothing was stored."""


class ApiError(Exception):
    """An error of JetStream: a definite response, nothing was stored."""

    def __init__(self, error: dict[str, Any]) -> None:
        self.status = int(error.get("code", 0))
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{self.description} ({self.code})")

    @property
    def stop(self) -> Stop:
        """What the error means for an append."""
        text = str(self)
        if self.code in WRONG_LAST_SEQUENCE or self.code == DUPLICATE_IN_BATCH:
            kind = StopKind.MOVED
        elif self.code == TOO_LARGE:
            kind = StopKind.REFUSED
        elif self.code in _HOLD:
            kind, text = StopKind.MISCONFIGURED, f"{_HOLD[self.code]}: {text}"
        elif self.code == _FULL:
            kind, text = StopKind.UNAVAILABLE, f"the stream is full: {text}"
        elif self.status == 503 or self.status >= 500 or self.code == BATCH_INCOMPLETE:
            kind = StopKind.UNAVAILABLE
        else:
            # About the stream or the account, never about one message.
            kind = StopKind.MISCONFIGURED
        return Stop(kind, one_line(text))


class StreamInfo(NamedTuple):
    """Configuration and state of a stream."""

    name: str
    created: str
    last_seq: int
    config: dict[str, Any]


class StoredMessage(NamedTuple):
    """The last message of a subject."""

    seq: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


async def find_stream(connection: Connection, subject: str) -> str:
    """Return the name of the stream that has a subject.

    Raises:
        Stopped: none or several have it, or the call failed.
    """
    response = await _call(connection, "STREAM.NAMES", {"subject": subject})
    names = response.get("streams") or []
    if len(names) != 1:
        first = subject.removesuffix(".*.m")
        found = f"{len(names)} streams have" if names else "no stream has"
        action = (
            "name one in the URL: ?stream=NAME"
            if names
            else f"make one: nats stream add {first.replace('.', '-')} --subjects "
            f"'{first}.*.m,{first}.*.f' --allow-batch --allow-rollup --discard new --deny-delete "
            "--defaults"
        )
        raise Stopped(StopKind.MISCONFIGURED, f"{found} the subject {subject}; {action}")
    return str(names[0])


async def stream_info(connection: Connection, stream: str) -> StreamInfo:
    """Return configuration and state of a stream.

    Raises:
        Stopped: it does not exist, or the call failed.
    """
    response = await _call(connection, f"STREAM.INFO.{stream}", {})
    return StreamInfo(
        stream,
        str(response.get("created", "")),
        int(response.get("state", {}).get("last_seq", 0)),
        response.get("config", {}),
    )


async def last_message(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """Return the last message of a subject from the stream's leader; None: it has none.

    Raises:
        Stopped: the call failed.
    """
    try:
        response = await _request(connection, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except ApiError as error:
        if error.code == NO_MESSAGE:
            return None
        raise _stopped(error) from None
    message = response["message"]
    return StoredMessage(
        int(message["seq"]),
        _parse_headers(base64.b64decode(message.get("hdrs", ""))),
        base64.b64decode(message.get("data", "")),
    )


def parse_ack(message: Msg) -> dict[str, Any]:
    """Return a PubAck.

    Raises:
        ApiError: it is an error.
        NoResponders: no stream has received the message.
    """
    if not message.data and (message.headers or {}).get("Status") == _NO_RESPONDERS:
        raise NoResponders
    response: dict[str, Any] = json.loads(message.data)
    if "error" in response:
        raise ApiError(response["error"])
    return response


async def _call(connection: Connection, method: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return await _request(connection, method, body)
    except ApiError as error:
        raise _stopped(error) from None


async def _request(connection: Connection, method: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return parse_ack(
            await connection.request(
                f"$JS.API.{method}", json.dumps(body).encode(), reply_bytes=JETSTREAM_REPLY_BYTES
            )
        )
    except NoResponders:
        raise Stopped(
            StopKind.UNAVAILABLE, "JetStream is not enabled for this account, or has no leader"
        ) from None
    except (ValueError, KeyError) as error:
        raise Stopped(StopKind.MISCONFIGURED, f"not a response of JetStream: {error}") from None


def _stopped(error: ApiError) -> Stopped:
    return Stopped(error.stop.kind, error.stop.detail)


def _parse_headers(raw: bytes) -> dict[str, str]:
    lines = raw[:STORED_HEADERS_BYTES_MAX].decode(errors="replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
