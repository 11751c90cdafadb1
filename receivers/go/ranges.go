package receiver

import (
	"encoding/json"
	"fmt"
	"math"
	"sort"
	"strings"
)

// Range is an inclusive range of sequence numbers.  In JSON it is an array of two integers.
type Range struct {
	First, Last int64
}

// MarshalJSON encodes the range as [first, last].
func (r Range) MarshalJSON() ([]byte, error) {
	return json.Marshal([2]int64{r.First, r.Last})
}

// UnmarshalJSON decodes [first, last].
func (r *Range) UnmarshalJSON(text []byte) error {
	var bounds []int64
	if err := json.Unmarshal(text, &bounds); err != nil {
		return err
	}
	if len(bounds) != 2 {
		return fmt.Errorf("a range has two numbers, not %d", len(bounds))
	}
	r.First, r.Last = bounds[0], bounds[1]
	return nil
}

// String returns "7", or "7 to 9".
func (r Range) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d to %d", r.First, r.Last)
}

func formatRanges(ranges []Range) string {
	texts := make([]string, len(ranges))
	for i, each := range ranges {
		texts[i] = each.String()
	}
	return strings.Join(texts, ", ")
}

func equalRanges(a, b []Range) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func lessRange(a, b Range) bool {
	return a.First < b.First || a.First == b.First && a.Last < b.Last
}

// rangeSet is a set of integers as sorted ranges that neither overlap nor touch.
type rangeSet []Range

func (s rangeSet) contains(number int64) bool {
	i := sort.Search(len(s), func(i int) bool { return s[i].Last >= number })
	return i < len(s) && s[i].First <= number
}

// add adds the integers from first to last; none if last < first.
func (s *rangeSet) add(first, last int64) {
	if last < first {
		return
	}
	old := *s
	// Merge with the ranges that overlap or touch.  Saturated: sequence numbers end at 2^63-1.
	before, after := first, last
	if before > math.MinInt64 {
		before--
	}
	if after < math.MaxInt64 {
		after++
	}
	i := sort.Search(len(old), func(i int) bool { return old[i].Last >= before })
	j := sort.Search(len(old), func(j int) bool { return old[j].First > after })
	if i < j {
		first = min(first, old[i].First)
		last = max(last, old[j-1].Last)
	}
	s.replace(i, j, Range{first, last})
}

// remove removes the integers from first to last, and returns the ranges that were in the set.
func (s *rangeSet) remove(first, last int64) []Range {
	old := *s
	i := sort.Search(len(old), func(i int) bool { return old[i].Last >= first })
	j := sort.Search(len(old), func(j int) bool { return old[j].First > last })
	if i >= j || last < first {
		return nil
	}
	removed := make([]Range, 0, j-i)
	for _, each := range old[i:j] {
		removed = append(removed, Range{max(first, each.First), min(last, each.Last)})
	}
	var left []Range
	if old[i].First < first {
		left = append(left, Range{old[i].First, first - 1})
	}
	if old[j-1].Last > last {
		left = append(left, Range{last + 1, old[j-1].Last})
	}
	s.replace(i, j, left...)
	return removed
}

func (s *rangeSet) replace(i, j int, ranges ...Range) {
	old := *s
	replaced := make(rangeSet, 0, len(old)-(j-i)+len(ranges))
	replaced = append(replaced, old[:i]...)
	replaced = append(replaced, ranges...)
	*s = append(replaced, old[j:]...)
}

func min(a, b int64) int64 {
	if a < b {
		return a
	}
	return b
}

func max(a, b int64) int64 {
	if a > b {
		return a
	}
	return b
}
