from __future__ import annotations

from uuid import RFC_4122, UUID

from hypothesis import assume, given
from hypothesis import strategies as st

from outbox.core.model.ids import delivery_id, lane_name, outbox_id_of

ENDPOINT = UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")
EVENT = UUID("7c1cb3a4-6f0b-4d8c-b1f0-2f3f63f36f0e")


few_uuids = st.sampled_from([ENDPOINT, EVENT]) | st.uuids()
ids = st.integers(1, 2**63 - 1)
deliveries = st.tuples(few_uuids, ids, few_uuids, st.none() | ids)


def test_the_delivery_id_is_part_of_the_contract_and_never_changes() -> None:
    assert str(delivery_id(ENDPOINT, 42, EVENT)) == "9fb80c98-874f-8dc4-bda5-03b429a816cc"
    assert str(delivery_id(ENDPOINT, 42, EVENT, 7)) == "6755a34b-306e-809b-b1e2-bc33d75c57e6"


@given(deliveries)
def test_a_delivery_id_is_a_version_8_uuid(delivery: tuple[UUID, int, UUID, int | None]) -> None:
    made = delivery_id(*delivery)
    assert (made.version, made.variant) == (8, RFC_4122)


@given(deliveries)
def test_a_delivery_id_resolves_to_its_event(delivery: tuple[UUID, int, UUID, int | None]) -> None:
    endpoint_id, outbox_id, _, _ = delivery
    assert outbox_id_of(delivery_id(*delivery), endpoint_id) == outbox_id


@given(st.integers(-(2**62), 0))
def test_a_delivery_id_without_an_event_does_not_resolve(outbox_id: int) -> None:
    """Test deliveries of an endpoint have ids of their own, below those of events."""
    made = delivery_id(ENDPOINT, outbox_id, EVENT)
    assert outbox_id_of(made, ENDPOINT) is None
    assert made != delivery_id(ENDPOINT, outbox_id - 1, EVENT)


@given(deliveries, st.uuids())
def test_a_delivery_id_resolves_only_with_its_endpoint(
    delivery: tuple[UUID, int, UUID, int | None], other: UUID
) -> None:
    """Not with another endpoint's id, nor by comparing neighbouring ids."""
    endpoint_id, outbox_id, event_id, backfill_id = delivery
    assume(other != endpoint_id)
    made = delivery_id(*delivery)
    assert outbox_id_of(made, other) != outbox_id
    assume(outbox_id < 2**63 - 1)
    beside = delivery_id(endpoint_id, outbox_id + 1, event_id, backfill_id)
    assert (made.int ^ beside.int).bit_count() > 20


@given(st.lists(deliveries, unique=True))
def test_no_two_events_endpoints_or_backfills_share_a_delivery_id(
    deliveries: list[tuple[UUID, int, UUID, int | None]],
) -> None:
    assert len({delivery_id(*each) for each in deliveries}) == len(deliveries)


def test_a_reused_event_id_gives_another_delivery_id() -> None:
    assert delivery_id(ENDPOINT, 42, EVENT) != delivery_id(ENDPOINT, 42, ENDPOINT)


def test_a_lane_is_named_after_its_endpoint_generation_and_slot() -> None:
    assert lane_name(ENDPOINT, 3, 7) == "6f1c2a349d55-3-7"
