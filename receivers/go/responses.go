package receiver

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	busyRetryAfter        = time.Second
	unavailableRetryAfter = 5 * time.Second
	acceptedThroughHeader = "X-Accepted-Through"
	refusedHeader         = "X-Refused"
	lineCharactersMax     = 500
)

// Request is an HTTP request to a receiver, for servers without net/http.
type Request struct {
	Method string
	// Header has names in any case.
	Header http.Header
	// Body is the raw body.
	Body []byte
}

// Outcome is the outcome of a request.
type Outcome string

// The outcomes of requests, with their status.
const (
	// OutcomeProcessed: 200.
	OutcomeProcessed Outcome = "processed"
	// OutcomeDuplicate: 200, processed before.
	OutcomeDuplicate Outcome = "duplicate"
	// OutcomeConflict: 422, its sequence number was used by another delivery.
	OutcomeConflict Outcome = "conflict"
	// OutcomeRejected: 400, 401, 405 or 413: no valid signature, headers and body disagree, not a
	// POST, or too large; 503 with X-Refused: timestamp if only the time of the signature is not
	// tolerated.
	OutcomeRejected Outcome = "rejected"
	// OutcomeRefused: 422, a handler returned [Refuse].
	OutcomeRefused Outcome = "refused"
	// OutcomeFailed: 500, a handler returned another error or panicked, or the receiver has an error.
	OutcomeFailed Outcome = "failed"
	// OutcomePutOff: 503 with Retry-After: overloaded, database unavailable or busy, or deliveries
	// missing.
	OutcomePutOff Outcome = "put_off"
)

// Response is the HTTP response to a request.
//
// A relay makes a dead letter of 400, 401, 405, 413 and 422, and retries 500 and 503.  It signs each
// attempt anew, so a request whose time was not tolerated may be accepted later.
type Response struct {
	Outcome Outcome
	Status  int
	// Text is one line for the sender's log: the body without its newline.  It has no details of
	// errors of the receiver.
	Text string
	// Header has Content-Type and, depending on the outcome, Retry-After, Allow and
	// X-Accepted-Through.
	Header http.Header
}

// Body is the body of the response: the text and a newline.
func (r Response) Body() []byte { return []byte(r.Text + "\n") }

func newResponse(outcome Outcome, status int, text string) Response {
	header := http.Header{"Content-Type": {"text/plain; charset=utf-8"}}
	return Response{Outcome: outcome, Status: status, Text: oneLine(text), Header: header}
}

func rejected(status int, reason string) *Response {
	response := newResponse(OutcomeRejected, status, reason)
	return &response
}

// unverified returns the 401 response, or 503 if the signature is valid and only its time is not
// tolerated.  A forged request must not get a status that makes its sender keep and repeat it.
func unverified(err error) *Response {
	if !IsTimestampRefused(err) {
		return rejected(http.StatusUnauthorized, err.Error())
	}
	response := rejected(http.StatusServiceUnavailable, err.Error())
	response.Header.Set(refusedHeader, "timestamp")
	return response
}

func notPost() *Response {
	response := rejected(http.StatusMethodNotAllowed, "send deliveries by POST")
	response.Header.Set("Allow", http.MethodPost)
	return response
}

func tooLarge(bytesMax int64) *Response {
	return rejected(http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", bytesMax))
}

func putOff(reason string, retryAfter time.Duration) Response {
	response := newResponse(OutcomePutOff, http.StatusServiceUnavailable, reason)
	response.Header.Set("Retry-After", strconv.FormatInt(wholeSeconds(retryAfter), 10))
	return response
}

// partialResponse returns the response to a batch that stopped at one of its messages: with
// X-Accepted-Through if messages before it were committed.
func partialResponse(messages []Message, at int, response Response) Response {
	if at > 0 {
		accepted := strconv.FormatInt(messages[at-1].Sequence, 10)
		response.Header.Set(acceptedThroughHeader, accepted)
	}
	return response
}

// oneLine collapses a text to one line of at most 500 characters.
func oneLine(text string) string {
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "\uFFFD")
	if runes := []rune(text); len(runes) > lineCharactersMax {
		text = string(runes[:lineCharactersMax])
	}
	return text
}
