package receiver

import (
	"bytes"
	"encoding/json"
	"strings"
)

const (
	checkpointType = "outbox.checkpoint"
	// Limits of a checkpoint, as of the relay.
	checkpointLanesMax  = 2000
	checkpointRangesMax = 20
)

// LaneMark is the progress of one lane in a checkpoint.
type LaneMark struct {
	Lane string
	// Generation rises when the lanes of an endpoint are replaced.
	Generation int64
	// Sequence is the last number that was delivered; 0: none.
	Sequence int64
	// DeadLettered has the newest ranges below it that were dead-lettered, at most 20.
	DeadLettered []Range
}

// parseCheckpoint returns the lanes of a checkpoint; false: the body is not a checkpoint.
func parseCheckpoint(body []byte) ([]LaneMark, bool, error) {
	if !bytes.Contains(body, []byte(checkpointType)) || checkJSON(body) != nil {
		return nil, false, nil
	}
	content, isObject := parseObject(body)
	if !isObject {
		return nil, false, nil
	}
	_, isDelivery := content["lane"]
	if kind, _ := parseString(content["type"]); kind != checkpointType || isDelivery {
		return nil, false, nil
	}
	lanes, isArray := parseArray(content["lanes"])
	if !isArray || len(lanes) > checkpointLanesMax {
		return nil, false, badMessage(`the checkpoint's "lanes" is not a list of at most %d`, checkpointLanesMax)
	}
	marks := make([]LaneMark, 0, len(lanes))
	for _, lane := range lanes {
		mark, ok := parseMark(lane)
		if !ok {
			return nil, false, badMessage(
				"a lane of the checkpoint has no valid name, generation and sequences")
		}
		marks = append(marks, mark)
	}
	return marks, true, nil
}

func parseMark(value json.RawMessage) (LaneMark, bool) {
	var mark LaneMark
	content, isObject := parseObject(value)
	if !isObject {
		return mark, false
	}
	var hasLane, hasGeneration, hasSequence bool
	mark.Lane, hasLane = parseString(content["lane"])
	mark.Generation, hasGeneration = parseNumber(content["generation"])
	mark.Sequence, hasSequence = parseNumber(content["sequence"])
	// No database can hold a NUL character.
	if !hasLane || strings.ContainsRune(mark.Lane, 0) || !hasGeneration || !hasSequence {
		return mark, false
	}
	given, found := content["dead_lettered"]
	if !found {
		return mark, true
	}
	ranges, isArray := parseArray(given)
	if !isArray || len(ranges) > checkpointRangesMax {
		return mark, false
	}
	for _, each := range ranges {
		bounds, isArray := parseArray(each)
		if !isArray || len(bounds) != 2 {
			return mark, false
		}
		first, hasFirst := parseNumber(bounds[0])
		last, hasLast := parseNumber(bounds[1])
		if !hasFirst || !hasLast || first < 1 || first > last {
			return mark, false
		}
		mark.DeadLettered = append(mark.DeadLettered, Range{First: first, Last: last})
	}
	return mark, true
}
