from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.model.endpoint_config import differences, parse_file, to_file_values
from outbox.core.model.endpoint_config import parse_one as declaration_of
from outbox.core.model.retry_policy import PRESETS, RetryPolicy, parse
from outbox.errors import UsageError
from tests.core.test_endpoint_settings import FULL, settings

if TYPE_CHECKING:
    from outbox.core.model.endpoint_settings import EndpointSettings

URL = "https://example.com/"
ID = "0d0a2ee4-8d4a-4c8a-9d0f-0d3f3b6b8a51"


def one(**values: Any) -> EndpointSettings:
    (declared,) = parse_file({"endpoints": [{"name": "a", "url": URL, **values}]})
    return declared.settings


def test_a_file_uses_the_flag_names_for_all_settings() -> None:
    assert one() == settings()
    assert one(
        types="order.*",
        all_tenants=True,
        filter="@.a == 1",
        method="PATCH",
        headers={"X-A": "1"},
        connect_timeout="2s",
        timeout=30,
        in_flight_max=4,
        rate=0.5,
        batch_max=50,
        keep_alive=False,
        allow_networks="10.1.0.0/16",
        ca="-----BEGIN CERTIFICATE-----",
        retry="stepped",
        retryable=[429, "5xx"],
        on_dead_letter="block",
        on_missing="hold",
        backlog_max=10,
        backlog_age="2d",
        disable_after="12h",
        lanes=4,
    ) == settings(
        types=("order.*",),
        all_tenants=True,
        filter="@.a == 1",
        method="PATCH",
        headers={"X-A": "1"},
        connect_timeout_s=2.0,
        timeout_s=30,
        in_flight_max=4,
        rate_per_s=0.5,
        batch_max=50,
        keep_alive=False,
        allow_networks=("10.1.0.0/16",),
        ca="-----BEGIN CERTIFICATE-----",
        retry=PRESETS["stepped"],
        retryable=("429", "5xx"),
        on_dead_letter="block",
        on_missing="hold",
        backlog_max=10,
        backlog_age_s=172800.0,
        disable_after_s=43200.0,
        lanes=4,
    )


def test_a_policy_is_a_name_or_values() -> None:
    assert one(retry="stepped,attempts=8").retry == parse("stepped,attempts=8")
    assert one(retry={"preset": "stepped", "attempts": 8}).retry == parse("stepped,attempts=8")
    assert one(retry={"base": 1.5, "cap": "1h"}).retry == RetryPolicy(base_s=1.5, cap_s=3600)


def test_defaults_apply_to_endpoints_that_do_not_override_them() -> None:
    first, second, third = parse_file(
        {
            "defaults": {"lanes": 4, "tenant": "acme", "headers": {"X-A": "1"}},
            "endpoints": [
                {"name": "a", "url": URL},
                {"name": "b", "url": URL, "lanes": 1, "headers": {"X-B": "2"}},
                {"name": "c", "url": URL, "tenant": None, "lanes": None, "id": ID},
            ],
        }
    )
    assert (first.settings.lanes, first.settings.tenant) == (4, "acme")
    assert (second.settings.lanes, second.settings.headers) == (1, {"X-B": "2"})
    assert (third.settings.lanes, third.settings.tenant) == (4, None)
    assert (first.id, third.id, third.place) == (None, UUID(ID), "endpoints[2]")


@pytest.mark.parametrize("values", [{}, FULL, {"all_tenants": True, "retryable": ()}])
def test_a_written_file_round_trips(values: dict[str, Any]) -> None:
    before = settings(**values)
    (declared,) = parse_file({"endpoints": [to_file_values(before)]})
    assert declared.merge_over(before) == before


def test_a_header_without_a_value_keeps_its_stored_value() -> None:
    there = settings(headers={"X-A": "1", "X-B": "2"})
    assert "1" not in str(to_file_values(there))
    (declared,) = parse_file({"endpoints": [{"name": "a", "url": URL, "headers": {"x-a": None}}]})
    assert declared.merge_over(there).headers == {"x-a": "1"}
    wanted = {"headers": {"X-B": None, "X-C": "3"}}
    assert declaration_of(wanted, there).headers == {"X-B": "2", "X-C": "3"}
    for current in (None, settings(headers={"X-B": "2"})):
        with pytest.raises(UsageError, match=r"headers\.x-a: has no value, and the endpoint has"):
            declared.merge_over(current)
    for name in ("X-A", "X-A:hunter2"):
        with pytest.raises(UsageError, match=r"headers\.X-A(:…)?: has no value"):
            declaration_of({"name": "a", "url": URL, "headers": {name: None}})


