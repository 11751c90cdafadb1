// Command verify verifies requests, for tests that compare receivers of several languages.
//
// It reads lines of JSON, {"headers", "body" (base64), "secrets", "formats", "header_prefix", "now"},
// and writes a line with the messages or the error for each.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"log"
	"math"
	"net/http"
	"os"
	"time"

	receiver "github.com/outbox-relay/receiver-go"
)

type request struct {
	Headers      map[string]string `json:"headers"`
	Body         []byte            `json:"body"`
	Secrets      []string          `json:"secrets"`
	Formats      []receiver.Format `json:"formats"`
	HeaderPrefix json.RawMessage   `json:"header_prefix"`
	Now          float64           `json:"now"`
}

type message struct {
	DeliveryID       string          `json:"delivery_id"`
	EventID          string          `json:"event_id"`
	Type             string          `json:"type"`
	Timestamp        string          `json:"timestamp"`
	Tenant           *string         `json:"tenant"`
	Key              *string         `json:"key"`
	Lane             string          `json:"lane"`
	Sequence         int64           `json:"sequence"`
	PreviousSequence int64           `json:"previous_sequence"`
	ReplayOf         []any           `json:"replay_of"`
	Backfill         *int64          `json:"backfill"`
	LaneEnds         bool            `json:"lane_ends"`
	Format           receiver.Format `json:"format"`
	ContentType      *string         `json:"content_type"`
	DataText         *string         `json:"data_text"`
	Data             any             `json:"data"`
}

func main() {
	input, output := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := input.ReadBytes('\n')
		if len(line) > 1 {
			result, runError := run(line)
			if runError != nil {
				log.Fatal(runError)
			}
			if err := output.Encode(result); err != nil {
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

func run(line []byte) (map[string]any, error) {
	var given request
	if err := json.Unmarshal(line, &given); err != nil {
		return nil, err
	}
	header := http.Header{}
	for name, value := range given.Headers {
		header[name] = []string{value}
	}
	seconds, fraction := math.Modf(given.Now)
	now := time.Unix(int64(seconds), int64(fraction*1e9))
	verifier, err := receiver.NewVerifier(given.Secrets, receiver.VerifierOptions{
		HeaderPrefixes: prefixes(given.HeaderPrefix), Formats: given.Formats,
		Clock: func() time.Time { return now },
	})
	if err != nil {
		return map[string]any{"error": "usage", "text": err.Error()}, nil
	}
	verified, err := verifier.Verify(header, given.Body)
	if receiver.IsTimestampRefused(err) {
		return map[string]any{"error": "timestamp", "text": err.Error()}, nil
	}
	var badSignature *receiver.SignatureError
	if errors.As(err, &badSignature) {
		return map[string]any{"error": "signature", "text": err.Error()}, nil
	}
	if err != nil {
		return map[string]any{"error": "message", "text": err.Error()}, nil
	}
	messages := []message{}
	for _, each := range verified.Messages {
		messages = append(messages, describe(each))
	}
	return map[string]any{"messages": messages}, nil
}

// prefixes reads one prefix, or a list of them.
func prefixes(given json.RawMessage) []string {
	var one string
	if json.Unmarshal(given, &one) == nil && one != "" {
		return []string{one}
	}
	var several []string
	_ = json.Unmarshal(given, &several)
	return several
}

func describe(m receiver.Message) message {
	described := message{
		DeliveryID: m.DeliveryID, EventID: m.EventID, Type: m.Type, Timestamp: m.Timestamp,
		Tenant: m.Tenant, Key: m.Key, Lane: m.Lane, Sequence: m.Sequence,
		PreviousSequence: m.PreviousSequence, Backfill: m.Backfill, LaneEnds: m.LaneEnds,
		Format: m.Format,
	}
	if m.Data != nil {
		text := string(m.Data)
		described.DataText = &text
	}
	if m.ReplayOf != nil {
		described.ReplayOf = []any{m.ReplayOf.Lane, m.ReplayOf.Sequence}
	}
	if m.Binary != nil || m.ContentType != "" {
		described.ContentType = &m.ContentType
	}
	if m.Binary != nil {
		described.Data = map[string][]byte{"base64": m.Binary}
	}
	return described
}
