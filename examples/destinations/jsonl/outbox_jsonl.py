"""A destination that appends the messages of each lane to a file of this machine.

Each line has the lane's position and its owner.  Opening a lane appends a line without a message.
"""

import asyncio
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from outbox import destination as port
from outbox.destination import Appended, Position, Stop, StopKind

LINE_BYTES_MAX = 1024 * 1024
FORM = "jsonl://localhost/var/spool/orders"
# After another error a prefix may be stored: the relay opens the lane, as after a crash.
KINDS = {FileNotFoundError: StopKind.UNAVAILABLE, PermissionError: StopKind.MISCONFIGURED}


class Target(NamedTuple):
    streams: Path
    servers: tuple[tuple[str, int], ...] = ()
    secure: bool = False


def parse_url(url: str) -> Target:
    parts = port.parse_broker_url(url, ports={"jsonl": 1}, path="directory", options=(), form=FORM)
    if parts.servers[0].host != "localhost":
        raise port.UsageError(f"url: names another machine; use a form such as {FORM}")
    return Target(Path("/", port.decode_name(parts.path, "directory")))


class JsonlBroker:
    capabilities = port.Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, address, policy, resolver) -> None:
        self._directory, self._timeout_s = parse_url(address.url).streams, address.timeout_s
        self._threads = ThreadPoolExecutor(8)
        self._calls, self._is_closed = set(), False

    async def open(self, lane, owner, after, receipt, *, force=False) -> port.Standing:
        return await self._call(lambda: self._open(lane, owner, force))

    async def append(self, lane, owner, after, messages) -> Appended:
        result = await self._call(lambda: self._append(lane, owner, after, messages))
        return Appended(after, result) if isinstance(result, Stop) else result

    async def check(self, lanes) -> list[port.BrokerFinding]:
        if await self._call(lambda: os.access(self._directory, os.W_OK | os.X_OK)) is True:
            return []
        what = f"{self._directory} is not there, or cannot be written"
        return [port.BrokerFinding(True, what, "mount it, or correct its owner")]

    async def aclose(self) -> None:
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work):
        """Work in a thread, because files block.  What it does after the time-out is refused by
        the fence if the lane has been opened since."""
        if self._is_closed:
            return Stop(StopKind.UNAVAILABLE, "the destination was closed")
        call = asyncio.wrap_future(self._threads.submit(work))
        self._calls.add(call)
        try:
            await asyncio.wait([call], timeout=self._timeout_s)
            if not call.done() or call.cancelled():
                return Stop(StopKind.UNKNOWN, f"no result within {self._timeout_s:g} s")
            return call.result()
        except OSError as error:
            return Stop(KINDS.get(type(error), StopKind.UNKNOWN), port.one_line(str(error)))
        finally:
            self._calls.discard(call)
            call.cancel()  # If no thread has begun it, none will.

    def _open(self, lane, owner, force) -> port.Standing:
        with self._locked(lane) as file:
            while (tail := read_tail(file)) and not tail.endswith(b"\n"):
                # A crash tore the last line, which was not acknowledged.
                file.truncate(file.tell() - len(tail) + tail.rfind(b"\n") + 1)
            fence, position = read_last(file)
            if not isinstance(position, Position):
                return position
            if fence and not force:
                if fence.identity != owner.identity:
                    return port.Foreign("the lane belongs to another database")
                if fence > owner:
                    return port.Fenced(fence.epoch)
            self._write(file, [to_line(owner, *position)])
            return position

    def _append(self, lane, owner, after, messages) -> Appended:
        lines = [to_line(owner, m.sequence, m.delivery, m) for m in messages]
        count = next((n for n, line in enumerate(lines) if len(line) > LINE_BYTES_MAX), len(lines))
        with self._locked(lane) as file:
            fence, position = read_last(file)
            if fence != owner or position[0] != after:
                return Appended(after, Stop(StopKind.MOVED, "the lane stands elsewhere"))
            self._write(file, lines[:count])
        stop = Stop(StopKind.REFUSED, "the line is too long") if count < len(lines) else None
        return Appended(messages[count - 1].sequence if count else after, stop)

    @contextmanager
    def _locked(self, lane):
        # The directory is not created: the disk may not be mounted.
        path = self._directory / f"{lane}.jsonl"
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise OSError(f"{path} was replaced")
            yield file

    def _write(self, file, lines) -> None:
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(self._directory, os.O_RDONLY)  # The file may be new.
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_tail(file) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LINE_BYTES_MAX))
    return file.read()


def read_last(file) -> tuple[port.Owner | None, Position | port.Foreign]:
    if not (tail := read_tail(file)):
        return None, Position(0, None)
    try:
        last = json.loads(tail.splitlines()[-1])
        return port.Owner(*last["owner"]), Position(last["sequence"], last["delivery"])
    except (ValueError, LookupError, TypeError):
        return None, port.Foreign("the last line is not the relay's")


def to_line(owner, sequence, delivery, message=None) -> bytes:
    line = {"owner": owner, "sequence": sequence, "delivery": delivery}
    if message is not None:
        body = message.body.decode(errors="surrogateescape")
        line |= {"headers": message.headers, "body": body}
    return json.dumps(line).encode() + b"\n"


JSONL = port.Destination(
    "JSON lines", FORM, "A directory of the relay's machine.", parse_url, JsonlBroker
)
