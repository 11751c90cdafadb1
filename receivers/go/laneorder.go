package receiver

import (
	"fmt"
	"sort"
)

// Order check and gap detection for the deliveries of a lane.
//
// A lane numbers its deliveries 1, 2, 3 …  Every delivery also carries the previous sequence number
// that was not dead-lettered, so a receiver can distinguish two kinds of absent numbers:
//
//   - a hole was dead-lettered by the sender: 6 is followed by 8 with previous 6, so 7 is a dead
//     letter that can be fetched or replayed;
//   - missing is a number that the sender recorded as delivered and this receiver did not get: 6 is
//     followed by 8 with previous 7.
//
// Every sequence number from 1 to the highest one received is in exactly one state:
//
//	seen      received, or replaced by the replay of a hole
//	missing   should have been received
//	hole      dead-lettered by the sender
//	unknown   from before this receiver joined the lane, or forgotten
//
// The transitions are:
//
//	event                                        from              to
//	received                                     any but seen      seen
//	skipped, at or below the sender's previous   (new)             missing
//	skipped, above the sender's previous         (new)             hole
//	completed according to the sender            (new)             missing
//	dead-lettered according to the sender        missing, unknown  hole
//	skipped by an older delivery that comes late missing, unknown  hole
//	replayed (replay_of)                         any but seen      seen
//	no longer retained by the sender             missing           unknown
//	first number of a lane joined in the middle  (new, below it)   unknown
//	too many ranges in a lane                    any, the lowest   unknown
//
// The first reception wins: a received number stays seen, even if a later delivery lists it as
// dead-lettered, because an acknowledgement can be lost in a crash.
//
// A number beyond the end of a lane is a conflict.  The end may also lie below the highest number
// received, when a failover of the sender's database lost the deliveries after it: these numbers
// are lost.  They stay seen, but the sender has no record of them.

// laneRangesMax limits the ranges kept for a lane; beyond it the lowest ones become unknown.
const laneRangesMax = 1000

// OrderKind is the position of a delivery relative to those received before it in its lane.
type OrderKind string

// The kinds of positions.
const (
	// OrderInOrder: the next number, or the next one after holes declared by the sender.
	OrderInOrder OrderKind = "in_order"
	// OrderJoined: the first delivery of a running lane; earlier numbers are unknown.
	OrderJoined OrderKind = "joined"
	// OrderGap: numbers before it are missing.
	OrderGap OrderKind = "gap"
	// OrderDuplicate: received before.
	OrderDuplicate OrderKind = "duplicate"
	// OrderOld: not seen before, but overtaken by a higher number.
	OrderOld OrderKind = "old"
	// OrderConflict: beyond the end of its lane, or seen with another X-Delivery: two senders claim
	// the lane, or a forgery.
	OrderConflict OrderKind = "conflict"
)

// SequenceState is the state of a sequence number that was not seen; "": it was seen.
type SequenceState string

// The states of sequence numbers that were not seen.
const (
	StateMissing SequenceState = "missing"
	StateHole    SequenceState = "hole"
	StateUnknown SequenceState = "unknown"
)

var sequenceStates = []SequenceState{StateMissing, StateHole, StateUnknown}

// Observation is the result of the order check for one delivery.
type Observation struct {
	Kind OrderKind
	// Missing has the numbers that this delivery reveals to be missing.
	Missing []Range
	// Holes has the numbers that this delivery declares as dead-lettered.
	Holes []Range
	// Was is, for an old number, its state until now.
	Was SequenceState
	// Closed is, for a replay, the state until now of the number that it replaces.
	Closed SequenceState
	// Lost has the numbers received beyond this end of the lane, which the sender lost; or nil.
	Lost *Range
}

// LaneState is the persistent state of a lane.
type LaneState struct {
	// High is the highest sequence number received; 0 before the first.
	High int64
	// Ended reports that High is the last number of the lane.
	Ended                   bool
	Missing, Holes, Unknown []Range
}

func (s LaneState) equal(other LaneState) bool {
	return s.High == other.High && s.Ended == other.Ended && equalRanges(s.Missing, other.Missing) &&
		equalRanges(s.Holes, other.Holes) && equalRanges(s.Unknown, other.Unknown)
}

// LaneOrder is the order check of one lane, without I/O.  It is not safe for concurrent use.
type LaneOrder struct {
	fromStart bool
	high      int64
	ended     bool
	states    map[SequenceState]*rangeSet
}

// NewLaneOrder restores an order check from its persistent state; the zero LaneState is a new lane.
//
// fromStart: this receiver is older than the lane, so that numbers before the first one received
// are missing, not unknown.
func NewLaneOrder(state LaneState, fromStart bool) *LaneOrder {
	order := &LaneOrder{fromStart: fromStart, high: state.High, ended: state.Ended,
		states: map[SequenceState]*rangeSet{}}
	for i, ranges := range [][]Range{state.Missing, state.Holes, state.Unknown} {
		set := &rangeSet{}
		for _, each := range ranges {
			set.add(each.First, each.Last)
		}
		order.states[sequenceStates[i]] = set
	}
	return order
}

// State returns the persistent state; its slices are not nil.
func (o *LaneOrder) State() LaneState {
	return LaneState{High: o.high, Ended: o.ended, Missing: o.ranges(StateMissing),
		Holes: o.ranges(StateHole), Unknown: o.ranges(StateUnknown)}
}

