package receiver

import (
	"context"
	"errors"
	"math"
	"sort"
)

// CatchUpResult is the result of catching up with one lane.
type CatchUpResult struct {
	Lane string
	// Acknowledged is the last sequence number acknowledged according to the sender.
	Acknowledged int64
	// Fetched counts the deliveries fetched and processed, now or before.
	Fetched int
	// DeadLettered counts missing numbers that the sender had dead-lettered.
	DeadLettered int
	// Unavailable has the missing numbers that the sender no longer retains, or that a handler
	// refused.  They are unknown from now on.
	Unavailable []Range
	// Failed is the sequence number that could not be processed, or 0; later ones were not fetched.
	Failed int64
}

// fetchedOutcome is the outcome of a fetched delivery.
type fetchedOutcome int

const (
	fetchedProcessed fetchedOutcome = iota
	// fetchedRetryable: it failed; a later catch-up tries again.
	fetchedRetryable
	// fetchedRefused: a handler refused it, or it conflicts; it is never processed.
	fetchedRefused
)

// catchUpLane fetches the missing deliveries of a lane and those after its highest number, in order.
// It also returns what it did not process.
func catchUpLane(lane string, state LaneState, fetchPage func(after int64) (LanePage, error),
	process func(Request) (fetchedOutcome, error)) (CatchUpResult, laneGaps, error) {
	result, through := CatchUpResult{Lane: lane}, int64(0)
	missing, dead, unavailable := rangeSet(state.Missing), &rangeSet{}, &rangeSet{}
	gaps := func() laneGaps {
		return laneGaps{through: through, deadLettered: *dead, unavailable: *unavailable}
	}
	after := state.High
	if len(missing) > 0 {
		after = missing[0].First - 1
	}
	for {
		page, err := fetchPage(after)
		if err != nil {
			return result, gaps(), err
		}
		result.Acknowledged = page.Acknowledged
		if after < math.MaxInt64 {
			unavailable.add(after+1, page.KeptFrom-1)
		}
		through = max(through, page.KeptFrom-1)
		for _, item := range page.Items {
			isMissing := missing.contains(item.Sequence)
			if item.Sequence <= state.High && !isMissing {
				continue
			}
			switch {
			case item.DeadLettered: // Its event may have been erased since.
				result.DeadLettered++
				dead.add(item.Sequence, item.Sequence)
			case item.Request == nil:
				unavailable.add(item.Sequence, item.Sequence)
			default:
				outcome, err := process(*item.Request)
				if err != nil {
					return result, gaps(), err
				}
				switch outcome {
				case fetchedRetryable:
					result.Failed = item.Sequence
					return result, gaps(), nil
				case fetchedRefused:
					unavailable.add(item.Sequence, item.Sequence)
				default:
					result.Fetched++
				}
			}
			through = item.Sequence
		}
		if page.Next == nil {
			return result, gaps(), nil
		}
		after = *page.Next
	}
}

// lanesBehind returns the lanes with missing deliveries, in the order of the sender: those of older
// generations first.
//
// A lane without any delivery here is fetched from its beginning if this receiver already existed
// when the lane began: its inbox is older than every lane (fromStart), or has another lane of the
// same generation from sequence number 1 on, or a lane of an older generation.  Otherwise the
// deliveries of that lane were made to an earlier receiver.
func lanesBehind(known map[string]storedLane, progress []LaneProgress, fromStart bool) []string {
	complete := map[int64]bool{}
	oldest := int64(math.MaxInt64)
	for _, each := range progress {
		if lane, found := known[each.Lane]; found {
			oldest = min(oldest, each.Generation)
			if len(lane.state.Unknown) == 0 {
				complete[each.Generation] = true
			}
		}
	}
	var behind []string
	for _, each := range progress {
		lane, found := known[each.Lane]
		var isBehind bool
		if found {
			isBehind = len(lane.state.Missing) > 0 || lane.state.High < each.Acknowledged
		} else {
			isOlder := fromStart || complete[each.Generation] || each.Generation > oldest
			isBehind = each.Acknowledged > 0 && isOlder
		}
		if isBehind {
			behind = append(behind, each.Lane)
		}
	}
	return behind
}

// CatchUp fetches and processes the missing deliveries of all lanes, in order and once, also while
// new ones arrive.  It returns one result per lane that was behind.
//
// Call it when a receiver starts, especially after a restore from a backup.  It does nothing for a
// receiver whose inbox is empty.  The error is a [*FetchError] if the relay cannot be reached or
// rejected the request.
func (r *Receiver) CatchUp(ctx context.Context) ([]CatchUpResult, error) {
	return r.catchUp(ctx, "")
}

