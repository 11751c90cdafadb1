"""What can be said against an endpoint's settings before anything is sent to it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.destinations.http.egress import EgressPolicy, parse_networks
from outbox.destinations.http.tls import check_ca
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outbox.config import Settings
    from outbox.core.model.endpoint import EndpointSettings
    from outbox.core.model.endpoint_config import Declared

T = TypeVar("T")

_THREAD = ThreadPoolExecutor(1, "outbox-checking")
"""One, because what is looked at is mostly a stranger's: they wait for each other."""


def policy_of(settings: Settings) -> EgressPolicy:
    """Where deliveries may go by a relay's settings."""
    return EgressPolicy(settings.allow_networks, proxied=settings.leaves_by is not None)


async def aside(look: Callable[..., T], *given: Any) -> T:
    """Look at what somebody handed in, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, look, *given)


def check(
    wanted: EndpointSettings, policy: EgressPolicy, there: EndpointSettings | None = None
) -> None:
    """Refuse settings with which nothing could ever be delivered.

    Args:
        there: the settings that it has, which are not looked at again: who changes
            something else need not know which networks are open to the relays.

    Raises:
        UsageError: one line that says what is wrong and what to do.
    """
    check_way(wanted, policy, there)
    if wanted.ca is not None and (there is None or wanted.ca != there.ca):
        check_ca(wanted.ca)


def check_way(
    wanted: EndpointSettings, policy: EgressPolicy, there: EndpointSettings | None = None
) -> None:
    """The same without whom it trusts, which takes a while to look at."""
    goes = (wanted.url, wanted.allow_networks)
    if there is None or goes != (there.url, there.allow_networks):
        policy.check_url(wanted.url, parse_networks(",".join(wanted.allow_networks)))


def why_not_trusted(ca: str | None) -> UsageError | None:
    """What is wrong with whom an endpoint shall trust, for whoever raises it later."""
    try:
        if ca is not None:
            check_ca(ca)
    except UsageError as error:
        return error
    return None


def check_declared(declared: Iterable[Declared], policy: EgressPolicy) -> None:
    """Refuse endpoints of a file with which nothing could ever be delivered.

    Raises:
        UsageError: the message begins with the place of the first one.
    """
    for each in declared:
        try:
            check(each.settings, policy)
        except UsageError as error:
            raise UsageError(f"{each.place}.{error}") from None
