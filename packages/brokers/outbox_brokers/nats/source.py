"""Subjects of NATS JetStream, read by ephemeral consumers without acknowledgements.

The position of a lane is in the consumer's database, as its sequence number in the lane.  The
message of that number is found in the stream by binary search, because the numbers of a lane rise
with those of the stream.  So no position in the stream has to be stored, which a stream that was
restored or filled again would contradict.

Each lane has a pull consumer: what a lane does not take stays in the server, and holds up no other
lane.  The server deletes the consumers when they are not used any more.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from nats import errors
from nats.aio.client import Client, RawCredentials

from outbox.core.model.response import one_line
from outbox.receiver.streams.source import StoredEntry, StreamUnavailable
from outbox_brokers.nats.target import parse_credentials, parse_url
from outbox_brokers.nats.transport import GuardedTransport

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from outbox.receiver.streams.source import SourceOptions
    from outbox_brokers.nats.target import NatsCredentials, NatsTarget

INACTIVE_S = 120
"""Time after which the server deletes a consumer that is not used."""
READER_PING_S = 10
"""Interval of PINGs; a connection without a PONG for two of them is lost."""
_NANOSECONDS = 1_000_000_000
_NO_MESSAGE = 10037
_NO_MESSAGES, _PULL_ENDED, _HEARTBEAT = ("404", "408", "100")


class _ConsumerGone(Exception):
    """The server has deleted the consumer."""


class _Stored(NamedTuple):
    """A message as MSG.GET returns it."""

    stream_seq: int
    sequence: int | None
    """Its number in the lane; None: another writer's."""


class _LaneConsumer:
    """The consumer of one lane, with one pull at a time.

    Args:
        after: the sequence that its next message follows.
        inbox: subject of its subscription; its messages have their own subject.
    """

    def __init__(self, name: str, after: int, inbox: str) -> None:
        self.name = name
        self.after = after
        self.inbox = inbox
        self.messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        """The messages of the pull in flight; None: the connection was lost."""
        self.subscription: Subscription | None = None

    async def put(self, message: Msg) -> None:
        """Take a message from the subscription."""
        self.messages.put_nowait(message)


