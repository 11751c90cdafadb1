"""Hostile brokers: servers that send what no server should, by name of the attack.

Each plays its protocol up to the attack.  `ATTACKS` has every kind for every broker: too many
bytes, lines without an end, nesting, numbers of values, what nobody asked for, silence, and
responses of another form.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    Script = Callable[["Peer"], Awaitable[None]]

ENDLESS_BYTES = 64 << 20
"""A flood ends after these bytes, so that a client without limits fails a test in time."""
REDIS = "redis://127.0.0.1:{port}/events"
NATS = "nats://127.0.0.1:{port}/events"
RABBITMQ = "rabbitmq-stream://127.0.0.1:{port}/events"
KAFKA = "kafka://127.0.0.1:{port}/events"
DEEP = b"[" * 60_000
ESCAPES = b"\x1b[31m\x9b\x00\x07"


@dataclass
class Peer:
    """A connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    written: int = 0

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        self.written += len(data)

    async def flood(self, data: bytes) -> None:
        for _ in range(ENDLESS_BYTES // len(data)):
            await self.send(data)

    async def wait(self) -> None:
        """Until the client closes."""
        while await self.reader.read(65536):
            pass


@dataclass(frozen=True)
class Attack:
    """What a server does with each connection."""

    url: str
    script: Script


@dataclass
class Server:
    """A listening hostile server, and what it has counted."""

    url: str
    connections: int = 0
    ended: int = 0
    written_bytes: int = 0
    """Of the connection to which it wrote the most."""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def open(self) -> int:
        return self.connections - self.ended

    def close(self) -> None:
        for each in self._writers:
            each.transport.abort()


@asynccontextmanager
async def attacking(attack: Attack) -> AsyncIterator[Server]:
    """Listen on a port of loopback."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        server._writers.add(writer)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        writer.transport.set_write_buffer_limits(0)
        peer = Peer(reader, writer)
        try:
            await attack.script(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            server.written_bytes = max(server.written_bytes, peer.written)
            server.ended += 1
            server._writers.discard(writer)
            writer.transport.abort()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = Server(attack.url.format(port=listener.sockets[0].getsockname()[1]))
    try:
        yield server
    finally:
        listener.close()
        server.close()
        await listener.wait_closed()


def _floods(greeting: bytes, first: bytes, again: bytes) -> Script:
    """Greets, and answers the first bytes of the client without an end."""

    async def script(peer: Peer) -> None:
        await peer.send(greeting)
        await peer.reader.read(1)
        await peer.send(first)
        await peer.flood(again)

    return script


def _is_silent(greeting: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.send(greeting)
        await peer.wait()

    return script


async def _hangs_up(peer: Peer) -> None:
    await peer.reader.read(1)


def _drips(greeting: bytes, byte: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.send(greeting)
        while True:
            await peer.send(byte)
            await asyncio.sleep(0.05)

    return script


# ---------------------------------------------------------------- Redis


def _redis(
    opened: bytes = b"*3\r\n$4\r\nOPEN\r\n$1\r\n0\r\n$0\r\n\r\n", appended: bytes = b""
) -> Script:
    """Answers the script's calls with these bytes, and all else with 1."""

    async def script(peer: Peer) -> None:
        while True:
            words = []
            for _ in range(int((await peer.reader.readline())[1:] or b"0")):
                size = int((await peer.reader.readline())[1:])
                words.append((await peer.reader.readexactly(size + 2))[:-2])
            if not words:
                return
            reply = b":1\r\n"
            if words[0] in (b"EVALSHA", b"EVAL"):
                reply = opened if words[8] == b"" else appended or opened
            await peer.send(reply)

    return script


_REDIS_FORMS = {
    "a position that is no number": b"*3\r\n$4\r\nOPEN\r\n$1\r\nx\r\n$1\r\ny\r\n",
    "a position of 5,000 digits": b"*3\r\n$4\r\nOPEN\r\n$5000\r\n%b\r\n$1\r\ny\r\n" % (b"9" * 5000),
    "a negative position": b"*3\r\n$4\r\nOPEN\r\n$2\r\n-5\r\n$1\r\ny\r\n",
    "numbers for texts": b"*3\r\n$4\r\nOPEN\r\n:1\r\n:2\r\n",
    "an epoch that is no number": b"*2\r\n$6\r\nFENCED\r\n$1\r\nx\r\n",
    "nothing": b"*-1\r\n",
    "no value": b"$-1\r\n",
    "a length that is no number": b"$abc\r\n",
    "a negative length": b"*-7\r\n",
    "an unknown type": b"?what\r\n",
    "an error with escapes": b"-ERR %b\r\n" % ESCAPES,
    "an error without a text": b"-\r\n",
    "a value with escapes": b"*2\r\n$7\r\nFOREIGN\r\n$9\r\n%b\r\n" % ESCAPES.ljust(9),
    "60 KiB of values": b"*15000\r\n" + b":1\r\n" * 15000,
    "60 KiB of nesting": b"*1\r\n" * 15000,
}

# ---------------------------------------------------------------- NATS


def _info(**changes: Any) -> bytes:
    content = {"server_id": "x", "version": "2.12.0", "headers": True, "max_payload": 1 << 20}
    return b"INFO %s\r\n" % json.dumps(content | changes).encode()


INFO = _info(max_payload=1 << 30)
_NAMES, _STREAM, _LAST, _ACK = "STREAM.NAMES", "STREAM.INFO", "STREAM.MSG.GET", "ack"
_STATE = {
    "created": "2026-01-01T00:00:00Z",
    "state": {"last_seq": 0},
    "config": {"allow_atomic": True, "allow_rollup_hdrs": True, "subjects": ["events.>"]},
}
_POLITE = {
    _NAMES: b'{"streams": ["S"]}',
    _STREAM: json.dumps(_STATE).encode(),
    _LAST: b'{"error": {"code": 404, "err_code": 10037}}',
    _ACK: b'{"seq": 1, "stream": "S"}',
}
_PUBLISHED = re.compile(rb"(H?PUB) (\S+) (\S+) (?:\d+ )?(\d+)\r\n")


def _nats(replies: Mapping[str, bytes], info: bytes = INFO, unasked: bytes = b"") -> Script:
    """Answers requests by the method of the API.

    Args:
        replies: a payload for a method; those that begin with NATS/ are header blocks, and those
            that begin with INFO are sent as they are.
        unasked: sent once after the first subscription.
    """

    async def script(peer: Peer) -> None:
        await peer.send(info)
        while line := await peer.reader.readline():
            if line.startswith(b"PING"):
                await peer.send(b"PONG\r\n")
            elif line.startswith(b"SUB"):
                await peer.send(unasked)
            elif (found := _PUBLISHED.fullmatch(line)) is not None:
                await peer.reader.readexactly(int(found[4]) + 2)
                subject, reply = found[2].decode(), found[3]
                method = next((each for each in _POLITE if each in subject), _ACK)
                payload = replies.get(method, _POLITE[method])
                if payload.startswith(b"INFO "):
                    await peer.send(payload)
                elif payload.startswith(b"NATS/"):
                    sizes = b"%d %d" % (len(payload), len(payload))
                    await peer.send(b"HMSG %b 1 %b\r\n%b\r\n" % (reply, sizes, payload))
                else:
                    await peer.send(b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(payload), payload))

    return script


