from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import PRESETS, STANDARD
from outbox.errors import UsageError

FULL: dict[str, Any] = {
    "name": "billing",
    "url": "https://example.com/",
    "types": ("order.*", "refund.**"),
    "tenant": "acme",
    "filter": "@.total > 100",
    "method": "PUT",
    "headers": {"Authorization": "Bearer x"},
    "header_prefix": "X-Acme-",
    "format": "cloudevents",
    "source": "https://shop.example/orders",
    "connect_timeout_s": 2.5,
    "timeout_s": 30.0,
    "in_flight_max": 4,
    "rate_per_s": 0.5,
    "keep_alive": False,
    "allow_networks": ("10.1.0.0/16", "fd00::/8"),
    "ca": "-----BEGIN CERTIFICATE-----",
    "retry": PRESETS["stepped"],
    "retryable": ("429", "5XX"),
    "on_dead_letter": "block",
    "on_missing": "hold",
    "probes": False,
    "keep_responses": "failed",
    "backlog_max": 1000,
    "backlog_age_s": 172800.0,
    "disable_after_s": 86400.0,
    "lanes": 8,
}


def settings(**values: Any) -> EndpointSettings:
    return EndpointSettings(**{"name": "a", "url": "https://example.com/"} | values)


def test_omitted_settings_have_the_defaults_of_the_contract() -> None:
    default = settings()
    assert default.types == ("**",)
    assert (default.tenant, default.all_tenants, default.filter) == (None, False, None)
    assert (default.method, default.headers, default.keep_alive) == ("POST", {}, True)
    assert (default.connect_timeout_s, default.timeout_s) == (5, 15)
    assert default.retry == STANDARD
    assert default.retryable is None
    assert (default.on_dead_letter, default.on_missing) == ("continue", "dead_letter")
    assert default.on_forgotten == "hold"
    assert default.lanes == 4
    assert (default.probes, default.keep_responses) == (True, "all")
    assert (default.backlog_max, default.backlog_age_s) == (None, None)
    assert default.disable_after_s == 3 * 86400


def test_settings_round_trip_through_storage() -> None:
    full = EndpointSettings(**FULL)
    stored = orjson.loads(orjson.dumps(full.to_dict()))
    assert EndpointSettings.from_dict(stored) == full
    assert EndpointSettings.from_dict(settings().to_dict()) == settings()


