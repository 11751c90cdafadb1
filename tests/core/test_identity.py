from __future__ import annotations

from uuid import UUID, uuid5

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.identity import delivery_id, lane_name

ENDPOINT = UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")


def test_the_delivery_id_is_part_of_the_contract_and_never_changes() -> None:
    assert delivery_id(ENDPOINT, 42) == uuid5(ENDPOINT, "42")
    assert str(delivery_id(ENDPOINT, 42)) == "2cf743b9-9b15-5fbc-9c25-56a8135f0082"


@given(st.lists(st.tuples(st.uuids(), st.integers(1, 2**63 - 1)), unique=True, min_size=2))
def test_no_two_events_or_endpoints_share_a_delivery_id(pairs: list[tuple[UUID, int]]) -> None:
    assert len({delivery_id(*pair) for pair in pairs}) == len(pairs)


def test_a_lane_is_named_after_its_endpoint_generation_and_slot() -> None:
    assert lane_name(ENDPOINT, 3, 7) == "6f1c2a349d55-3-7"
