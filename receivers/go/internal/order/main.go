// Command order runs operations on the order check of fresh lanes, for tests that compare receivers
// of several languages.
//
// It reads lines of JSON, {"from_start": bool, "operations": [[name, argument…], …]}, and writes a
// line with the results and the final state for each.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	receiver "github.com/outbox-relay/receiver-go"
)

type lane struct {
	FromStart  bool                `json:"from_start"`
	Operations [][]json.RawMessage `json:"operations"`
}

type laneState struct {
	High    int64            `json:"high"`
	Ended   bool             `json:"ended"`
	Missing []receiver.Range `json:"missing"`
	Holes   []receiver.Range `json:"holes"`
	Unknown []receiver.Range `json:"unknown"`
}

type observation struct {
	Kind    receiver.OrderKind `json:"kind"`
	Missing []receiver.Range   `json:"missing"`
	Holes   []receiver.Range   `json:"holes"`
	Was     *string            `json:"was"`
	Lost    *receiver.Range    `json:"lost"`
}

func main() {
	input, output := bufio.NewReader(os.Stdin), bufio.NewWriter(os.Stdout)
	for {
		line, err := input.ReadBytes('\n')
		if len(line) > 1 {
			written, runError := run(line)
			if runError != nil {
				log.Fatal(runError)
			}
			fmt.Fprintf(output, "%s\n", written)
			if err := output.Flush(); err != nil {
				log.Fatal(err)
			}
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
	}
}

func run(line []byte) ([]byte, error) {
	var given lane
	if err := json.Unmarshal(line, &given); err != nil {
		return nil, err
	}
	order := receiver.NewLaneOrder(receiver.LaneState{}, given.FromStart)
	results := []any{}
	for _, operation := range given.Operations {
		result, err := apply(order, operation)
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	state := laneState(order.State())
	return json.Marshal(map[string]any{"results": results, "state": state})
}

func apply(order *receiver.LaneOrder, operation []json.RawMessage) (any, error) {
	var name string
	if len(operation) < 2 || json.Unmarshal(operation[0], &name) != nil {
		return nil, errors.New("an operation has a name and arguments")
	}
	var first, second int64
	if err := json.Unmarshal(operation[1], &first); err != nil {
		return nil, err
	}
	if name == "observe" || name == "unavailable" {
		if err := json.Unmarshal(operation[2], &second); err != nil {
			return nil, err
		}
	}
	switch name {
	case "observe":
		var ends bool
		if err := json.Unmarshal(operation[3], &ends); err != nil {
			return nil, err
		}
		seen, err := order.Observe(first, second, ends)
		if err != nil {
			return map[string]string{"error": err.Error()}, nil
		}
		return observation{seen.Kind, ranges(seen.Missing), ranges(seen.Holes), stateName(seen.Was), seen.Lost}, nil
	case "close":
		return stateName(order.Close(first)), nil
	case "progress":
		var deadLettered []receiver.Range
		if err := json.Unmarshal(operation[2], &deadLettered); err != nil {
			return nil, err
		}
		order.ApplyProgress(first, deadLettered)
		return nil, nil
	case "unavailable":
		return ranges(order.MarkUnavailable(receiver.Range{First: first, Last: second})), nil
	}
	return nil, fmt.Errorf("there is no operation %q", name)
}

// ranges makes an empty list of nil, which JSON would have as null.
func ranges(given []receiver.Range) []receiver.Range { return append([]receiver.Range{}, given...) }

func stateName(state receiver.SequenceState) *string {
	if state == "" {
		return nil
	}
	name := string(state)
	return &name
}