// catchUp catches up with one lane; "": all that are behind.
func (r *Receiver) catchUp(ctx context.Context, lane string) ([]CatchUpResult, error) {
	if r.options.Fetch == nil {
		return nil, errors.New("receiver: catching up needs Options.Fetch")
	}
	if err := r.Start(ctx); err != nil {
		return nil, err
	}
	var known map[string]storedLane
	err := r.inTransaction(ctx, func(ctx context.Context, t transaction) (err error) {
		known, err = t.lanes(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	lanes := []string{lane}
	if lane == "" {
		progress, err := r.options.Fetch.Lanes(ctx)
		if err != nil {
			return nil, err
		}
		lanes = lanesBehind(known, progress, r.inbox.fromStart)
	}
	var results []CatchUpResult
	for _, each := range lanes {
		result, err := r.catchUpOne(ctx, each, known[each].state)
		if err != nil {
			return results, err
		}
		results = append(results, result)
	}
	return results, nil
}

func (r *Receiver) catchUpOne(ctx context.Context, lane string, state LaneState) (CatchUpResult, error) {
	sort.Slice(state.Missing, func(i, j int) bool { return lessRange(state.Missing[i], state.Missing[j]) })
	result, gaps, err := catchUpLane(lane, state,
		func(after int64) (LanePage, error) { return r.options.Fetch.Page(ctx, lane, after) },
		func(request Request) (fetchedOutcome, error) { return r.processFetched(ctx, request) })
	if err != nil {
		return result, err
	}
	if len(gaps.deadLettered)+len(gaps.unavailable) > 0 {
		err = r.inTransaction(ctx, func(ctx context.Context, t transaction) (err error) {
			result.Unavailable, err = r.inbox.recordGaps(ctx, t, lane, gaps)
			return err
		})
		if err != nil {
			return result, err
		}
	}
	r.logCatchUp(result)
	return result, nil
}

// processFetched processes a fetched delivery; missing ones before it were already requested.
func (r *Receiver) processFetched(ctx context.Context, request Request) (fetchedOutcome, error) {
	message, err := r.readFetched(request)
	if err != nil {
		return fetchedRetryable, err
	}
	results, err := r.process(ctx, []Message{message}, true)
	if err != nil {
		// A new version of the receiver may have the handler.
		var unhandled unhandledType
		if errors.As(err, &unhandled) {
			return fetchedRetryable, nil
		}
		// The sender has already recorded it as delivered: it will not retry.
		if r.failed(err, message.DeliveryID).Outcome == OutcomeRefused {
			return fetchedRefused, nil
		}
		return fetchedRetryable, nil
	}
	r.reportDelivery(message, results[0])
	if results[0].Fresh() {
		r.count(func(totals *Totals) { totals.Fetched++ })
	}
	if results[0].Outcome == DeliveryConflict {
		return fetchedRefused, nil
	}
	return fetchedProcessed, nil
}

// FetchPayload fetches a thin message with its payload, also while its handler runs.
//
// The error is a [*FetchError] if the relay cannot be reached, rejected the request, or has erased
// the event.
func (r *Receiver) FetchPayload(ctx context.Context, m Message) (Message, error) {
	if r.options.Fetch == nil {
		return Message{}, errors.New("receiver: fetching a payload needs Options.Fetch")
	}
	item, err := r.options.Fetch.Delivery(ctx, m.Lane, m.Sequence)
	if err != nil {
		return Message{}, err
	}
	if item.Request == nil {
		reason := "was erased"
		if item.Missing {
			reason = "is gone, and nothing has erased it"
		}
		return Message{}, cannotFetch("the event of delivery %s %s", m.DeliveryID, reason)
	}
	found, err := r.readFetched(*item.Request)
	if err != nil {
		return Message{}, err
	}
	if found.DeliveryID != m.DeliveryID {
		return Message{}, cannotFetch("the relay returned another delivery than %s", m.DeliveryID)
	}
	return found, nil
}

func (r *Receiver) readFetched(request Request) (Message, error) {
	verified, refusal := r.read(request, true)
	if refusal != nil {
		return Message{}, cannotFetch("the relay's response is refused: %s", refusal.Text)
	}
	if len(verified.Messages) != 1 {
		return Message{}, cannotFetch("the relay's response is not one delivery")
	}
	return verified.Messages[0], nil
}

// catchUpBefore fetches the missing deliveries before one.  It returns an error that postpones the
// delivery unless it can be processed now.
func (r *Receiver) catchUpBefore(ctx context.Context, m Message) error {
	results, err := r.catchUp(ctx, m.Lane)
	var notFetched *FetchError
	if errors.As(err, &notFetched) {
		r.logf("sequence %d of %s is postponed: %v", m.Sequence, m.Lane, err)
		return Busy("the missing deliveries before it cannot be fetched now", unavailableRetryAfter)
	}
	if err != nil {
		return err
	}
	if failed := results[0].Failed; failed != 0 {
		return Busy("a delivery before it in its lane cannot be processed", busyRetryAfter)
	}
	if results[0].Acknowledged < m.PreviousSequence {
		// The relay writes acknowledgements in groups: the newest may not be durable yet.
		return Busy("deliveries acknowledged a moment ago cannot be fetched yet", busyRetryAfter)
	}
	return nil
}