func (o *LaneOrder) ranges(state SequenceState) []Range {
	return append([]Range{}, *o.states[state]...)
}

// Observe records one delivery.  A conflict changes nothing.
//
// It returns an error unless 0 <= previousSequence < sequence.
func (o *LaneOrder) Observe(sequence, previousSequence int64, laneEnds bool) (Observation, error) {
	if previousSequence < 0 || previousSequence >= sequence {
		return Observation{}, fmt.Errorf("receiver: sequence %d with previous %d: the previous one is "+
			"0 or more, and lower", sequence, previousSequence)
	}
	if o.ended && sequence > o.high {
		return Observation{Kind: OrderConflict}, nil
	}
	var lost *Range
	if laneEnds && sequence < o.high {
		lost = &Range{sequence + 1, o.high}
	}
	var observation Observation
	if sequence > o.high {
		observation = o.observeAhead(sequence, previousSequence)
	} else {
		observation = o.observeBehind(sequence, previousSequence)
	}
	o.forget()
	if laneEnds {
		o.ended = true
		observation.Lost = lost
	}
	return observation, nil
}

func (o *LaneOrder) observeAhead(sequence, previous int64) Observation {
	joins := o.joins()
	skipped := Range{o.high + 1, previous}
	hasSkipped := skipped.First <= skipped.Last
	if joins {
		o.states[StateUnknown].add(skipped.First, skipped.Last)
	} else {
		o.states[StateMissing].add(skipped.First, skipped.Last)
	}
	holes := o.markHoles(previous+1, o.high)
	fresh := Range{max(o.high+1, previous+1), sequence - 1}
	if fresh.First <= fresh.Last {
		o.states[StateHole].add(fresh.First, fresh.Last)
		holes = append(holes, fresh)
	}
	o.high = sequence
	observation := Observation{Kind: OrderInOrder, Holes: holes}
	if hasSkipped && joins {
		observation.Kind = OrderJoined
	} else if hasSkipped {
		observation.Kind = OrderGap
		observation.Missing = []Range{skipped}
	}
	return observation
}

func (o *LaneOrder) observeBehind(sequence, previous int64) Observation {
	was := o.Close(sequence)
	if was == "" {
		return Observation{Kind: OrderDuplicate}
	}
	return Observation{Kind: OrderOld, Holes: o.markHoles(previous+1, sequence-1), Was: was}
}

// Close marks a number as seen because its replay arrived, and returns its state until now; "": it
// was received already, or lies beyond the highest number received.
func (o *LaneOrder) Close(sequence int64) SequenceState {
	for _, state := range sequenceStates {
		if o.states[state].remove(sequence, sequence) != nil {
			return state
		}
	}
	return ""
}

// ApplyProgress applies the progress of the sender: it completed every number up to this one, and
// dead-lettered the ranges instead of delivering them.  Numbers beyond the end of the lane are ignored.
func (o *LaneOrder) ApplyProgress(sequence int64, deadLettered []Range) {
	if sequence > o.high && !o.ended {
		o.states[StateMissing].add(o.high+1, sequence)
		o.high = sequence
	}
	for _, each := range deadLettered {
		o.markHoles(each.First, min(each.Last, o.high))
	}
	o.forget()
}

// MarkUnavailable changes missing numbers that cannot be fetched any more to unknown, and returns
// the ranges that were missing until now.
func (o *LaneOrder) MarkUnavailable(numbers Range) []Range {
	unavailable := o.states[StateMissing].remove(numbers.First, numbers.Last)
	for _, each := range unavailable {
		o.states[StateUnknown].add(each.First, each.Last)
	}
	return unavailable
}

// missingBefore returns the numbers missing before a delivery; it changes nothing.
func (o *LaneOrder) missingBefore(previous int64) []Range {
	before := &rangeSet{}
	for _, each := range *o.states[StateMissing] {
		before.add(each.First, min(each.Last, previous))
	}
	if !o.joins() && o.high < previous {
		before.add(o.high+1, previous)
	}
	return *before
}

// joins reports whether the next delivery is the first one of a lane joined in its middle.
func (o *LaneOrder) joins() bool { return o.high == 0 && !o.fromStart }

// markHoles turns missing and unknown numbers of a dead-lettered range into holes.
func (o *LaneOrder) markHoles(first, last int64) []Range {
	named := append(o.states[StateMissing].remove(first, last), o.states[StateUnknown].remove(first, last)...)
	for _, each := range named {
		o.states[StateHole].add(each.First, each.Last)
	}
	sort.Slice(named, func(i, j int) bool { return lessRange(named[i], named[j]) })
	return named
}

// forget enforces laneRangesMax by merging the two lowest ranges into one unknown range.
func (o *LaneOrder) forget() {
	for {
		count := 0
		var lowest []Range
		for _, set := range o.states {
			count += len(*set)
			lowest = append(lowest, (*set)[:min(2, int64(len(*set)))]...)
		}
		if count <= laneRangesMax {
			return
		}
		sort.Slice(lowest, func(i, j int) bool { return lessRange(lowest[i], lowest[j]) })
		horizon := lowest[1].Last
		for _, set := range o.states {
			set.remove(1, horizon)
		}
		o.states[StateUnknown].add(1, horizon)
	}
}
