package receiver

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Causes of a [SignatureError], for errors.Is.
var (
	// ErrMissingHeader: a required header is missing.
	ErrMissingHeader = errors.New("a header is missing")
	// ErrRepeatedHeader: a header occurs more than once, so the signed value is unknown.
	ErrRepeatedHeader = errors.New("a header occurs more than once")
	// ErrMalformedHeader: a header has an invalid value.
	ErrMalformedHeader = errors.New("a header has an invalid value")
	// ErrTimestampTooOld: signed longer ago than tolerated; a replayed request, or the clocks differ.
	ErrTimestampTooOld = errors.New("the signature is too old")
	// ErrTimestampTooNew: signed further in the future than tolerated; the clocks differ.
	// The signature itself is valid; see [IsTimestampRefused].
	ErrTimestampTooNew = errors.New("the signature is from the future")
	// ErrSignatureMismatch: another secret, or a body or a header was changed.
	ErrSignatureMismatch = errors.New("no signature matches")
)

// IsTimestampRefused reports whether the signature of a request is valid and only its time is not
// tolerated.  The response is then 503 with X-Refused: timestamp, because the sender signs each
// attempt anew.
func IsTimestampRefused(err error) bool {
	return errors.Is(err, ErrTimestampTooOld) || errors.Is(err, ErrTimestampTooNew)
}

// SignatureError reports a request without a valid, recent signature: 401, or 503 if
// [IsTimestampRefused].
//
// Its text is one line without secrets, and may be sent to the sender.
type SignatureError struct {
	// Cause is one of ErrMissingHeader and so on.
	Cause error
	// Header is the name of the header in lower case, if the cause is one header.
	Header string
	text   string
}

func (e *SignatureError) Error() string { return e.text }

// Unwrap returns the cause.
func (e *SignatureError) Unwrap() error { return e.Cause }

func headerError(cause error, header, problem string) error {
	return &SignatureError{Cause: cause, Header: header, text: "the header " + header + " " + problem}
}

// MessageError reports a signed request that is not a valid delivery: 400.
//
// Its text is one line without secrets, and may be sent to the sender.
type MessageError struct{ text string }

func (e *MessageError) Error() string { return e.text }

func badMessage(format string, arguments ...any) error {
	return &MessageError{text: oneLine(fmt.Sprintf(format, arguments...))}
}

// RefusedError is what [Refuse] returns.
type RefusedError struct {
	// Reason is one line for the operator of the sender.
	Reason string
}

func (e *RefusedError) Error() string { return e.Reason }

// Refuse returns an error with which a handler refuses an event that it can never process.
//
// The response is 422 with the reason.  The sender makes the event a dead letter, which an
// operator can inspect and replay.
func Refuse(reason string) error { return &RefusedError{Reason: reason} }

// BusyError is what [Busy] returns.
type BusyError struct {
	// Reason is one line for the log of the sender.
	Reason string
	// RetryAfter is the hold-off; it is sent in whole seconds, rounded up.
	RetryAfter time.Duration
}

func (e *BusyError) Error() string { return e.Reason }

// Busy returns an error with which a handler postpones a delivery: 503 with Retry-After.
func Busy(reason string, retryAfter time.Duration) error {
	return &BusyError{Reason: reason, RetryAfter: retryAfter}
}

// wholeSeconds rounds a hold-off up, because Retry-After has no fractions.
func wholeSeconds(d time.Duration) int64 {
	return int64(math.Ceil(math.Max(0, d.Seconds())))
}

// FetchError reports that the relay could not be reached, rejected the request, or sent an
// invalid response.
type FetchError struct {
	text  string
	cause error
}

func (e *FetchError) Error() string { return e.text }

// Unwrap returns the error of the HTTP client, or nil.
func (e *FetchError) Unwrap() error { return e.cause }

func cannotFetch(format string, arguments ...any) error {
	return &FetchError{text: oneLine(fmt.Sprintf(format, arguments...))}
}
