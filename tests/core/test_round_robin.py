from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.admission.round_robin import RoundRobin


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30), st.integers(1, 9))
def test_each_item_is_served_once_and_in_the_order_of_its_holder(
    put: list[tuple[int, int]], enough: int
) -> None:
    queue = RoundRobin[tuple[int, int]]()
    for holder, weight in put:
        queue.put(holder, (holder, weight), weight)
    taken: list[tuple[int, int]] = []
    while queue:
        some = queue.pop_until(enough)
        weighs = sum(weight for _, weight in some)
        # No more than was taken.
        assert weighs >= enough or not queue
        assert weighs - some[-1][1] < enough
        taken += some
    assert queue.pop_until(enough) == []
    for holder in range(4):
        assert [t for t in taken if t[0] == holder] == [p for p in put if p[0] == holder]


@given(st.integers(1, 50), st.integers(1, 6))
def test_a_new_holder_waits_for_one_item_of_each_other_holder(flood: int, others: int) -> None:
    queue = RoundRobin[str]()
    for _ in range(flood):
        for other in range(others):
            queue.put(other, "flood", 1)
    queue.put("quiet", "quiet", 1)
    assert "quiet" in queue.pop_until(others + 1)


def test_a_served_holder_moves_behind_all_others() -> None:
    queue = RoundRobin[str]()
    for holder, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        queue.put(holder, item, 1)
    assert queue.pop_until(1) == ["a1"]
    queue.put("c", "c1", 1)
    assert queue.pop_until(9) == ["b1", "a2", "c1"]
