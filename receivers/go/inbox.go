package receiver

import (
	"context"
	"fmt"
	"sort"
	"time"
)

const (
	// overdueAfterDefault: a missing number is overdue once overtaken by more than this many.
	overdueAfterDefault = 20
	// expireRows limits the rows that one transaction deletes.
	expireRows = 1000
	// timestampLayout is RFC 3339 in UTC with microseconds, as in deliveries.
	timestampLayout = "2006-01-02T15:04:05.000000Z"
)

// DeliveryOutcome is the outcome of recording a delivery.
type DeliveryOutcome string

// The outcomes of recording a delivery.
const (
	// DeliveryFresh: new; process it.
	DeliveryFresh DeliveryOutcome = "fresh"
	// DeliveryDuplicate: processed before; respond 2xx.
	DeliveryDuplicate DeliveryOutcome = "duplicate"
	// DeliveryConflict: its number was used by another delivery, or lies beyond the end of its lane:
	// two senders claim the same lane.  Nothing was recorded.
	DeliveryConflict DeliveryOutcome = "conflict"
	// deliveryEarly: numbers before it are missing, and the caller requires them first.  Nothing was
	// recorded.
	deliveryEarly DeliveryOutcome = "early"
)

// DeliveryResult is the result of recording one delivery.
type DeliveryResult struct {
	Outcome DeliveryOutcome
	// Observation is its order check.
	Observation Observation
	// Overdue has the missing numbers that became overdue with this delivery.
	Overdue []Range
}

// Fresh reports that the delivery is new and has to be processed.
func (r DeliveryResult) Fresh() bool { return r.Outcome == DeliveryFresh }

// inbox records deliveries in transactions.
//
// A delivery is new if neither its sequence number, nor its X-Delivery, nor the number that it
// replays was recorded before.  Usually one of them would suffice; together they also hold when one
// was forgotten: X-Delivery values expire, and a replay has a new number.
type inbox struct {
	inboxSettings
	expiredBefore func(now time.Time) string
}

func newInbox(store Store) inbox {
	return inbox{inboxSettings: store.settings(), expiredBefore: store.expiredBefore}
}

// receive records a delivery; allowGaps: also when numbers before it are missing.
func (in inbox) receive(ctx context.Context, t transaction, m *Message, allowGaps bool) (DeliveryResult, error) {
	var none DeliveryResult
	if m.PreviousSequence == m.Sequence-1 && m.ReplayOf == nil && !m.LaneEnds {
		moved, claimed, err := t.advance(ctx, m.DeliveryID, m.Lane, m.Sequence)
		if err != nil {
			return none, err
		}
		if moved {
			outcome := DeliveryDuplicate
			if claimed {
				outcome = DeliveryFresh
			}
			return DeliveryResult{Outcome: outcome, Observation: Observation{Kind: OrderInOrder}}, nil
		}
	}
	replayedLane, replayedSequence := m.Lane, int64(0)
	if m.ReplayOf != nil {
		replayedLane, replayedSequence = m.ReplayOf.Lane, m.ReplayOf.Sequence
	}
	if err := t.addLane(ctx, m.Lane); err != nil {
		return none, err
	}
	lanes, err := t.lockLanes(ctx, m.Lane, replayedLane)
	if err != nil {
		return none, err
	}
	own, found := lanes[m.Lane]
	if !found {
		return none, fmt.Errorf("receiver: the row of lane %q was deleted by another session", m.Lane)
	}
	order := NewLaneOrder(own.state, in.fromStart)
	if !allowGaps && len(order.missingBefore(m.PreviousSequence)) > 0 {
		return DeliveryResult{Outcome: deliveryEarly}, nil
	}
	highBefore := order.high
	observation, err := order.Observe(m.Sequence, m.PreviousSequence, m.LaneEnds)
	if err != nil {
		return none, err
	}
	if observation.Kind == OrderConflict {
		return DeliveryResult{Outcome: DeliveryConflict, Observation: observation}, nil
	}
	claimed, err := t.claim(ctx, m.DeliveryID, m.Lane, m.Sequence)
	if err != nil {
		return none, err
	}
	isKept := m.Sequence > own.forgotten || m.Timestamp > in.expiredBefore(time.Now())
	if claimed && observation.Kind == OrderDuplicate && isKept {
		// The number was seen with another X-Delivery.  The row of this one cannot have expired,
		// because the event is younger than the retention.
		observation.Kind = OrderConflict
		return DeliveryResult{Outcome: DeliveryConflict, Observation: observation}, t.unclaim(ctx, m.DeliveryID)
	}
	seen := !claimed || observation.Kind == OrderDuplicate
	if replayed, found := lanes[replayedLane]; found && m.ReplayOf != nil {
		other := order
		if replayedLane != m.Lane {
			other = NewLaneOrder(replayed.state, false)
		}
		observation.Closed = other.Close(replayedSequence)
		// The replayed number was received, or replayed before.
		seen = seen || observation.Closed == "" && replayedSequence <= other.high
		if other != order {
			if err := t.keepLane(ctx, replayedLane, other.State()); err != nil {
				return none, err
			}
		}
	}
	if err := t.keepLane(ctx, m.Lane, order.State()); err != nil {
		return none, err
	}
	outcome := DeliveryFresh
	if seen {
		outcome = DeliveryDuplicate
	}
	return DeliveryResult{Outcome: outcome, Observation: observation, Overdue: in.overdue(order, highBefore)}, nil
}

