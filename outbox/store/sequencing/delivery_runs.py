"""The deliveries of a batch as rows of `delivery_run`: consecutive ones of a lane share a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.sql.expressions import RUN_DELIVERIES_MAX
from outbox.store.sql.row_params import composite_array, composite_number, composite_numbers

if TYPE_CHECKING:
    from outbox.core.sequencing.router import Deliveries

OFFSET_MAX = 2**15 - 1


def delivery_runs(deliveries: Deliveries) -> str:
    """The array of type `delivery_run_row`.

    The sequences of a lane follow one another in a batch, and what repeats earlier deliveries is
    alone, because it is found by its event.
    """
    runs: list[tuple[int, int, int, list[int], int | str]] = []
    last_runs: dict[int, tuple[int, list[int]]] = {}
    fed = len(deliveries.feed_ids)
    feed_id: int | str = ""
    for n, (lane_id, seq, outbox_id) in enumerate(deliveries.new):
        if n < fed:
            # A lane belongs to one endpoint, which has one feed.
            feed_id = deliveries.feed_ids[n]
        elif n == fed:
            feed_id, last_runs = "", {}
        if (last := last_runs.get(lane_id)) is not None:
            first_id, offsets = last
            offset = outbox_id - first_id
            if 0 <= offset <= OFFSET_MAX and len(offsets) < RUN_DELIVERIES_MAX:
                offsets.append(offset)
                continue
        offsets = [0]
        last_runs[lane_id] = outbox_id, offsets
        runs.append((lane_id, seq, outbox_id, offsets, feed_id))
    repeats = deliveries.repeats
    rows = [
        f"({lane_id},{seq},{outbox_id},{composite_numbers(offsets)},,,,,{feed_id})"
        for lane_id, seq, outbox_id, offsets, feed_id in runs
    ]
    for each, seq in zip(repeats, deliveries.seqs[len(deliveries) - len(repeats) :], strict=True):
        origin = map(composite_number, (each.id, each.seq, each.backfill_id, each.copy_id))
        rows.append(f"({each.lane_id},{seq},{each.outbox_id},,{','.join(map(str, origin))},)")
    return composite_array(rows)