def test_values_are_normalised() -> None:
    assert settings(types=["b", "a", "b"]).types == ("b", "a")
    assert settings(types=[]).types == ("**",)
    assert settings(retryable=["5XX"]).retryable == ("5xx",)
    assert settings(retryable=[]).retryable == ()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": ""}, "name: must be printable text"),
        ({"name": " a"}, "name: must be printable text"),
        ({"name": "a\nb"}, "name: must be printable text"),
        ({"name": "\udc80"}, "name: must be printable text"),
        ({"name": "é" * 101}, "name: longer than 200 bytes"),
        ({"name": "."}, "name: .* are parts of paths"),
        ({"name": ".."}, "name: .* are parts of paths"),
        ({"tenant": ".."}, "tenant: .* are parts of paths"),
        ({"name": "(other)"}, r'name: "\(other\)" is reserved for the other endpoints in metrics'),
        ({"name": 7}, "name: must be a text, not 7"),
        ({"url": ""}, "url: must be a text"),
        ({"types": "order.*"}, "types: must be a list"),
        ({"types": [7]}, "types: must be a text, not 7"),
        ({"types": ["order."]}, "types: 'order.' is invalid"),
        ({"types": [f"t{i}" for i in range(101)]}, "types: 101 patterns, the limit is 100"),
        ({"tenant": ""}, "tenant: 0 bytes, must be 1 to 255"),
        ({"tenant": "a", "all_tenants": True}, "tenant: an endpoint is for one tenant or for all"),
        ({"all_tenants": 1}, "all_tenants: must be true or false"),
        ({"keep_alive": "off"}, "keep_alive: must be true"),
        ({"filter": "@.**"}, "filter: "),
        ({"filter": 7}, "filter: must be a text, not 7"),
        ({"method": "GET"}, "method: must be one of POST, PUT, PATCH, not 'GET'"),
        ({"headers": ["X-A: 1"]}, "headers: must be a mapping of names to values"),
        ({"headers": {"X-Lane": "1"}}, "headers: 'X-Lane' is set by the relay"),
        (
            {"headers": {"acme_Lane": "1"}, "header_prefix": "Acme-"},
            "headers: 'acme_Lane' is set by the relay",
        ),
        ({"header_prefix": "Acme"}, "header_prefix: 'Acme' must be letters, digits and dashes"),
        ({"header_prefix": "A\r\nB-"}, "header_prefix: "),
        ({"header_prefix": ""}, "header_prefix: "),
        ({"header_prefix": "Webhook-"}, "header_prefix: .* not begin with webhook-"),
        ({"header_prefix": "a" * 41 + "-"}, "header_prefix: "),
        ({"format": "xml"}, "format: must be one of envelope, thin, raw, cloudevents"),
        ({"format": "raw", "batch_max": 5}, "batch_max: the format raw has one delivery"),
        ({"format": "cloudevents-binary", "batch_max": 1}, "batch_max: the format cloudevents-b"),
        ({"source": ""}, "source: must be a URI"),
        ({"source": "a b"}, "source: must be a URI"),
        ({"source": "/%2"}, "source: must be a URI"),
        ({"source": "x" * 201}, "source: must be a URI"),
        ({"headers": {"ce-id": "1"}}, "headers: 'ce-id' is set by the relay"),
        ({"headers": {"X-A": 7}}, "headers: 'X-A' has a value that is not text"),
        ({"headers": {"X-A": "1", "x-a": "2"}}, "headers: 'x-a' occurs twice"),
        ({"headers": {"X-A": "x" * 8192}}, "headers: .* the limit is 8192"),
        ({"connect_timeout_s": 0}, "connect_timeout: must be longer than 0 s"),
        ({"connect_timeout_s": math.nan}, "connect_timeout: "),
        ({"timeout_s": 3601}, "timeout: must be longer than 0 s and at most 1h"),
        ({"timeout_s": True}, "timeout: "),
        ({"timeout_s": "5s"}, "timeout: "),
        ({"retryable": ["200"]}, "retryable: '200' contains a 2xx"),
        ({"retryable": "5xx"}, "retryable: must be a list"),
        ({"on_dead_letter": "stop"}, "on_dead_letter: must be one of continue, block"),
        ({"on_missing": "wait"}, "on_missing: must be one of dead_letter, hold"),
        ({"keep_responses": "some"}, "keep_responses: must be one of none, failed, all"),
        ({"on_forgotten": "wait"}, "on_forgotten: must be one of hold, refill"),
        ({"on_forgotten": "refill"}, "on_forgotten: is for brokers"),
        ({"backlog_max": 0}, "backlog_max: must be between 1 and"),
        ({"backlog_max": 1.5}, "backlog_max: must be between 1 and"),
        ({"backlog_age_s": -1}, "backlog_age: must be longer than 0 s"),
        ({"disable_after_s": 0}, "disable_after: must be longer than 0 s"),
        ({"in_flight_max": 0}, "in_flight_max: must be between 1 and 1024"),
        ({"rate_per_s": 0}, "rate: must be a number of requests per second"),
        ({"rate_per_s": float("nan")}, "rate: "),
        ({"allow_networks": ["10.0.0.1/8"]}, 'allow_networks: "10.0.0.1/8" is not a network'),
        ({"allow_networks": [1]}, "allow_networks: must be a text"),
        ({"allow_networks": [f"10.0.{i}.0/24" for i in range(21)]}, "allow_networks: 21 networks"),
        ({"ca": "x"}, "ca: must be one or more certificates in PEM"),
        ({"ca": "-----BEGIN CERTIFICATE----- -----BEGIN PRIVATE KEY-----"}, "ca: must be one"),
        ({"ca": "-----BEGIN CERTIFICATE-----" + " " * 65536}, "ca: longer than 65536 bytes"),
        ({"lanes": 0}, "lanes: must be between 1 and 1024, not 0"),
        ({"lanes": 1025}, "lanes: must be between 1 and 1024, not 1025"),
        ({"lanes": True}, "lanes: "),
    ],
)
def test_an_invalid_setting_is_rejected_with_a_one_line_error(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=f"^{says}") as caught:
        settings(**values)
    assert "\n" not in str(caught.value)


def test_an_unknown_stored_setting_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"^colour: an endpoint has no such setting"):
        EndpointSettings.from_dict({"name": "a", "url": "u", "colour": "red"})
