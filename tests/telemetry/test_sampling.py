"""Sampling: the relay decides like the SDK's samplers, at a lower cost."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from outbox.errors import UsageError
from outbox.telemetry.sampling import (
    ARGUMENT,
    KNOWN,
    RATIOS,
    SAMPLER,
    configure_sampling,
    origin_of,
    trace_id_of,
)
from tests.core.test_message import DELIVERY

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

ENVIRONMENTS = [
    *({SAMPLER: name} for name in KNOWN),
    *({SAMPLER: name, ARGUMENT: rate} for name in RATIOS for rate in ("0", "0.01", "0.5", "1")),
    {},
]
HEX = "0123456789abcdef"
IDS = st.one_of(st.uuids(), st.uuids(version=4), st.integers(0, 1000).map(lambda n: UUID(int=n)))


def mostly(good: st.SearchStrategy[str], *others: str) -> st.SearchStrategy[str]:
    return st.one_of(good, good, good, st.sampled_from(others))


TRACEPARENTS = st.builds(
    "{}-{}-{}-{}".format,
    mostly(st.just("00"), "01", "ff", "0"),
    mostly(st.text(HEX, min_size=32, max_size=32), "0" * 32, "1" * 31, "1" * 33, "G" * 32),
    mostly(st.text(HEX, min_size=16, max_size=16), "0" * 16, "1" * 15, "1" * 17),
    mostly(st.sampled_from(["00", "01", "02", "03", "f0", "ff"]), "0", "", "00-more", "0A"),
)
NAMES = st.sampled_from(["traceparent", "Traceparent", "tracestate", "x-traceparent"])
SPACES = st.sampled_from(["", " ", " \\n "])
HEADERS = st.one_of(
    st.none(),
    st.builds(
        '{{"a": "traceparent", "{}"{}:{}"{}"}}'.format,
        NAMES,
        st.just(""),
        st.just(" "),
        TRACEPARENTS,
    ),
    st.builds('{{"{}"{}:{}"{}"}}'.format, NAMES, SPACES, SPACES, TRACEPARENTS),
    st.builds('{{"Traceparent": "{}", "traceparent": "{}"}}'.format, TRACEPARENTS, TRACEPARENTS),
)


@cache
def sdk_decision(*environment: tuple[str, str]) -> Sampler:
    with mock.patch.dict(os.environ, environment):
        return TracerProvider().sampler


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda env: "-".join(env.values()) or "-")
@given(event_id=IDS, headers=HEADERS)
@example(event_id=UUID(int=0), headers=None)
@example(event_id=UUID(int=1), headers=f'{{"traceparent": "00-{1:032x}-{1:016x}-0A"}}')
def test_sampling_agrees_with_the_sdk(
    environment: dict[str, str], event_id: UUID, headers: str | None
) -> None:
    expected = None if headers is None else headers.replace("\\n", "\n").encode()
    delivery = DELIVERY._replace(event_id=event_id, headers=expected)
    origin = origin_of(delivery)
    sdk_result = sdk_decision(*environment.items()).should_sample(
        origin.context, origin.trace_id, "deliver", SpanKind.PRODUCER
    )
    sampled = sdk_result.decision.is_sampled()  # type: ignore[no-untyped-call]
    found = configure_sampling(environment).origin(delivery)
    assert (found is not None) == sampled
    assert found is None or (found.trace_id, found.state) == (origin.trace_id, origin.state)


@given(event_ids=st.sets(IDS, min_size=2, max_size=20))
def test_different_events_have_different_traces(event_ids: set[UUID]) -> None:
    # A trace id must not be 0 (W3C Trace Context, 3.2.2.3), so 0 and another id share one.
    event_ids.discard(UUID(int=0))
    assert len({trace_id_of(each) for each in event_ids}) == len(event_ids)


@pytest.mark.parametrize(
    "uuids",
    [
        lambda n: UUID(int=n),
        lambda n: UUID(int=n << 64),
        lambda n: UUID(int=n << 80 | 7 << 76 | 2 << 62),
    ],
    ids=["low", "high", "time"],
)
def test_sequential_ids_are_sampled_evenly(uuids: object) -> None:
    assert callable(uuids)
    chosen = configure_sampling({SAMPLER: "traceidratio", ARGUMENT: "0.1"})
    events = (DELIVERY._replace(headers=None, event_id=uuids(n)) for n in range(2000))
    assert 150 <= sum(chosen.origin(each) is not None for each in events) <= 250


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({SAMPLER: "jaeger_remote"}, 'there is no sampler "jaeger_remote"; use one of'),
        ({SAMPLER: "traceidratio", ARGUMENT: "1 %"}, '"1 %" is not a ratio from 0 to 1'),
        ({SAMPLER: "traceidratio", ARGUMENT: "1.5"}, '"1.5" is not a ratio'),
        ({SAMPLER: "traceidratio", ARGUMENT: "nan"}, '"nan" is not a ratio'),
    ],
)
def test_an_invalid_sampler_is_a_one_line_error(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match="OTEL_TRACES_SAMPLER") as refused:
        configure_sampling(environment)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