def test_default_values_are_not_written() -> None:
    assert to_file_values(settings()) == {"name": "a", "url": URL}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (None, "endpoints: must be a list of endpoints"),
        ([], "endpoints: must be a list of endpoints"),
        ({"endpoints": {}}, "endpoints: must be a list of endpoints"),
        ({"endpoints": [], "default": {}}, 'the file: there is no setting "default"; did you mean'),
        ({"endpoints": [], "defaults": []}, None),
        ({"endpoints": [], "defaults": 7}, "defaults: must be a mapping of settings to values"),
        ({"endpoints": [], "defaults": {"name": "a"}}, 'defaults: there is no setting "name"'),
        ({"endpoints": [], "defaults": {"lanes": 0}}, "defaults.lanes: must be between 1 and"),
        ({"endpoints": [7]}, "endpoints[0]: must be a mapping of settings to values"),
        ({"endpoints": [{}]}, "endpoints[0].name: is missing"),
        ({"endpoints": [{"name": "a"}]}, "endpoints[0].url: is missing"),
        ({"endpoints": [{"name": 7, "url": URL}]}, "endpoints[0].name: must be a text, not 7"),
        (
            {"endpoints": [{"name": "a", "url": URL, "lane": 2}]},
            'endpoints[0]: there is no setting "lane"; did you mean "lanes"?',
        ),
        (
            {"endpoints": [{"name": "a", "url": URL}, {"name": "a", "url": URL}]},
            'endpoints[1].name: "a" is already used by endpoints[0]',
        ),
        (
            {"endpoints": [{"name": n, "url": URL, "id": ID} for n in "ab"]},
            f'endpoints[1].id: "{ID}" is already used by endpoints[0]',
        ),
        ({"endpoints": [{"name": "a", "url": URL, "id": 7}]}, "endpoints[0].id: 7 is not the id"),
        # The values of secrets are not repeated, nor names that YAML made of `{secret:hunter2}`.
        (
            {"endpoints": [{"name": "a", "url": URL, "secret": ["hunter2"]}]},
            "endpoints[0].secret: must be a text",
        ),
        (
            {"endpoints": [{"name": "a", "url": URL, "secret": "x", "secret_encoding": "hunter2"}]},
            "endpoints[0].secret_encoding: must be raw or base64",
        ),
        (
            {"endpoints": [{"name": "a", "url": URL, "secret:hunter2": None}]},
            'endpoints[0]: there is no setting "secret:…"; did you mean "secret"?',
        ),
    ],
)
def test_an_invalid_file_error_names_the_location(document: Any, says: str | None) -> None:
    if says is None:
        assert parse_file(document) == []
        return
    with pytest.raises(UsageError) as caught:
        parse_file(document)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"retry": {"base": -1}}, "retry.base: must be between 0s and 30d, not -1"),
        ({"retry": {"base": "5x"}}, 'retry.base: "5x" is not a time'),
        ({"retry": {"base": True}}, "retry.base: must be"),
        ({"retry": {"preset": "slow"}}, 'retry: there is no policy "slow"'),
        ({"retry": {"preset": 7}}, "retry.preset: must be a name"),
        ({"retry": {"bass": 7}}, 'retry: there is no "bass"'),
        ({"retry": 7}, "retry: must be a policy"),
        ({"types": ["a."]}, "types: 'a.' is invalid"),
        ({"types": {"a": 1}}, "types: must be a text"),
        ({"headers": {"X-A": 7}}, "headers: 'X-A' has a value that is not text"),
        ({"timeout": "soon"}, 'timeout: "soon" is not a time'),
        ({"backlog_age": "0s"}, "backlog_age: must be longer than 0 s"),
        ({"retryable": [200]}, "retryable: '200' contains a 2xx"),
        ({"filter": "@.**"}, "filter: "),
    ],
)
def test_an_invalid_setting_error_names_the_location(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        one(**values)
    assert str(caught.value).startswith(f"endpoints[0].{says}")


def test_differences_are_text_without_header_values() -> None:
    old = settings(headers={"Authorization": "Bearer old"})
    new = settings(**FULL | {"headers": {"Authorization": "Bearer new"}})
    changes = differences(old, new)
    assert changes["name"] == ("a", "billing")
    assert changes["types"] == ("**", "order.* refund.**")
    assert changes["tenant"] == ("none", "acme")
    assert changes["retry"] == ("standard", "stepped")
    assert changes["retryable"] == ("408 421 425 429 5xx", "429 5xx")
    assert changes["timeout"] == ("15s", "30s")
    assert changes["headers"] == ("Authorization", "Authorization (values not shown)")
    assert "Bearer" not in str(changes)
    assert differences(old, replace(old, retryable=())) == {
        "retryable": ("408 421 425 429 5xx", "none")
    }
    close = replace(old, rate_per_s=12345.67), replace(old, rate_per_s=12345.68)
    assert differences(*close) == {"rate": ("12345.67", "12345.68")}
    assert differences(new, new) == {}
