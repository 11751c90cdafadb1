"""Validate endpoint settings before any delivery: URL, networks, CA certificates."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_config import errors_at
from outbox.destinations.broker_address import BROKER_TIMEOUT_S_MAX, find_credentials
from outbox.destinations.brokers import check_broker_url
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy, parse_networks
from outbox.network.tls import check_ca
from outbox.plugins import PluginUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.config import Settings
    from outbox.core.model.endpoint_config import DeclaredEndpoint
    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.network.egress import Network


def policy_of(settings: Settings) -> EgressPolicy:
    """Return the egress policy of a relay."""
    return EgressPolicy(settings.allow_networks, proxied=settings.outbound_proxy is not None)


def check_settings(
    wanted: EndpointSettings, policy: EgressPolicy, current: EndpointSettings | None = None
) -> None:
    """Validate the settings of an endpoint.

    Args:
        current: the settings before a change; unchanged ones are not validated again, because
            the caller may not know which networks the relays have open.

    Raises:
        UsageError: a setting is invalid; one line with the next step.
    """
    if wanted.ca is not None and (current is None or wanted.ca != current.ca):
        check_ca(wanted.ca)
    check_reachable(wanted, policy, current)


def is_open_without_setting(wanted: EndpointSettings) -> bool:
    """Whether a relay without OUTBOX_ALLOW_NETWORKS delivers to the endpoint."""
    reason = explain_url_rejection(wanted.url, EgressPolicy(), _networks(wanted), wanted.tenant)
    return reason is None


def check_reachable(
    wanted: EndpointSettings, policy: EgressPolicy, current: EndpointSettings | None = None
) -> None:
    """Validate URL and networks only; parsing the CA certificates is slow."""
    if is_stream(wanted.url):
        _check_broker_settings(wanted, current)
    if current is None or _route(wanted) != _route(current):
        check_url(wanted.url, policy, _networks(wanted), wanted.tenant)


def _route(settings: EndpointSettings) -> tuple[object, ...]:
    of_tenant = is_stream(settings.url) and settings.tenant is not None
    return settings.url, settings.allow_networks, of_tenant


def _check_broker_settings(wanted: EndpointSettings, current: EndpointSettings | None) -> None:
    if current is None or wanted.headers != current.headers:
        find_credentials(wanted.headers.items())
    times = (wanted.url, wanted.connect_timeout_s, wanted.timeout_s)
    if current is not None and times == (current.url, current.connect_timeout_s, current.timeout_s):
        return
    if max(times[1:]) > BROKER_TIMEOUT_S_MAX:
        raise UsageError(f"time-outs: must be at most {BROKER_TIMEOUT_S_MAX:g} s for a broker")


def check_url(
    url: str, policy: EgressPolicy, networks: tuple[Network, ...], tenant: str | None = None
) -> None:
    """Validate the URL of a receiver or a broker.

    Args:
        tenant: that of the endpoint.

    Raises:
        UsageError: the URL is refused; one line with the next step.
    """
    if not is_stream(url):
        policy.check_url(url, networks)
    else:
        check_broker_url(url, policy, networks, of_tenant=tenant is not None)


def explain_url_rejection(
    url: str,
    policy: EgressPolicy,
    networks: tuple[Network, ...] = (),
    tenant: str | None = None,
) -> str | None:
    """Why a URL is refused; None: it is allowed, or its plug-in, which checks it, is missing."""
    if not is_stream(url):
        return policy.refusal_of_url(url, networks)
    try:
        check_url(url, policy, networks, tenant)
    except PluginUnusable:
        # No rule: who examines the broker says so.
        return None
    except UsageError as error:
        return str(error).removeprefix("url: ")
    return None


def _networks(wanted: EndpointSettings) -> tuple[Network, ...]:
    return parse_networks(",".join(wanted.allow_networks))


def trust_error(ca: str | None) -> UsageError | None:
    """Validate CA certificates; returns the error instead of raising it."""
    try:
        if ca is not None:
            check_ca(ca)
    except UsageError as error:
        return error
    return None


def check_declared(declared: Iterable[DeclaredEndpoint], policy: EgressPolicy) -> None:
    """Validate the endpoints of a declaration.

    One whose plug-in is not usable here may be known, and stay as it is; `apply_file` refuses new
    ones.

    Raises:
        UsageError: the message begins with the location of the first invalid endpoint.
    """
    for each in declared:
        # The plug-in is needed last.
        with errors_at(each.place), suppress(PluginUnusable):
            check_settings(each.settings, policy)
