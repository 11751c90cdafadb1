from __future__ import annotations

from uuid import UUID, uuid5

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.identity import delivery_id, lane_name

ENDPOINT = UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")
EVENT = UUID("7c1cb3a4-6f0b-4d8c-b1f0-2f3f63f36f0e")


def test_the_delivery_id_is_part_of_the_contract_and_never_changes() -> None:
    assert delivery_id(ENDPOINT, 42, EVENT) == uuid5(ENDPOINT, f"42:{EVENT}")
    assert str(delivery_id(ENDPOINT, 42, EVENT)) == "15be3d5b-0ba4-5d07-bcb0-a7589c3c37d9"


few_uuids = st.sampled_from([ENDPOINT, EVENT]) | st.uuids()


@given(st.lists(st.tuples(few_uuids, st.integers(1, 2**63 - 1), few_uuids), unique=True))
def test_no_two_events_or_endpoints_share_a_delivery_id(
    deliveries: list[tuple[UUID, int, UUID]],
) -> None:
    assert len({delivery_id(*each) for each in deliveries}) == len(deliveries)


def test_an_id_that_is_given_to_another_event_makes_another_delivery_id() -> None:
    assert delivery_id(ENDPOINT, 42, EVENT) != delivery_id(ENDPOINT, 42, ENDPOINT)


def test_a_lane_is_named_after_its_endpoint_generation_and_slot() -> None:
    assert lane_name(ENDPOINT, 3, 7) == "6f1c2a349d55-3-7"