// overdue returns the ranges that became overdue, when the highest number was highBefore until now.
//
// A range becomes overdue as a whole, when its last number is overtaken by more than the tolerance,
// so that each is reported once.
func (in inbox) overdue(order *LaneOrder, highBefore int64) []Range {
	var overdue []Range
	for _, each := range *order.states[StateMissing] {
		if highBefore-each.Last <= in.overdueAfter && order.high-each.Last > in.overdueAfter {
			overdue = append(overdue, each)
		}
	}
	return overdue
}

// laneGaps has numbers of a lane that a catch-up does not process, also at the end of the lane.
type laneGaps struct {
	// through: the catch-up has completed the numbers up to this one.
	through int64
	// deadLettered has the numbers that the sender had dead-lettered.
	deadLettered []Range
	// unavailable has the numbers that the sender no longer retains, or that a handler refused.
	unavailable []Range
}

// recordGaps records what a catch-up of a lane did not process.  It returns the unavailable numbers
// that were missing until now, also at the end of the lane.
func (in inbox) recordGaps(ctx context.Context, t transaction, lane string, gaps laneGaps) ([]Range, error) {
	if err := t.addLane(ctx, lane); err != nil {
		return nil, err
	}
	lanes, err := t.lockLanes(ctx, lane, lane)
	if err != nil {
		return nil, err
	}
	before := lanes[lane].state
	order := NewLaneOrder(before, false)
	order.ApplyProgress(gaps.through, gaps.deadLettered)
	var lost []Range
	for _, each := range gaps.unavailable {
		lost = append(lost, order.MarkUnavailable(each)...)
	}
	if after := order.State(); !after.equal(before) {
		err = t.keepLane(ctx, lane, after)
	}
	return lost, err
}

// isNewest reports whether this is the newest event of a key, and records it if so.
func (in inbox) isNewest(ctx context.Context, t transaction, key string, m Message) (bool, error) {
	event := latestEvent{key: key, deliveryID: m.DeliveryID, lane: m.Lane, sequence: m.Sequence,
		publishedAt: m.Timestamp}
	if m.ReplayOf != nil || m.Backfill != nil {
		// The number of a replay does not reflect the age of its event: compare by the time of
		// publication instead.
		event.lane, event.sequence = "", 0
	}
	return t.latest(ctx, event)
}

// expire deletes up to expireRows expired deliveries, and returns how many.
//
// It has a transaction of its own: its row locks would otherwise block other receivers until the
// commit of the effects.
func (in inbox) expire(ctx context.Context, t transaction) (int, error) {
	// Lock the rows first and delete them last: a locked row still identifies a copy, a deleted one
	// would make the copy wait for this transaction.  The lanes are locked in between, in lock
	// order, so that no deadlock is possible.
	old, err := t.lockOld(ctx, in.retention, expireRows)
	if err != nil {
		return 0, err
	}
	ids := make([]string, len(old))
	last := map[string]int64{}
	for i, each := range old {
		ids[i] = each.id
		if each.lane.Valid {
			last[each.lane.String] = max(each.sequence.Int64, last[each.lane.String])
		}
	}
	names := make([]string, 0, len(last))
	for name := range last {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if err := t.forget(ctx, name, last[name]); err != nil {
			return 0, err
		}
	}
	if err := t.expire(ctx, ids); err != nil {
		return 0, err
	}
	return len(old), t.expireRequests(ctx, in.retention, expireRows)
}
