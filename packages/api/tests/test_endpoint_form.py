"""The description of the settings, and the credentials of brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.core.model.endpoint_settings import SETTINGS, EndpointSettings
from outbox.destinations.brokers import check_broker_url
from outbox.destinations.descriptions import describe_destinations
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox_api.setting_descriptions import describe_settings
from tests.support.api import ALL, make_token
from tests.support.plugins import installed
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def test_every_setting_is_described_with_its_default() -> None:
    described = {each.name: each for each in describe_settings()}
    assert list(described) == list(SETTINGS)
    for name, each in described.items():
        if not each.required:
            assert each.default == SETTINGS[name].public_default
        assert each.help
    assert described["format"].choices[0] == "envelope"
    assert described["retry"].choices[0] == "standard"
    assert described["lanes"].maximum == 1024


def test_a_setting_that_is_not_for_brokers_is_refused_for_one() -> None:
    values = {"method": "PUT", "keep_alive": False, "batch_max": 2, "header_prefix": "X-Acme-"}
    described = {each.name: each for each in describe_settings()}
    for name, value in values.items():
        assert not described[name].for_brokers
        with pytest.raises(UsageError, match=f"^{name}: is for HTTP receivers"):
            EndpointSettings.from_dict({"name": "a", "url": "redis://host/a", name: value})


def test_the_example_of_a_destination_is_a_valid_url() -> None:
    for each in describe_destinations():
        scheme = each.example.partition(":")[0]
        assert scheme in each.schemes
        if each.name != "http":
            check_broker_url(each.example, EgressPolicy(), ())


async def test_a_token_of_a_tenant_sees_what_it_can_set(database: Database, api: Api) -> None:
    acme = api.with_token(await make_token(database, "acme", ("read",), tenant="acme"))
    whole, own = [(await each.get("/v1/endpoint-settings")).json for each in (api, acme)]
    omitted = {each["name"] for each in whole["settings"]} - {e["name"] for e in own["settings"]}
    assert omitted == {"tenant", "all_tenants", "allow_networks"}
    assert "kafka" in [each["name"] for each in whole["destinations"]]
    assert "kafka" not in [each["name"] for each in own["destinations"]]


async def test_a_tenant_changes_an_endpoint_without_a_plugin_but_adds_none(
    database: Database, api: Api
) -> None:
    acme = api.with_token(await make_token(database, "acme", ALL, tenant="acme"))
    url = "stream://127.0.0.1/s"
    await add_endpoint(database, "acme.stream", url=url, tenant="acme")
    with installed():
        changed = await acme.request("PATCH", "/v1/endpoints/acme.stream", {"timeout": 9})
        assert changed.status == 200, changed.detail
        for refused in (
            await acme.request("PATCH", "/v1/endpoints/acme.stream", {"url": f"{url}2"}),
            await acme.request("POST", "/v1/endpoints", {"name": "acme.new", "url": url}),
        ):
            assert refused.status == 422
            assert refused.detail == "url: a tenant token cannot use stream://; ask an operator"


async def test_the_credentials_of_a_broker_are_set_and_removed(
    database: Database, api: Api
) -> None:
    await add_endpoint(database, "stream", url="redis://127.0.0.1:9/s", headers={"X-A": "b"})
    await add_endpoint(database, "shop")
    path = "/v1/endpoints/stream/credentials"
    changed = await api.request("PUT", path, {"credentials": "relay:secret"})
    assert changed.json == {"endpoint": "stream", "set": True}
    names = "SELECT array_agg(k ORDER BY k) FROM endpoint, jsonb_object_keys(headers) k"
    assert await fetchval(database, names) == ["Authorization", "X-A"]
    assert (await api.request("DELETE", path)).json == {"endpoint": "stream", "set": False}
    assert await fetchval(database, names) == ["X-A"]
    refused = await api.request("PUT", path, {"credentials": "two\nlines"})
    assert refused.status == 422
    assert refused.detail.startswith("credentials: must be one line here")
    refused = await api.request("PUT", "/v1/endpoints/shop/credentials", {"credentials": "a:b"})
    assert (refused.status, "has no broker" in refused.detail) == (422, True)