def _hdrs(raw: bytes) -> bytes:
    message = {"seq": 1, "hdrs": base64.b64encode(raw).decode(), "data": ""}
    return json.dumps({"message": message}).encode()


_NATS_FORMS: dict[str, dict[str, bytes]] = {
    **{
        f"{what} for {method}": {method: payload}
        for method in _POLITE
        for what, payload in {
            "nesting": DEEP,
            "a list": b"[]",
            "a number": b"5",
            "no JSON": b"\xff\xfe{",
            "an error that is a text": b'{"error": "no"}',
            "an error of another form": b'{"error": {"code": [], "err_code": {}}}',
        }.items()
    },
    "streams that are a number": {_NAMES: b'{"streams": 5}'},
    "a stream's name that is a list": {_NAMES: b'{"streams": [["x"]]}'},
    "a stream's name with a line break": {_NAMES: b'{"streams": ["S\\r\\nPUB a 0"]}'},
    "a state that is a text": {_STREAM: b'{"state": "x", "config": []}'},
    "a configuration of texts": {
        _STREAM: json.dumps(_STATE | {"config": {"allow_atomic": 1, "max_age": "x"}}).encode()
    },
    "a message that is a number": {_LAST: b'{"message": 5}'},
    "a message without a sequence": {_LAST: b'{"message": {}}'},
    "a message that is no Base64": {_LAST: b'{"message": {"seq": 1, "hdrs": "%%%"}}'},
    "a megabyte of a message's headers": {_LAST: _hdrs(b"NATS/1.0\r\n" + b"a:b\r\n" * 200_000)},
    "a sequence of 4,000 digits": {_ACK: b'{"seq": %b}' % (b"9" * 4000)},
    "a sequence that is a text": {_ACK: b'{"seq": "x"}'},
    "an acknowledgement without a sequence": {_ACK: b"{}"},
    "an error with escapes": {
        _ACK: json.dumps({"error": {"code": 400, "description": "\x1b[31m\x00"}}).encode()
    },
    "a megabyte of headers": {_STREAM: b"NATS/1.0\r\n" + b"a:b\r\n" * 200_000 + b"\r\n"},
    "headers of another form": {_STREAM: b"NATS/1.0 \xff\r\n\x00\r\n\r\n"},
}
_URLS = [f"10.{n >> 8 & 255}.{n & 255}.1:4222" for n in range(3000)]
_MORE_URLS = [f"{n:x}.x" for n in range(80_000)]
_INFO_FORMS = {
    "INFO of nesting": b"INFO %b\r\n" % DEEP,
    "INFO that is a list": b"INFO []\r\n",
    "INFO with limits that are texts": _info(max_payload="x", version=5),
    "INFO with a negative limit": _info(max_payload=-1),
    "INFO with 3,000 servers": _info(connect_urls=_URLS),
    "INFO with servers that are numbers": _info(connect_urls=[1, None, {}]),
    "INFO that asks for TLS": _info(tls_required=True),
}

