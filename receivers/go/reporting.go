package receiver

import (
	"context"
	"fmt"
)

// Totals are counters since a receiver was created.
type Totals struct {
	// Requests has the requests by outcome.
	Requests map[Outcome]int64
	// Fetched counts deliveries fetched from the relay and processed.
	Fetched int64
	// Gaps counts deliveries before which sequence numbers were missing.
	Gaps int64
	// Old counts deliveries overtaken by a higher sequence number.
	Old int64
	// Overdue counts missing sequence numbers overtaken by more than the tolerance.  Alert on it.
	Overdue int64
}

// Totals returns a copy of the counters.
func (r *Receiver) Totals() Totals {
	r.mutex.RLock()
	defer r.mutex.RUnlock()
	totals := r.totals
	totals.Requests = make(map[Outcome]int64, len(r.totals.Requests))
	for outcome, count := range r.totals.Requests {
		totals.Requests[outcome] = count
	}
	return totals
}

func (r *Receiver) count(change func(*Totals)) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	change(&r.totals)
}

func (r *Receiver) countRequest(outcome Outcome) {
	r.count(func(totals *Totals) { totals.Requests[outcome]++ })
}

func (r *Receiver) logf(format string, arguments ...any) {
	r.options.Logger.Printf("receiver: "+format, arguments...)
}

// reportDelivery counts, logs and reports a committed delivery.
func (r *Receiver) reportDelivery(m Message, result DeliveryResult) {
	seen := result.Observation
	r.count(func(totals *Totals) {
		if seen.Kind == OrderGap {
			totals.Gaps++
		}
		if seen.Kind == OrderOld {
			totals.Old++
		}
		for _, each := range result.Overdue {
			totals.Overdue += each.Last - each.First + 1
		}
	})
	if len(result.Overdue) > 0 {
		r.logf("lane %s: overdue, still missing: %s", m.Lane, formatRanges(result.Overdue))
	} else if len(seen.Missing) > 0 {
		r.logf("lane %s: sequence %d arrived before %s", m.Lane, m.Sequence, formatRanges(seen.Missing))
	}
	if result.Outcome == DeliveryConflict {
		r.logf("lane %s: sequence %d was used by another delivery than %s", m.Lane, m.Sequence, m.DeliveryID)
	}
	if seen.Lost != nil {
		r.logf("lane %s: the sender has no record of sequences %s, which were received", m.Lane, seen.Lost)
	}
	if r.options.OnDelivery == nil {
		return
	}
	defer func() {
		if value := recover(); value != nil {
			// The delivery is committed: an error of the callback must not change the response.
			r.logf("the OnDelivery callback panicked for %s: %v", m.DeliveryID, value)
		}
	}()
	r.options.OnDelivery(m, result)
}

// logCatchUp logs the result of a catch-up, unless nothing was fetched.
func (r *Receiver) logCatchUp(done CatchUpResult) {
	if done.Fetched == 0 && done.DeadLettered == 0 && len(done.Unavailable) == 0 && done.Failed == 0 {
		return
	}
	text := fmt.Sprintf("lane %s: caught up with %d deliveries", done.Lane, done.Fetched)
	if done.DeadLettered > 0 {
		text += fmt.Sprintf("; dead-lettered: %d", done.DeadLettered)
	}
	if len(done.Unavailable) > 0 {
		text += "; refused or no longer retained: " + formatRanges(done.Unavailable)
	}
	if done.Failed != 0 {
		text += fmt.Sprintf("; sequence %d could not be processed", done.Failed)
	}
	r.logf("%s", text)
}

// logRequest inserts a request into the table of requests.  Only signed requests are logged:
// unsigned ones could fill the table.
func (r *Receiver) logRequest(ctx context.Context, verified *Verified, response Response) {
	row := loggedRequest{deliveryID: verified.MessageID, outcome: response.Outcome,
		status: response.Status, reason: response.Text}
	first := verified.Messages[0]
	row.lane, row.sequence, row.eventType = &first.Lane, &first.Sequence, &first.Type
	if first.Attempt > 0 {
		row.attempt = &first.Attempt
	}
	for _, each := range verified.Messages {
		if each.Type != first.Type {
			row.eventType = nil
		}
	}
	err := r.inTransaction(ctx, func(ctx context.Context, t transaction) error {
		return t.logRequest(ctx, row)
	})
	if err != nil {
		r.logf("a request was not logged: %v", err)
	}
}
