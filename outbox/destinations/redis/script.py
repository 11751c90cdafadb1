"""The script that opens a lane and appends to it, and what it returns.

Everything that it decides, it decides before its first write, so it stores all of its messages or
none.  The ids of entries are `<sequence>-0`; they are compared as text, because numbers of Lua are
doubles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.core.brokers.port import Message, Owner
    from outbox.destinations.redis.target import RedisTarget

BODY, DELIVERY = "body", "x-delivery"
"""Fields of an entry, besides its headers."""

# KEYS: the stream, the fence.  ARGV: epoch, identity and lane, the sequence after which to append
# (empty: open the lane); and for each message its sequence, the number of its fields and values,
# and these.
SCRIPT = """
local stream, fence = KEYS[1], KEYS[2]
local epoch, who, after = ARGV[1], ARGV[2], ARGV[3]
local owner = redis.call('HMGET', fence, 'epoch', 'owner')
if owner[2] and owner[2] ~= who then return {'OTHER', owner[2]} end
if owner[1] and tonumber(owner[1]) > tonumber(epoch) then return {'FENCED', owner[1]} end
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
  redis.call('HSET', fence, 'epoch', epoch, 'owner', who)
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  local delivery = ''
  if newest[1] and newest[1][1] == last then
    local fields = newest[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'x-delivery' then delivery = fields[i + 1] end
    end
  end
  return {'OPEN', at, delivery}
end
if at ~= after then return {'AT', at} end
redis.call('HSET', fence, 'epoch', epoch, 'owner', who)
local i = 4
while i <= #ARGV do
  local count = tonumber(ARGV[i + 1])
  redis.call('XADD', stream, ARGV[i] .. '-0', unpack(ARGV, i + 2, i + 1 + count))
  i = i + 2 + count
end
return {'STORED'}
"""


def arguments(
    target: RedisTarget, lane: str, owner: Owner, after: str, messages: list[Message]
) -> list[bytes | str | int]:
    """Keys and arguments of the script, after their number.

    Args:
        after: the sequence after which to append; empty: open the lane.
    """
    given: list[bytes | str | int] = [
        target.stream_key(lane), target.fence_key(lane),
        owner.epoch, f"{owner.identity}/{lane}", after,
    ]  # fmt: skip
    for message in messages:
        given += (message.sequence, 2 * len(message.headers) + 2)
        for name, value in message.headers:
            given += (name.lower(), value)
        given += (BODY, message.body)
    return given
