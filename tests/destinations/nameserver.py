"""A DNS server on 127.0.0.1, with the part of RFC 1035 that resolvers use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

A, CNAME, AAAA, SOA = 1, 5, 28, 6
NXDOMAIN = 3
UDP_BYTES_MAX = 1200
_POINTER = b"\xc0\x0c"
"""A compression pointer to the name of the question."""


@dataclass
class NameServer:
    """The records of the server, and its received questions."""

    names: Mapping[str, Sequence[str]]
    """Addresses by name, or `->NAME` for an alias; an empty entry never gets a response."""
    asked: list[str] = field(default_factory=list)
    port: int = 0
    ttl_s: int = 60

    @property
    def options(self) -> dict[str, object]:
        """Options that restrict c-ares to this server."""
        return {"servers": [f"127.0.0.1:{self.port}"]}

    def response(self, query: bytes, bytes_max: int) -> bytes | None:
        number = query[:2]
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode())
            at += 1 + length
        name = ".".join(labels).lower()
        question = query[12 : at + 5]
        (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
        self.asked.append(name)
        if name not in self.names:
            return number + struct.pack("!5H", 0x8180 | NXDOMAIN, 1, 0, 0, 0) + question
        message = self.names[name]
        if not message:
            return None
        records = [found for each in message if (found := _record(each, kind, self.ttl_s))]
        body = b"".join(records)
        head = struct.pack("!5H", 0x8180, 1, len(records), 0, 0)
        if 12 + len(question) + len(body) > bytes_max:
            return number + struct.pack("!5H", 0x8380, 1, 0, 0, 0) + question  # Retry over TCP.
        return number + head + question + body


def _record(message: str, kind: int, ttl_s: int) -> bytes | None:
    if message.startswith("->"):
        data = b"".join(bytes([len(part)]) + part.encode() for part in message[2:].split("."))
        return _POINTER + struct.pack("!HHIH", CNAME, 1, ttl_s, len(data) + 1) + data + b"\0"
    address = ip_address(message)
    if kind != (A if address.version == 4 else AAAA):
        return None
    packed = address.packed
    return _POINTER + struct.pack("!HHIH", kind, 1, ttl_s, len(packed)) + packed


def _serve_udp(server: NameServer, bound: socket.socket, over: threading.Event) -> None:
    # A thread, because asyncio reads one datagram per loop iteration, and hundreds that arrive
    # within one iteration would overflow the socket buffer.
    bound.settimeout(0.05)
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            data, sender = bound.recvfrom(65536)
            if (response := server.response(data, UDP_BYTES_MAX)) is not None:
                bound.sendto(response, sender)


@contextlib.asynccontextmanager
async def naming(names: Mapping[str, Sequence[str]]) -> AsyncIterator[NameServer]:
    """Run the server on one port of 127.0.0.1, over UDP and TCP."""
    server = NameServer(names)

    async def tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                response = server.response(await reader.readexactly(length), 65535)
                if response is not None:
                    writer.write(struct.pack("!H", len(response)) + response)
        writer.close()

    listener = await asyncio.start_server(tcp, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    over = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", server.port))
        thread = threading.Thread(target=_serve_udp, args=(server, bound, over), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            over.set()
            await asyncio.to_thread(thread.join)
            listener.close()
            await listener.wait_closed()
