package receiver

import (
	"math"
	"reflect"
	"testing"
)

func observe(t *testing.T, order *LaneOrder, sequence, previous int64) Observation {
	t.Helper()
	seen, err := order.Observe(sequence, previous, false)
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

func TestLaneOrder(t *testing.T) {
	order := NewLaneOrder(LaneState{}, false)
	for _, step := range []struct {
		sequence, previous int64
		want               Observation
	}{
		{3, 2, Observation{Kind: OrderJoined}},
		{4, 3, Observation{Kind: OrderInOrder}},
		{4, 3, Observation{Kind: OrderDuplicate}},
		{7, 4, Observation{Kind: OrderInOrder, Holes: []Range{{5, 6}}}},
		{10, 8, Observation{Kind: OrderGap, Missing: []Range{{8, 8}}, Holes: []Range{{9, 9}}}},
		{8, 7, Observation{Kind: OrderOld, Was: StateMissing}},
		{1, 0, Observation{Kind: OrderOld, Was: StateUnknown}},
	} {
		if seen := observe(t, order, step.sequence, step.previous); !reflect.DeepEqual(seen, step.want) {
			t.Errorf("%d after %d: %+v, not %+v", step.sequence, step.previous, seen, step.want)
		}
	}
	if closed := order.Close(5); closed != StateHole {
		t.Errorf("the replay closes %q", closed)
	}
	order.ApplyProgress(13, []Range{{12, 12}})
	if missing := order.State().Missing; !equalRanges(missing, []Range{{11, 11}, {13, 13}}) {
		t.Errorf("the progress reveals %v", missing)
	}
	if unavailable := order.MarkUnavailable(Range{1, 12}); !equalRanges(unavailable, []Range{{11, 11}}) {
		t.Errorf("unavailable: %v", unavailable)
	}
	want := LaneState{High: 13, Missing: []Range{{13, 13}}, Holes: []Range{{6, 6}, {9, 9}, {12, 12}},
		Unknown: []Range{{2, 2}, {11, 11}}}
	if state := order.State(); !state.equal(want) {
		t.Errorf("%+v", state)
	}
	if restored := NewLaneOrder(want, false).State(); !restored.equal(want) {
		t.Errorf("restored: %+v", restored)
	}
}

func TestMissingNumbersMayBeDeclaredAsHoles(t *testing.T) {
	order := NewLaneOrder(LaneState{}, true)
	observe(t, order, 1, 0)
	observe(t, order, 5, 4)
	seen := observe(t, order, 8, 3)
	if want := (Observation{Kind: OrderInOrder, Holes: []Range{{4, 4}, {6, 7}}}); !reflect.DeepEqual(seen, want) {
		t.Errorf("%+v", seen)
	}
	want := LaneState{High: 8, Missing: []Range{{2, 3}}, Holes: []Range{{4, 4}, {6, 7}}}
	if state := order.State(); !state.equal(want) {
		t.Errorf("%+v", state)
	}
	if seen := observe(t, order, 3, 1); !equalRanges(seen.Holes, []Range{{2, 2}}) {
		t.Errorf("late: %+v", seen)
	}
}

func TestLaneEnds(t *testing.T) {
	order := NewLaneOrder(LaneState{}, true)
	observe(t, order, 5, 4)
	seen, err := order.Observe(3, 2, true)
	if err != nil || seen.Kind != OrderOld || *seen.Lost != (Range{4, 5}) {
		t.Errorf("%+v, %v", seen, err)
	}
	before := order.State()
	if seen := observe(t, order, 6, 5); seen.Kind != OrderConflict {
		t.Errorf("beyond the end: %+v", seen)
	}
	if order.ApplyProgress(9, nil); !order.State().equal(before) {
		t.Errorf("progress beyond the end: %+v", order.State())
	}
	order.ApplyProgress(9, []Range{{2, 2}, {6, 9}})
	want := LaneState{High: 5, Ended: true, Missing: []Range{{1, 1}, {4, 4}}, Holes: []Range{{2, 2}}}
	if state := order.State(); !state.equal(want) {
		t.Errorf("dead letters below the end: %+v", state)
	}
}

func TestLargestSequence(t *testing.T) {
	order := NewLaneOrder(LaneState{}, true)
	observe(t, order, 2, 1)
	order.ApplyProgress(math.MaxInt64, nil)
	if state := order.State(); !equalRanges(state.Missing, []Range{{1, 1}, {3, math.MaxInt64}}) {
		t.Errorf("%+v", state)
	}
	if seen := observe(t, order, math.MaxInt64, math.MaxInt64-1); seen.Kind != OrderOld {
		t.Errorf("%+v", seen)
	}
	if before := order.missingBefore(math.MaxInt64 - 1); !equalRanges(before, []Range{{1, 1}, {3, math.MaxInt64 - 1}}) {
		t.Errorf("%v", before)
	}
	if _, err := order.Observe(3, 3, false); err == nil {
		t.Error("a number that follows itself")
	}
}

func TestRangesAreBounded(t *testing.T) {
	order := NewLaneOrder(LaneState{}, true)
	for n := int64(1); n <= 3000; n++ {
		observe(t, order, 2*n, 2*n-1)
	}
	state := order.State()
	if count := len(state.Missing) + len(state.Unknown); count != laneRangesMax {
		t.Errorf("%d ranges", count)
	}
	if state.Unknown[0].First != 1 || len(state.Unknown) != 1 {
		t.Errorf("the lowest are not unknown: %v", state.Unknown)
	}
}

func TestPatterns(t *testing.T) {
	for text, types := range map[string]map[string]bool{
		"order.paid": {"order.paid": true, "order.paid.x": false, "orderxpaid": false},
		"order.*":    {"order.paid": true, "order.item.added": false, "order": false},
		"order.**":   {"order.paid": true, "order.item.added": true, "order": false},
		"**":         {"order": true, "a.b.c": true, "outbox.lane.stuck": false, "a b": false},
		"outbox.**":  {"outbox.lane.stuck": true, "outbox.probe": false},
		"a-b.*":      {"a-b.c-d": true, "a-b.-c": false, "a.c": false},
	} {
		parsed, err := parsePattern(text)
		if err != nil {
			t.Fatal(err)
		}
		for eventType, want := range types {
			if parsed.matches(eventType) != want {
				t.Errorf("%s matches %s: %v", text, eventType, !want)
			}
		}
	}
	for _, text := range []string{"", "a..b", "**.a", "a.**.b", "-a", "a.-b", "a.*x"} {
		if _, err := parsePattern(text); err == nil {
			t.Errorf("%q is no error", text)
		}
	}
}
