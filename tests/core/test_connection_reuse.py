from __future__ import annotations

from outbox.core.delivery.connection_reuse import DISTRUST_S, RENEW_AFTER_S, ConnectionReuse

NOW = 1_700_000_000.0


def test_connections_are_reused_until_unsolicited_data_arrives_and_again_after_a_day() -> None:
    trusted = ConnectionReuse()
    assert trusted.is_allowed(NOW)
    seen = trusted.record_unsolicited(NOW)
    assert not seen.is_allowed(NOW)
    assert not seen.is_allowed(NOW + DISTRUST_S - 1)
    assert seen.is_allowed(NOW + DISTRUST_S)


def test_the_setting_decides_at_any_time() -> None:
    assert not ConnectionReuse(keep_alive=False).is_allowed(NOW)
    assert not ConnectionReuse(keep_alive=False).is_distrusted(NOW)


def test_the_day_begins_again_with_every_sight_but_few_of_them_are_stored() -> None:
    seen = ConnectionReuse().record_unsolicited(NOW)
    assert seen.record_unsolicited(NOW + RENEW_AFTER_S - 1) is seen
    again = seen.record_unsolicited(NOW + RENEW_AFTER_S)
    assert again.unsolicited_at == NOW + RENEW_AFTER_S
    assert not again.is_allowed(NOW + DISTRUST_S)


def test_a_clock_that_was_set_back_does_not_prolong_the_day() -> None:
    seen = ConnectionReuse(unsolicited_at=NOW + 1e6).clamp_times(NOW)
    assert not seen.is_allowed(NOW)
    assert seen.is_allowed(NOW + DISTRUST_S)
    assert seen.clamp_times(NOW + 1) is seen