# ---------------------------------------------------------------- RabbitMQ

_PEER, _SASL, _AUTHENTICATE, _TUNE, _OPEN, _METADATA = 17, 18, 19, 20, 21, 15
_DECLARE, _PUBLISH, _CONFIRM, _QUERY, _SUBSCRIBE, _DELIVER = 1, 2, 3, 5, 7, 8
_CLOSE, _HEARTBEAT, _MOVED = 22, 23, 16
_MANY = struct.pack(">I", 0xFFFFFFFF)


def frame(key: int, body: bytes) -> bytes:
    return struct.pack(">IHH", len(body) + 4, key, 1) + body


def _response(key: int, request: bytes, rest: bytes = b"", code: int = 1) -> bytes:
    return frame(key | 0x8000, request[8:12] + struct.pack(">H", code) + rest)


def _text(text: bytes) -> bytes:
    return struct.pack(">H", len(text)) + text


def _placed(request: bytes, host: bytes = b"127.0.0.1", port: int = 5552) -> bytes:
    name = request[16:]  # With its length, after the number of names.
    node = struct.pack(">IH", 1, 1) + _text(host) + struct.pack(">I", port)
    stream = struct.pack(">I", 1) + name + struct.pack(">HHI", 1, 1, 0)
    return frame(_METADATA | 0x8000, request[8:12] + node + stream)


