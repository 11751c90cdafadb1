"""What a run is going to do is known before it begins."""

from __future__ import annotations

from collections import Counter

import pytest

from outbox.devtools.chaos.plan import KINDS, Plan, choose
from outbox.errors import UsageError


def test_a_seed_repeats_the_faults() -> None:
    kinds = choose(None, own_server=True)
    one = Plan(seed=7, kinds=kinds).schedule()
    assert one == Plan(seed=7, kinds=kinds).schedule()
    assert one != Plan(seed=8, kinds=kinds).schedule()


def test_a_fault_begins_every_so_often_and_none_after_the_end() -> None:
    plan = Plan(minutes=1, fault_every_s=3, kinds=choose(None, own_server=True))
    assert [fault.at_s for fault in plan.schedule()] == [3.0 * n for n in range(1, 20)]


def test_a_run_sees_every_kind_before_it_sees_one_twice() -> None:
    kinds = choose(None, own_server=True)
    planned = Plan(minutes=10, kinds=kinds).schedule()
    counted = Counter(fault.kind for fault in planned)
    assert set(counted) == set(KINDS)
    assert max(counted.values()) - min(counted.values()) <= 1


def test_only_a_server_of_our_own_is_restarted() -> None:
    assert "restart" in choose(None, own_server=True)
    assert "restart" not in choose(None, own_server=False)
    with pytest.raises(UsageError, match="use --embedded"):
        choose("kill,restart", own_server=False)


def test_the_books_have_an_end() -> None:
    with pytest.raises(UsageError, match="lower --minutes or --rate"):
        Plan(minutes=60, rate=1000)