class NatsSource:
    """The subjects of one endpoint."""

    def __init__(
        self,
        target: NatsTarget,
        credentials: NatsCredentials,
        context: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._context = context
        self._timeout_s = timeout_s
        self._stream = target.stream or ""
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._consumers: dict[str, _LaneConsumer] = {}
        self._cause = "the connection was lost"

    @classmethod
    def factory(cls, options: SourceOptions) -> Callable[[], NatsSource]:
        """Return a function that makes a source.

        Raises:
            UsageError: the options are not valid.
        """
        target = parse_url(options.url)
        credentials = parse_credentials(options.credentials)
        context = options.tls_context() if target.secure else None
        return lambda: cls(target, credentials, context, options.timeout_s)

    async def with_entries(self, lanes: Sequence[str]) -> set[str]:
        return await self.lanes() & set(lanes)

    async def lanes(self) -> set[str]:
        # A snapshot; a lane without messages is not in it.
        async with self._bounded():
            stream = await self._connected()
            subjects: dict[str, int] = {}
            offset = 0
            while True:
                query = {"subjects_filter": self._subject("*"), "offset": offset}
                info = await self._api(f"STREAM.INFO.{stream}", query)
                page = info.get("state", {}).get("subjects") or {}
                subjects |= page
                offset += len(page)
                if not page or offset >= int(info.get("total", 0)):
                    break
        first, last = self._subject("*").split("*")
        return {each.removeprefix(first).removesuffix(last) for each in subjects}

    async def read(self, lane: str, after: int, count: int, wait_s: float) -> list[StoredEntry]:
        async with self._bounded(wait_s):
            await self._connected()
            try:
                consumer, found = await self._read(lane, after, count, wait_s)
            except _ConsumerGone:
                # The server deletes it when it is not used for a while, or restarts.
                await self._delete_consumer(lane)
                consumer, found = await self._read(lane, after, count, wait_s)
            entries = [_entry(message) for message in found]
            if entries:
                # Another writer's message has no number: the reader stops there, and reads again.
                consumer.after = -1 if entries[-1].sequence is None else entries[-1].sequence
        return entries

    async def _read(
        self, lane: str, after: int, count: int, wait_s: float
    ) -> tuple[_LaneConsumer, list[Msg]]:
        consumer = self._consumers.get(lane)
        if consumer is None or consumer.after != after:
            await self._delete_consumer(lane)
            consumer = await self._create_consumer(lane, after)
        found = await self._pull(consumer, {"batch": count, "no_wait": True})
        if not found and wait_s > 0:
            expires = round(wait_s * _NANOSECONDS)
            found = await self._pull(consumer, {"batch": 1, "expires": expires})
        return consumer, found

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(self._timeout_s):
                    await client.close()

    def _subject(self, lane: str) -> str:
        return f"{self._target.subject}.{lane}.m"

    # --------------------------------------------------------------------- connection

    @asynccontextmanager
    async def _bounded(self, longer_s: float = 0.0) -> AsyncIterator[None]:
        """Bound the time of a call, and give its errors one form."""
        try:
            async with asyncio.timeout(self._timeout_s + longer_s):
                yield
            return
        except TimeoutError:
            text = f"no response within {self._timeout_s:g} s"
        except (errors.Error, OSError, ValueError, LookupError) as error:
            text = str(error) or type(error).__name__
        where = f"{self._target.host}:{self._target.port}"
        raise StreamUnavailable(one_line(f"{where}: {text}"))

    async def _connected(self) -> str:
        """Connect unless already connected; returns the name of the stream."""
        async with self._connecting:
            if self._client is None:
                await self._connect()
            if not self._stream:
                found = await self._api("STREAM.NAMES", {"subject": self._subject("*")})
                names = found.get("streams") or []
                if len(names) != 1:
                    raise ValueError(
                        f"{len(names)} streams have the subject {self._subject('*')}; create one, "
                        "or name it in the URL: ?stream=NAME"
                    )
                self._stream = str(names[0])
        return self._stream

    async def _connect(self) -> None:
        client, target = Client(), self._target
        transport = GuardedTransport(secure=target.secure)
        client._transport = transport
        options: dict[str, Any] = {"tls": self._context, "tls_hostname": target.host.rstrip(".")}
        if self._credentials.creds is not None:
            options["user_credentials"] = RawCredentials(self._credentials.creds)
        elif self._credentials.token is not None:
            options["token"] = self._credentials.token
        elif self._credentials.user is not None:
            options |= {"user": self._credentials.user, "password": self._credentials.password}
        host = f"[{target.host}]" if ":" in target.host else target.host
        try:
            await client.connect(
                servers=[f"nats://{host}:{target.port}"],
                name="outbox reader",
                # The reader starts again from its positions.
                allow_reconnect=False,
                # Attempts of the first connect; 0 would mean no limit.
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=max(1, round(self._timeout_s)),
                ping_interval=READER_PING_S,
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                **options,
            )
        except BaseException:
            with suppress(Exception):
                await client.close()
            raise
        self._client = client

    async def _on_error(self, error: Exception) -> None:
        self._cause = str(error) or type(error).__name__

    async def _on_closed(self) -> None:
        for consumer in self._consumers.values():
            consumer.messages.put_nowait(None)

    async def _api(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call the JetStream API; only this module's callers bound the time."""
        assert self._client is not None
        payload = json.dumps(body).encode()
        reply = await self._client.request(f"$JS.API.{method}", payload, timeout=self._timeout_s)
        content: dict[str, Any] = json.loads(reply.data)
        if "error" in content:
            error = content["error"]
            raise _ApiError(str(error.get("description", "")), int(error.get("err_code", 0)))
        return content

    # ------------------------------------------------------------------------- lanes

    async def _create_consumer(self, lane: str, after: int) -> _LaneConsumer:
        name = uuid4().hex
        subject = self._subject(lane)
        start = await self._find_start(subject, after)
        config = {
            "name": name,
            "filter_subject": subject,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": INACTIVE_S * _NANOSECONDS,
        }
        await self._api(
            f"CONSUMER.CREATE.{self._stream}.{name}.{subject}",
            {"stream_name": self._stream, "config": config},
        )
        assert self._client is not None
        consumer = _LaneConsumer(name, after, self._client.new_inbox())
        consumer.subscription = await self._client.subscribe(consumer.inbox, cb=consumer.put)
        self._consumers[lane] = consumer
        return consumer

    async def _delete_consumer(self, lane: str) -> None:
        """Delete a lane's consumer without waiting: the server deletes it in any case."""
        consumer = self._consumers.pop(lane, None)
        if consumer is None or consumer.subscription is None or self._client is None:
            return
        await consumer.subscription.unsubscribe()
        await self._client.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{consumer.name}", b"")

    async def _find_start(self, subject: str, after: int) -> int:
        """The sequence in the stream from which on the lane's messages follow `after`."""
        last = await self._message({"last_by_subj": subject}) if after else None
        if last is None:
            return 1
        # The last message of another writer has no number: the search ends there.
        if last.sequence is not None and last.sequence <= after:
            return last.stream_seq + 1
        low, high = 1, last.stream_seq
        while low < high:
            middle = (low + high) // 2
            found = await self._message({"seq": middle, "next_by_subj": subject})
            if found is None or found.sequence is None or found.sequence > after:
                high = middle
            else:
                low = found.stream_seq + 1
        return low

    async def _message(self, query: dict[str, Any]) -> _Stored | None:
        # The stream's leader responds to it; direct gets may come from a replica that is behind.
        try:
            response = await self._api(f"STREAM.MSG.GET.{self._stream}", query)
        except _ApiError as error:
            if error.code == _NO_MESSAGE:
                return None
            raise
        message = response["message"]
        try:
            lines = base64.b64decode(message.get("hdrs", "")).decode(errors="replace")
        except binascii.Error:
            lines = ""
        pairs = (line.partition(":") for line in lines.split("\r\n")[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _Stored(int(message["seq"]), _sequence(headers))

    async def _pull(self, consumer: _LaneConsumer, request: dict[str, Any]) -> list[Msg]:
        """Pull messages until there are enough, or the server says that there are no more."""
        assert self._client is not None
        if self._client.is_closed:
            raise ConnectionError(self._cause)
        found: list[Msg] = []
        await self._client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer.name}",
            json.dumps(request).encode(),
            reply=consumer.inbox,
        )
        while len(found) < request["batch"]:
            message = await consumer.messages.get()
            if message is None:
                raise ConnectionError(self._cause)
            # An event may have a header of that name, but has its lane's subject.
            is_status = message.subject == consumer.inbox
            status = (message.headers or {}).get("Status") if is_status else None
            if status is None:
                found.append(message)
            elif status in (_NO_MESSAGES, _PULL_ENDED):
                break
            elif status != _HEARTBEAT:
                # No responders, or the consumer was deleted: return what was pulled before.
                if not found:
                    raise _ConsumerGone
                break
        return found


class _ApiError(ValueError):
    """An error of the JetStream API."""

    def __init__(self, description: str, code: int) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code


def _entry(message: Msg) -> StoredEntry:
    headers = {name.lower(): value for name, value in (message.headers or {}).items()}
    return StoredEntry(_sequence(headers), headers, message.data)


def _sequence(headers: dict[str, str]) -> int | None:
    text = headers.get("x-sequence", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