def _rabbitmq(replies: Mapping[int, Callable[[bytes], bytes]], unasked: bytes = b"") -> Script:
    """Answers requests by their key; `unasked` is repeated after the authentication."""
    tune = frame(_TUNE, struct.pack(">ii", 1 << 20, 60))
    polite: dict[int, Callable[[bytes], bytes]] = {
        _PEER: lambda request: _response(_PEER, request, struct.pack(">I", 0)),
        _SASL: lambda request: _response(_SASL, request, struct.pack(">I", 1) + _text(b"PLAIN")),
        _AUTHENTICATE: lambda request: _response(_AUTHENTICATE, request) + tune,
        _TUNE: lambda _: b"",
        _OPEN: lambda request: _response(_OPEN, request, struct.pack(">I", 0)),
        _METADATA: _placed,
        _QUERY: lambda request: _response(_QUERY, request, struct.pack(">Q", 0)),
        _PUBLISH: lambda _: b"",
        _HEARTBEAT: lambda _: b"",
    }

    async def script(peer: Peer) -> None:
        while True:
            head = await peer.reader.readexactly(8)
            size, key, _ = struct.unpack(">IHH", head)
            request = head + await peer.reader.readexactly(size - 4)
            reply = replies.get(key) or polite.get(key)
            await peer.send(_response(key, request) if reply is None else reply(request))
            if key == _OPEN and unasked:
                await peer.flood(unasked)

    return script


def _with(key: int, rest: bytes) -> dict[int, Callable[[bytes], bytes]]:
    return {key: lambda request: _response(key, request, rest)}


def _chunk(entry: bytes, entries: int = 1) -> bytes:
    """A chunk of a stream with this data, in a frame."""
    head = struct.pack(">BBHIqQQIIII", 0x50, 0, entries, entries, 0, 1, 0, 0, len(entry), 0, 0)
    return frame(_DELIVER, b"\0" + head + entry)


def _delivering(entry: bytes, entries: int = 1) -> dict[int, Callable[[bytes], bytes]]:
    return {
        _QUERY: lambda request: _response(_QUERY, request, struct.pack(">Q", 1)),
        _SUBSCRIBE: lambda request: _response(_SUBSCRIBE, request) + _chunk(entry, entries),
    }


