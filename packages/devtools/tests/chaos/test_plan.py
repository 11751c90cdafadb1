"""The plan of a run is fixed before it begins."""

from __future__ import annotations

from collections import Counter

import pytest

from outbox.errors import UsageError
from outbox_devtools.chaos.plan import FAULT_KINDS, ChaosPlan, select_faults


def test_a_seed_repeats_the_faults() -> None:
    kinds = select_faults(None, own_server=True)
    one = ChaosPlan(seed=7, kinds=kinds).schedule()
    assert one == ChaosPlan(seed=7, kinds=kinds).schedule()
    assert one != ChaosPlan(seed=8, kinds=kinds).schedule()


def test_faults_begin_at_the_interval_and_none_after_the_end() -> None:
    plan = ChaosPlan(minutes=1, fault_every_s=3, kinds=select_faults(None, own_server=True))
    assert [fault.at_s for fault in plan.schedule()] == [3.0 * n for n in range(1, 20)]


def test_a_run_sees_every_kind_before_it_sees_one_twice() -> None:
    kinds = select_faults(None, own_server=True)
    planned = ChaosPlan(minutes=10, kinds=kinds).schedule()
    counted = Counter(fault.kind for fault in planned)
    assert set(counted) == set(FAULT_KINDS)
    assert max(counted.values()) - min(counted.values()) <= 1


def test_only_an_embedded_server_is_restarted() -> None:
    assert "restart" in select_faults(None, own_server=True)
    assert "restart" not in select_faults(None, own_server=False)
    with pytest.raises(UsageError, match="use --embedded"):
        select_faults("kill,restart", own_server=False)


def test_the_ledger_limits_the_number_of_events() -> None:
    with pytest.raises(UsageError, match="lower --minutes or --rate"):
        ChaosPlan(minutes=60, rate=1000)
