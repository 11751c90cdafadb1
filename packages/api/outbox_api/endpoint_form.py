"""/v1/endpoint-settings: description of the settings of endpoints, from which a form is made."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.destinations.descriptions import DestinationDescription, describe_destinations
from outbox_api import route
from outbox_api.route import Call, NoQuery, TenantAccess
from outbox_api.setting_descriptions import SettingDescription, describe_settings


@dataclass(frozen=True, slots=True)
class EndpointForm:
    """What can be set for an endpoint with this token."""

    settings: tuple[SettingDescription, ...]
    destinations: tuple[DestinationDescription, ...]


@route.get(
    "/v1/endpoint-settings",
    "Describe the settings of endpoints and the destinations of their URLs",
    scope="read",
    tenants=TenantAccess.ALL_CALLERS,
    needs_connection=False,
)
async def _describe(call: Call[NoQuery, None]) -> EndpointForm:
    for_tenant = call.tenant is not None
    return EndpointForm(
        describe_settings(for_tenant=for_tenant), describe_destinations(for_tenant=for_tenant)
    )
