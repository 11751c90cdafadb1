package receiver

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"strconv"
	"testing"
	"time"
)

const (
	testKey  = secretPrefix + "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ="
	otherKey = secretPrefix + "QSBzZWNyZXQgdGhhdCBub2JvZHkgaGFzLg=="
	testLane = "6f1c2a349d55-1-0"
)

var testTime = time.Unix(1_770_000_000, 0)

func testClock() time.Time { return testTime }

// hmacSignature is `v1,…` of a text.
func hmacSignature(secret string, signed []byte) string {
	key, err := parseKey(secret)
	if err != nil {
		panic(err)
	}
	mac := hmac.New(sha256.New, key.secret())
	mac.Write(signed)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// sign adds the signature of a body under a new time.
func sign(header http.Header, body []byte, at time.Time) {
	timestamp := strconv.FormatInt(at.Unix(), 10)
	header.Set(timestampHeader, timestamp)
	signed := append([]byte(header.Get(idHeader)+"."+timestamp+"."), body...)
	header.Set(signatureHeader, hmacSignature(testKey, signed))
}

func deliveryID(sequence int64) string {
	return fmt.Sprintf("0d9ff25f-6f0b-8e0d-9d4b-%012d", sequence%1e12)
}

// content is a body in the format envelope.
type content map[string]any

func event(sequence int64) content {
	return content{
		"id": fmt.Sprintf("event-%d", sequence), "type": "order.paid",
		"timestamp": "2026-01-31T12:00:00.000001Z", "key": "order-7", "lane": testLane,
		"sequence": sequence, "previous_sequence": sequence - 1, "data": map[string]any{"n": sequence},
	}
}

func (c content) with(name string, value any) content {
	c[name] = value
	return c
}

func encode(value any) []byte {
	body, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return body
}

// request is the request with one delivery in the format envelope.
func (c content) request() Request {
	sequence := c["sequence"].(int64)
	return delivery(encode(c), deliveryID(sequence), map[string]any{
		"Event": c["type"], "Event-Id": c["id"], "Lane": c["lane"], "Sequence": sequence,
		"Previous-Sequence": c["previous_sequence"],
	})
}

func delivery(body []byte, id string, headers map[string]any) Request {
	header := http.Header{}
	header.Set("Content-Type", "application/json")
	header.Set(idHeader, id)
	header.Set("X-Delivery", id)
	header.Set("X-Attempt", "1")
	for name, value := range headers {
		header.Set("X-"+name, fmt.Sprint(value))
	}
	sign(header, body, testTime)
	return Request{Method: http.MethodPost, Header: header, Body: body}
}

// batch is a request with several deliveries.
func batch(events ...content) Request {
	for _, each := range events {
		each["delivery"] = deliveryID(each["sequence"].(int64))
	}
	first, last := events[0], events[len(events)-1]
	return delivery(encode(events), deliveryID(1000+first["sequence"].(int64)), map[string]any{
		"Lane": testLane, "Sequence": first["sequence"], "Last-Sequence": last["sequence"],
		"Previous-Sequence": first["previous_sequence"],
	})
}

// newTestReceiver returns a receiver with a store in memory, and its log.
func newTestReceiver(t *testing.T, options Options) (*Receiver, *bytes.Buffer) {
	t.Helper()
	store, err := Memory(MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	written := &bytes.Buffer{}
	options.Clock = testClock
	options.Logger = log.New(written, "", 0)
	r, err := New([]string{testKey}, store, options)
	if err != nil {
		t.Fatal(err)
	}
	return r, written
}

func readAll(t *testing.T, from io.Reader) string {
	t.Helper()
	text, err := io.ReadAll(from)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
