"""Cases about egress: whether a destination connects past the egress policy.

A destination with `checks_every_address` passes them.  For another one, a case that shows why it
is not for tenants ends as an expected failure (`xfail`) which names the connection; that none is
shown proves nothing.

What is not shown: connections that a program in C opens to addresses that a server announces.
Therefore a destination with servers must connect in Python, where each connection can be observed,
or it does not check every address.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from outbox.destination import Position, Server
from outbox_devtools.destination_suite.observed import RecordingPolicy, observing, trapping
from outbox_devtools.destination_suite.rig import OWNER, PATIENT_S, FixedResolver, message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.destination import BrokerAddress, Resolver, Standing
    from outbox_devtools.destination_suite.rig import ServedRig

TRAPPED_S = 5.0
"""Time-out of calls to a port that closes its connections."""
NAME, OWN, OTHER = "localhost", "127.0.0.1", "127.0.0.2"
"""A name, its address, and the address that the relay's resolver has for it."""


class Use(NamedTuple):
    """What a destination did in one use of each call."""

    standing: Standing
    connects: int
    exposures: list[str]


class EgressConformance:
    """Inherit from this class and provide the fixture `rig`."""

    @pytest.fixture
    def rig(self) -> ServedRig:
        raise NotImplementedError

    async def test_a_refused_address_gets_no_connection(self, rig: ServedRig) -> None:
        check_exposures(rig, await refused_exposures(rig))

    async def test_a_name_has_the_addresses_that_were_checked(self, rig: ServedRig) -> None:
        check_exposures(rig, await renamed_exposures(rig))

    async def test_each_connection_is_allowed_by_the_policy_immediately_before(
        self, rig: ServedRig
    ) -> None:
        check_exposures(rig, await served_exposures(rig))


def check_exposures(rig: ServedRig, exposures: Sequence[str]) -> None:
    """Require that what was seen agrees with `checks_every_address`."""
    found = f"{rig.destination.title}: {'; '.join(dict.fromkeys(exposures))}"
    if exposures and not rig.destination.checks_every_address:
        pytest.xfail(f"{found}; it is not for tenants")
    assert not exposures, f"{found}; use BrokerOpener, or do not set checks_every_address"


async def refused_exposures(rig: ServedRig) -> list[str]:
    """What is done past a policy that refuses the server's address."""
    if not _has_servers(rig):
        return (await use(rig, rig.address(), RecordingPolicy(), FixedResolver())).exposures
    async with trapping(OWN) as trap:
        used = await use(rig, _trapped(rig, trap.server), RecordingPolicy(), FixedResolver())
        return [*used.exposures, *_caught(trap.arrived(), trap.server)]


async def renamed_exposures(rig: ServedRig) -> list[str]:
    """What is done past a policy that allows the address that the relay's resolver has for a name,
    which has another one elsewhere: so do names whose address changes (DNS rebinding)."""
    if not _has_servers(rig):
        pytest.skip("its URLs name no server")
    async with AsyncExitStack() as traps:
        trap = await traps.enter_async_context(trapping(OWN))
        port = trap.server.port
        try:
            await traps.enter_async_context(trapping(OTHER, port))
        except OSError as error:
            pytest.skip(f"{OTHER} cannot be used here: {error}")
        policy, resolver = RecordingPolicy(f"{OTHER}/32"), FixedResolver({NAME: [OTHER]})
        used = await use(rig, _trapped(rig, Server(NAME, port)), policy, resolver)
        return [*used.exposures, *_caught(trap.arrived(), trap.server)]


async def served_exposures(rig: ServedRig) -> list[str]:
    """What is done past a policy that allows all that it is asked about."""
    address = replace(rig.address(), timeout_s=PATIENT_S)
    policy = RecordingPolicy("0.0.0.0/0", "::/0")
    used = await use(rig, address, policy, FixedResolver())
    assert isinstance(used.standing, Position), used.standing
    if _has_servers(rig) and not used.connects:
        return [*used.exposures, "opened a lane, and no connection was seen"]
    return used.exposures


async def use(
    rig: ServedRig, address: BrokerAddress, policy: RecordingPolicy, resolver: Resolver
) -> Use:
    """Make each call once, and observe the process meanwhile."""
    lane = rig.lanes[0]
    with observing(policy) as observed:
        broker = rig.destination.connect(address, policy, resolver)
        try:
            standing = await broker.open(lane, OWNER, 0, None)
            await broker.append(lane, OWNER, 0, [message(lane, 1)])
            await broker.check(rig.lanes)
        finally:
            await broker.aclose()
    return Use(standing, observed.connects, observed.exposures)


def _has_servers(rig: ServedRig) -> bool:
    return bool(rig.destination.parse_url(rig.address().url).servers)


def _trapped(rig: ServedRig, server: Server) -> BrokerAddress:
    address = rig.address(server)
    return replace(address, networks=(), timeout_s=TRAPPED_S, connect_timeout_s=TRAPPED_S)


def _caught(count: int, server: Server) -> list[str]:
    return [f"{server} got a connection, not allowed by the policy"] if count else []