def _entry(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


_PROPERTIES = b"\x00\x53\x74"
_NULLS = b"\x40" * 3_000_000
_RABBITMQ_FORMS: dict[str, Script] = {
    "4,294,967,295 properties before the authentication": _rabbitmq(_with(_PEER, _MANY)),
    "4,294,967,295 mechanisms": _rabbitmq(_with(_SASL, _MANY)),
    "4,294,967,295 properties of a virtual host": _rabbitmq(_with(_OPEN, _MANY)),
    "4,294,967,295 nodes": _rabbitmq(
        {_METADATA: lambda request: frame(_METADATA | 0x8000, request[8:12] + _MANY)}
    ),
    "4,294,967,295 confirms": _rabbitmq({_PUBLISH: lambda _: frame(_CONFIRM, b"\0" + _MANY)}),
    "60 KiB of mechanisms": _rabbitmq(
        _with(_SASL, struct.pack(">I", 30_000) + _text(b"") * 30_000)
    ),
    "a megabyte of nodes": _rabbitmq(
        {
            _METADATA: lambda request: frame(
                _METADATA | 0x8000,
                request[8:12] + struct.pack(">I", 120_000) + bytes(8) * 120_000 + bytes(4),
            )
        }
    ),
    "a frame of 30 MiB that is no chunk": _rabbitmq(
        {
            _SUBSCRIBE: lambda request: frame(
                _METADATA | 0x8000,
                request[8:12] + struct.pack(">I", 3_900_000) + bytes(8) * 3_900_000 + bytes(4),
            )
        }
    ),
    "a node at port 4,294,967,295": _rabbitmq(
        {_METADATA: lambda request: _placed(request, b"127.0.0.2", 0xFFFFFFFF)}
    ),
    "a node with a name of 60 KiB": _rabbitmq(
        {_METADATA: lambda request: _placed(request, b"x" * 60_000)}
    ),
    "a node with escapes in its name": _rabbitmq(
        {_METADATA: lambda request: _placed(request, b"\x1b[31m\x00\n")}
    ),
    "an advertised port of 5,000 digits": _rabbitmq(
        _with(
            _OPEN,
            struct.pack(">I", 2)
            + _text(b"advertised_host")
            + _text(b"h")
            + _text(b"advertised_port")
            + _text(b"9" * 5000),
        )
    ),
    "a reason with escapes": _rabbitmq(
        {_OPEN: lambda _: frame(_CLOSE, struct.pack(">IH", 1, 2) + _text(b"\x1b[31m\x00"))}
    ),
    "negative limits": _rabbitmq(
        {
            _AUTHENTICATE: lambda request: (
                _response(_AUTHENTICATE, request) + frame(_TUNE, struct.pack(">ii", -1, -1))
            )
        }
    ),
    "nothing but heartbeats": _rabbitmq({}, frame(_HEARTBEAT, b"") * 8000),
    "responses that nobody asked for": _rabbitmq({}, frame(_OPEN | 0x8000, bytes(10)) * 4000),
    "confirms that nobody asked for": _rabbitmq({}, frame(_CONFIRM, bytes(5)) * 4000),
    "60 MiB in a chunk": _rabbitmq(_delivering(_entry(bytes(60 << 20)))),
    "3,000,000 properties of a message": _rabbitmq(
        _delivering(
            _entry(
                _PROPERTIES + b"\xd1" + struct.pack(">II", len(_NULLS) + 4, len(_NULLS)) + _NULLS
            )
        )
    ),
    "properties of nesting": _rabbitmq(
        _delivering(
            _entry(_PROPERTIES + b"\xd1" + struct.pack(">II", 30_004, 2) + b"\xc0\x02\x01" * 10_000)
        )
    ),
    "a property with an array of 4,294,967,295 nulls": _rabbitmq(
        _delivering(
            _entry(
                _PROPERTIES
                + b"\xd1"
                + struct.pack(">II", 4 + 3 + 10, 2)
                + b"\xa1\x01x"
                + b"\xf0"
                + struct.pack(">II", 5, 0xFFFFFFFF)
                + b"\x40"
            )
        )
    ),
    "a chunk with fewer entries than it says": _rabbitmq(_delivering(_entry(b"x"), 60_000)),
}

# ---------------------------------------------------------------- Kafka


def _kafka(body: Callable[[bytes], bytes]) -> Script:
    """Answers each request with this body after the size and the correlation id."""

    async def script(peer: Peer) -> None:
        while True:
            head = await peer.reader.readexactly(4)
            request = await peer.reader.readexactly(int.from_bytes(head))
            content = request[4:8] + body(request)
            await peer.send(struct.pack(">I", len(content)) + content)

    return script


_VERSIONS = b"\0\0" + bytes((5,)) + b"".join(
    struct.pack(">hhhb", key, 0, high, 0) for key, high in ((0, 7), (1, 4), (3, 1), (18, 3))
) + bytes(5)  # fmt: skip


def _kafka_metadata(content: bytes) -> Script:
    """Answers requests for metadata with this content."""

    def body(request: bytes) -> bytes:
        return _VERSIONS if request[:2] == b"\0\x12" else content

    return _kafka(body)


HEAVY = ("rabbitmq: 60 MiB in a chunk",)
"""Attacks for which the server needs more memory than a benchmark of many gives it."""
ATTACKS: dict[str, Attack] = {
    "redis: a value of 3.9 GB": Attack(REDIS, _floods(b"", b"$3900000000\r\n", bytes(65536))),
    "redis: a line without an end": Attack(REDIS, _floods(b"", b"+", b"x" * 65536)),
    "redis: an array in an array": Attack(REDIS, _floods(b"", b"", b"*1\r\n" * 16384)),
    "redis: an array of a thousand million": Attack(
        REDIS, _floods(b"", b"*1000000000\r\n", b":1\r\n" * 9999)
    ),
    "redis: values that nobody asked for": Attack(REDIS, _floods(b"", b"", b"+OK\r\n" * 9999)),
    "redis: before a call": Attack(REDIS, _floods(b"x" * 65537, b"", bytes(65536))),
    "redis: silence": Attack(REDIS, _is_silent(b"")),
    "redis: one byte at a time": Attack(REDIS, _drips(b"", b"x")),
    "redis: the end at each call": Attack(REDIS, _hangs_up),
    **{
        f"redis: {name}{where}": Attack(REDIS, script)
        for name, reply in _REDIS_FORMS.items()
        for where, script in (
            ("", _redis(reply)),
            (", for an append", _redis(appended=reply)),
        )
    },
    "nats: a message of 3.9 GB": Attack(
        NATS, _floods(INFO, b"MSG x 1 3900000000\r\n", bytes(65536))
    ),
    "nats: nothing but OK": Attack(NATS, _floods(INFO, b"PONG\r\n", b"+OK\r\n" * 9999)),
    "nats: nothing but PING": Attack(NATS, _floods(INFO, b"PONG\r\n", b"PING\r\n" * 9999)),
    "nats: nothing but errors": Attack(
        NATS, _floods(INFO, b"PONG\r\n", b"-ERR 'permissions violation'\r\n" * 2000)
    ),
    "nats: INFO without an end": Attack(NATS, _floods(b"INFO {", b"", b" " * 65536)),
    "nats: INFO without an end, later": Attack(
        NATS, _floods(INFO, b"PONG\r\nINFO {", b" " * 65536)
    ),
    "nats: a line without an end": Attack(NATS, _floods(INFO, b"PONG\r\nMSG ", b"x" * 65536)),
    "nats: silence": Attack(NATS, _is_silent(b"")),
    "nats: silence after INFO": Attack(NATS, _is_silent(INFO)),
    "nats: one byte at a time": Attack(NATS, _drips(b"INFO ", b"x")),
    "nats: the end at each call": Attack(NATS, _hangs_up),
    "nats: INFO with 80,000 servers twice for a response": Attack(
        NATS,
        _nats({_NAMES: _info(connect_urls=_MORE_URLS[:40_000]) + _info(connect_urls=_MORE_URLS)}),
    ),
    "nats: INFO of nesting, later": Attack(NATS, _nats({}, INFO, b"INFO %b\r\n" % DEEP)),
    **{f"nats: {name}": Attack(NATS, _nats({}, info)) for name, info in _INFO_FORMS.items()},
    **{f"nats: {name}": Attack(NATS, _nats(forms)) for name, forms in _NATS_FORMS.items()},
    "rabbitmq: a frame of 60 MiB": Attack(
        RABBITMQ, _floods(b"", struct.pack(">IHH", 60 << 20, 17, 1), bytes(65536))
    ),
    "rabbitmq: silence": Attack(RABBITMQ, _is_silent(b"")),
    "rabbitmq: one byte at a time": Attack(RABBITMQ, _drips(b"", b"\0")),
    "rabbitmq: the end at each call": Attack(RABBITMQ, _hangs_up),
    **{f"rabbitmq: {name}": Attack(RABBITMQ, script) for name, script in _RABBITMQ_FORMS.items()},
    "kafka: a response of 2 GB": Attack(
        KAFKA, _floods(b"", struct.pack(">II", 0x7FFFFFF0, 1), bytes(65536))
    ),
    "kafka: a response of negative size": Attack(
        KAFKA, _floods(b"", b"\xff\xff\xff\xff\0\0\0\1", bytes(65536))
    ),
    "kafka: a response of 90 MB": Attack(
        KAFKA, _floods(b"", struct.pack(">II", 90_000_000, 1), bytes(65536))
    ),
    "kafka: silence": Attack(KAFKA, _is_silent(b"")),
    "kafka: one byte at a time": Attack(KAFKA, _drips(b"", b"\0")),
    "kafka: the end at each call": Attack(KAFKA, _hangs_up),
    "kafka: a thousand million versions": Attack(
        KAFKA, _kafka(lambda _: b"\0\0" + b"\xff\xff\xff\xff\x0f")
    ),
    "kafka: a thousand million servers": Attack(KAFKA, _kafka_metadata(b"\x3b\x9a\xca\x00")),
    "kafka: a thousand million partitions": Attack(
        KAFKA,
        _kafka_metadata(
            struct.pack(">IIIIh", 0, 1, 1, 0, 6) + b"events\0" + b"\x3b\x9a\xca\x00"
        ),
    ),
    "kafka: a text": Attack(KAFKA, _floods(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"x" * 9999)),
}  # fmt: skip
