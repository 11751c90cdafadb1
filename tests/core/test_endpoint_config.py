from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.model.endpoint_config import differences, read, write
from outbox.core.model.endpoint_config import one as declaration_of
from outbox.core.model.retry_policy import PRESETS, RetryPolicy, parse
from outbox.errors import UsageError
from tests.core.test_endpoint import FULL, settings

if TYPE_CHECKING:
    from outbox.core.model.endpoint import EndpointSettings

URL = "https://example.com/"
ID = "0d0a2ee4-8d4a-4c8a-9d0f-0d3f3b6b8a51"


def one(**values: Any) -> EndpointSettings:
    (declared,) = read({"endpoints": [{"name": "a", "url": URL, **values}]})
    return declared.settings


def test_a_file_says_everything_by_the_names_of_the_flags() -> None:
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
        allow_networks="10.1.0.0/16",
        ca="-----BEGIN CERTIFICATE-----",
        retry="plane",
        retryable=[429, "5xx"],
        on_dead_letter="block",
        backlog_max=10,
        backlog_age="2d",
        disable_after="12h",
        checkpoint_every="1m",
        lanes=4,
    ) == settings(
        types=("order.*",),
        all_tenants=True,
        filter="@.a == 1",
        method="PATCH",
        headers={"X-A": "1"},
        connect_timeout_s=2.0,
        total_timeout_s=30,
        in_flight_max=4,
        rate_per_s=0.5,
        batch_max=50,
        allow_networks=("10.1.0.0/16",),
        ca="-----BEGIN CERTIFICATE-----",
        retry=PRESETS["plane"],
        retryable=("429", "5xx"),
        on_dead_letter="block",
        backlog_count_max=10,
        backlog_age_max_s=172800.0,
        disable_after_s=43200.0,
        checkpoint_every_s=60.0,
        lanes=4,
    )


def test_a_policy_is_a_text_or_values() -> None:
    assert one(retry="plane,attempts=8").retry == parse("plane,attempts=8")
    assert one(retry={"preset": "plane", "attempts": 8}).retry == parse("plane,attempts=8")
    assert one(retry={"base": 1.5, "cap": "1h"}).retry == RetryPolicy(base_s=1.5, cap_s=3600)


def test_defaults_hold_for_those_that_say_nothing_else() -> None:
    first, second, third = read(
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
    assert (third.settings.lanes, third.settings.tenant) == (1, None)
    assert (first.id, third.id, third.place) == (None, UUID(ID), "endpoints[2]")


@pytest.mark.parametrize("values", [{}, FULL, {"all_tenants": True, "retryable": ()}])
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    before = settings(**values)
    (declared,) = read({"endpoints": [write(before)]})
    assert declared.settings_over(before) == before


def test_a_header_without_a_value_keeps_the_one_that_it_has() -> None:
    there = settings(headers={"X-A": "1", "X-B": "2"})
    assert "1" not in str(write(there))
    (declared,) = read({"endpoints": [{"name": "a", "url": URL, "headers": {"x-a": None}}]})
    assert declared.settings_over(there).headers == {"x-a": "1"}
    wanted = {"headers": {"X-B": None, "X-C": "3"}}
    assert declaration_of(wanted, there).headers == {"X-B": "2", "X-C": "3"}
    for whose in (None, settings(headers={"X-B": "2"})):
        with pytest.raises(UsageError, match=r"headers\.x-a: has no value here, and none that"):
            declared.settings_over(whose)
    with pytest.raises(UsageError, match=r"headers\.X-A: has no value"):
        declaration_of({"name": "a", "url": URL, "headers": {"X-A": None}})


def test_what_is_the_default_is_not_written() -> None:
    assert write(settings()) == {"name": "a", "url": URL}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (None, "endpoints: there must be a list of them"),
        ([], "endpoints: there must be a list of them"),
        ({"endpoints": {}}, "endpoints: there must be a list of them"),
        ({"endpoints": [], "default": {}}, 'the file: there is no setting "default"; did you mean'),
        ({"endpoints": [], "defaults": []}, None),
        ({"endpoints": [], "defaults": 7}, "defaults: must be settings with values"),
        ({"endpoints": [], "defaults": {"name": "a"}}, 'defaults: there is no setting "name"'),
        ({"endpoints": [], "defaults": {"lanes": 0}}, "defaults.lanes: must be between 1 and"),
        ({"endpoints": [7]}, "endpoints[0]: must be settings with values"),
        ({"endpoints": [{}]}, "endpoints[0].name: is missing"),
        ({"endpoints": [{"name": "a"}]}, "endpoints[0].url: is missing"),
        ({"endpoints": [{"name": 7, "url": URL}]}, "endpoints[0].name: must be a text, not 7"),
        (
            {"endpoints": [{"name": "a", "url": URL, "lane": 2}]},
            'endpoints[0]: there is no setting "lane"; did you mean "lanes"?',
        ),
        (
            {"endpoints": [{"name": "a", "url": URL}, {"name": "a", "url": URL}]},
            'endpoints[1].name: "a" stands at endpoints[0], too',
        ),
        (
            {"endpoints": [{"name": n, "url": URL, "id": ID} for n in "ab"]},
            f'endpoints[1].id: "{ID}" stands at endpoints[0], too',
        ),
        ({"endpoints": [{"name": "a", "url": URL, "id": 7}]}, "endpoints[0].id: 7 is not the id"),
    ],
)
def test_a_wrong_file_names_the_place(document: Any, says: str | None) -> None:
    if says is None:
        assert read(document) == []
        return
    with pytest.raises(UsageError) as caught:
        read(document)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


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
        ({"types": ["a."]}, "types: 'a.' is not one"),
        ({"types": {"a": 1}}, "types: must be a text"),
        ({"headers": {"X-A": 7}}, "headers: 'X-A' has a value that is not text"),
        ({"timeout": "soon"}, 'timeout: "soon" is not a time'),
        ({"backlog_age": "0s"}, "backlog_age: must be longer than nothing"),
        ({"retryable": [200]}, "retryable: '200' has a 2xx"),
        ({"filter": "@.**"}, "filter: "),
    ],
)
def test_a_wrong_setting_names_the_place(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        one(**values)
    assert str(caught.value).startswith(f"endpoints[0].{says}")


def test_differences_are_text_and_tell_no_header_values() -> None:
    old = settings(headers={"Authorization": "Bearer old"})
    new = settings(**FULL | {"headers": {"Authorization": "Bearer new"}})
    told = {each.setting: (each.old, each.new) for each in differences(old, new)}
    assert told["name"] == ("a", "billing")
    assert told["types"] == ("**", "order.* refund.**")
    assert told["tenant"] == ("none", "acme")
    assert told["retry"] == ("standard", "plane")
    assert told["retryable"] == ("the usual", "429 5xx")
    assert told["timeout"] == ("15s", "30s")
    assert told["headers"] == ("Authorization", "Authorization (values not shown)")
    assert "Bearer" not in str(told)
    assert differences(new, new) == []
