"""The script that opens a lane and appends to it, and what it returns.

Everything that it decides, it decides before its first write, so it stores all of its messages or
none.  Opening a lane writes the owner's epoch and opening into the fence, and an append needs both
there.  One that was sent before is refused, however late it arrives, also one of the same owner:
nothing is stored that the position did not show.  A forced opening replaces the fence whatever it
says; an append still needs exactly its own owner there.

The fence also has the sequence and X-Delivery of the last append: they show what the stream's last
message was when it has been trimmed.

The ids of entries are `<sequence>-0`; they are compared as text, because numbers of Lua are
doubles.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner
    from outbox_brokers.redis.target import RedisTarget

OPEN, FORCE = "", "force"
"""Values in place of the sequence of an append: open the lane, or open it whatever its fence
says."""
BODY = "body"
"""The field of an entry besides its headers."""
_VALUE = b"$%d\r\n%s\r\n"

# KEYS: the stream, the fence.  ARGV: epoch, opening, identity and lane, the sequence after which to
# append (or OPEN, FORCE); and for each message its sequence, the number of its fields and
# values, and these.
SCRIPT = """
local stream, fence = KEYS[1], KEYS[2]
local epoch, opening, who, after = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local owner = redis.call('HMGET', fence, 'epoch', 'opening', 'owner', 'last', 'delivery')
if after == 'force' then
  after = ''
else
  if owner[3] and owner[3] ~= who then return {'OTHER', owner[3]} end
  local epochs = tonumber(owner[1] or 0) - tonumber(epoch)
  local openings = tonumber(owner[2] or 0) - tonumber(opening)
  if epochs > 0 or (epochs == 0 and openings > 0) then return {'FENCED', owner[1]} end
end
if after ~= '' and (owner[1] ~= epoch or owner[2] ~= opening) then return {'UNOPENED'} end
local last = '0-0'
if redis.call('EXISTS', stream) == 1 then
  local about = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #about, 2 do
    if about[i] == 'last-generated-id' then last = about[i + 1] end
  end
end
local at, suffix = string.match(last, '^(%d+)-(%d+)$')
if suffix ~= '0' then return {'FOREIGN', last} end
if after == '' then
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  local delivery = ''
  if newest[1] and newest[1][1] == last then
    local fields = newest[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'x-delivery' then delivery = fields[i + 1] end
    end
    if delivery == '' then return {'FOREIGN', last} end
  elseif owner[4] == last then
    delivery = owner[5]
  end
  redis.call('HSET', fence, 'epoch', epoch, 'opening', opening, 'owner', who)
  return {'OPEN', at, delivery}
end
if at ~= after then return {'AT', at} end
local i, newest = 5, 5
while i <= #ARGV do
  local count = tonumber(ARGV[i + 1])
  redis.call('XADD', stream, ARGV[i] .. '-0', unpack(ARGV, i + 2, i + 1 + count))
  i, newest = i + 2 + count, i
end
local delivery = ''
for i = newest + 2, newest + 1 + ARGV[newest + 1], 2 do
  if ARGV[i] == 'x-delivery' then delivery = ARGV[i + 1] end
end
redis.call('HSET', fence, 'last', ARGV[newest] .. '-0', 'delivery', delivery)
return {'STORED'}
"""


DIGEST = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""The digest by which the server knows the script."""


def packed_call(
    command: tuple[str, str],
    target: RedisTarget,
    lane: str,
    owner: Owner,
    after: str,
    messages: Sequence[Message],
) -> bytes:
    """A call of the script in the protocol's form (RESP).

    By hand: redis-py's packing takes longer than everything else that is done for a message.

    Args:
        command: EVALSHA and the digest, or EVAL and the text.
        after: the sequence after which to append, OPEN or FORCE.
    """
    given = [
        *command, "2", target.stream_key(lane), target.fence_key(lane),
        str(owner.epoch), str(owner.opening), f"{owner.identity}/{lane}", after,
    ]  # fmt: skip
    count, parts = len(given), [_packed(each.encode()) for each in given]
    for message in messages:
        count += 4 + 2 * len(message.headers)
        parts.append(_packed_message(message))
    return b"*%d\r\n%b" % (count, b"".join(parts))


def _packed_message(message: Message) -> bytes:
    sequence, body = str(message.sequence), message.body
    names: list[str] = []
    values: list[int | str] = [len(sequence), sequence]
    for name, value in message.headers:
        names.append(name)
        values += (len(value), value)
    template = _template(tuple(names))
    head = template % tuple(values)
    if not head.isascii():
        # Lengths count bytes.
        values[2::2] = [len(value.encode()) for _, value in message.headers]
        head = template % tuple(values)
    return b"%b$%d\r\n%b\r\n" % (head.encode(), len(body), body)


@lru_cache(1024)
def _template(names: tuple[str, ...]) -> str:
    """A message with these headers up to its body: for each value its length and itself.

    The messages of an endpoint have the same headers, so that most of each is packed only once.
    """
    fields = [_packed(name.lower().encode()).replace(b"%", b"%%") + _VALUE for name in names]
    count = _packed(b"%d" % (2 * len(names) + 2))
    return b"".join([_VALUE, count, *fields, _packed(BODY.encode())]).decode()


def packed(*words: str) -> bytes:
    """A command in the protocol's form."""
    return b"*%d\r\n%b" % (len(words), b"".join(_packed(each.encode()) for each in words))


def _packed(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)
