"""Findings of `outbox doctor` about a server and the streams of an endpoint; nothing is written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from outbox.core.model.response import one_line
from outbox.destinations.broker import BrokerFinding
from outbox_brokers.redis.connection import code_of
from outbox_brokers.redis.script import DIGEST, SCRIPT, packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox_brokers.redis.connection import GroupedConnection
    from outbox_brokers.redis.target import RedisTarget

REDIS_VERSION_MIN = 5
"""The first version with streams; its XINFO has the last id."""
RIGHTS = "+eval +evalsha +script|load +hmget +hset +exists +xinfo|stream +xrevrange +xadd +sadd"
"""What the script needs, and the set of the lanes.  With `+info` the check reports more, and with
`+config|get` messages above the server's limit are refused before they are sent."""
WHAT_TO_DO = (
    "check the URL (outbox endpoint update --url), the credentials (outbox endpoint credentials) "
    f"and the rights: {RIGHTS} +info"
)

# KEYS: a stream, its fence.  Returns the commands of the script for which a right is missing, and
# which of the keys has another type.  `acl_check_cmd` exists from Redis 7 on.
_EXAMINE = """
local stream, fence = KEYS[1], KEYS[2]
local wrong = {}
if redis.acl_check_cmd then
  for _, command in ipairs({
    {'HMGET', fence, 'epoch'}, {'HSET', fence, 'epoch', '1'}, {'EXISTS', stream},
    {'XINFO', 'STREAM', stream}, {'XREVRANGE', stream, '+', '-'}, {'XADD', stream, '1-0', 'a', 'b'}
  }) do
    if not redis.acl_check_cmd(unpack(command)) then
      wrong[#wrong + 1] = 'no right to run ' .. command[1]
    end
  end
end
for key, command in pairs({[stream] = {'XINFO', 'STREAM'}, [fence] = {'HMGET'}}) do
  local response = redis.pcall(command[1], command[2] or key, command[2] and key or 'epoch')
  if response.err and string.find(response.err, 'WRONGTYPE') then
    wrong[#wrong + 1] = 'the key ' .. key .. ' is no ' .. (command[2] and 'stream' or 'hash')
  end
end
return wrong
"""

# KEYS: the set of the lanes.  It is in another slot than the streams.
_EXAMINE_LANES = """
return (redis.acl_check_cmd and not redis.acl_check_cmd('SADD', KEYS[1], 'a')) and 1 or 0
"""


async def findings_of(
    connection: GroupedConnection, target: RedisTarget, lanes: Sequence[str]
) -> list[BrokerFinding]:
    """Examine the server, its settings, and the rights to the lanes' keys.

    Raises:
        NotSent, ResponseLost, RedisError: the server cannot be used.
    """
    loaded = await connection.call(packed("SCRIPT", "LOAD", SCRIPT))
    if loaded != DIGEST.encode():
        return [BrokerFinding(True, "the server does not respond as Redis does", WHAT_TO_DO)]
    calls = (
        connection.call(
            packed("EVAL", _EXAMINE, "2", target.stream_key(lane), target.fence_key(lane))
        )
        for lane in lanes
    )
    # Lanes have the same rights, as a rule.
    wrong = dict.fromkeys(
        one_line(each.decode("utf-8", "replace"))
        for found in await asyncio.gather(*calls)
        for each in found
    )
    findings = [BrokerFinding(True, what, WHAT_TO_DO) for what in wrong]
    if await connection.call(packed("EVAL", _EXAMINE_LANES, "1", target.lanes_key)):
        findings.append(
            BrokerFinding(
                False,
                f"no right to run SADD: consumers do not find the lanes in {target.lanes_key}",
                "give the right +sadd",
            )
        )
    try:
        about = _fields(await connection.call(packed("INFO")))
    except RedisError as error:
        if code_of(error) != "NOPERM":
            raise
        findings.append(
            BrokerFinding(False, "the server's settings cannot be read", "give the right +info")
        )
    else:
        findings += _findings_of_settings(about)
    return findings


def _findings_of_settings(about: dict[str, str]) -> Iterator[BrokerFinding]:
    version = about.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < REDIS_VERSION_MIN:
        yield BrokerFinding(
            True, f"the server has version {version}", f"use version {REDIS_VERSION_MIN} or later"
        )
    if about.get("role") == "slave":
        yield BrokerFinding(True, "the server is a replica", "give the URL of the primary")
    if about.get("cluster_enabled") == "1":
        yield BrokerFinding(
            True,
            "the server is part of a cluster, where redirections are not followed",
            "use a server without cluster mode, or a proxy that hides it",
        )
    policy = about.get("maxmemory_policy", "")
    if policy.startswith("allkeys"):
        yield BrokerFinding(
            about.get("maxmemory", "0") != "0",
            f"maxmemory-policy is {policy}: streams may be evicted",
            "CONFIG SET maxmemory-policy noeviction",
        )
    if about.get("aof_enabled") == "0":
        yield BrokerFinding(
            False,
            "appendonly is off: a crash of the server loses what it had acknowledged",
            "CONFIG SET appendonly yes, and appendfsync always",
        )


def _fields(info: Any) -> dict[str, str]:
    """The fields of INFO."""
    lines = info.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
