package receiver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of [Options].
const (
	// BodyBytesMax is four times the largest payload that can be published by default.
	BodyBytesMax = 1024 * 1024
	// InFlightMax is how many requests are processed at once.
	InFlightMax = 100
	// TransactionTimeout is twice the time after which a relay gives up on a request.
	TransactionTimeout = 30 * time.Second
)

// Handler processes a delivery in the transaction that records it.
//
// tx is nil with the store [Memory].  Use ctx for every statement: it ends with the request, or with
// Options.TransactionTimeout.  The handler must neither commit nor roll back.  An error or a panic
// rolls everything back: [Refuse] makes the event a dead letter (422), [Busy] postpones it (503),
// and any other error is retried (500, or 503 if the database reports that it is busy or
// unavailable).
type Handler func(ctx context.Context, tx *sql.Tx, m Message) error

// Gaps is the policy for a delivery when deliveries before it are missing.
type Gaps int

// The policies for gaps.
const (
	// GapsReport processes it, and reports the missing numbers.
	GapsReport Gaps = iota
	// GapsCatchUp fetches the missing ones from the relay and processes them first.  While the relay
	// cannot be reached the response is 503.
	GapsCatchUp
)

// Unhandled is the policy for an event whose type has no handler.
type Unhandled int

// The policies for types without a handler.
const (
	// UnhandledRefuse refuses the event: 422, and the relay makes a dead letter.
	UnhandledRefuse Unhandled = iota
	// UnhandledIgnore records the event, which is then never processed.
	UnhandledIgnore
)

// Options are the options of [New]; the zero value has the defaults.
type Options struct {
	// HeaderPrefixes, Formats, Tolerance and Clock are as of [VerifierOptions].
	HeaderPrefixes []string
	Formats        []Format
	Tolerance      time.Duration
	Clock          func() time.Time
	// BodyBytesMax is the largest body in bytes; larger ones get 413.  Default: 1 MiB.
	BodyBytesMax int64
	// InFlightMax is how many requests are processed at once; more get 503.  Default: 100.
	InFlightMax int
	// TransactionTimeout limits each transaction with its handlers.  Default: 30 s.
	TransactionTimeout time.Duration
	// Fetch is where missing deliveries and payloads are fetched; GapsCatchUp, [Receiver.CatchUp]
	// and [Receiver.FetchPayload] need it.
	Fetch DeliverySource
	// Gaps is the policy for a delivery when deliveries before it are missing.
	Gaps Gaps
	// Unhandled is the policy for an event whose type has no handler.
	Unhandled Unhandled
	// LogRequests inserts each signed request into the table of requests; not with [Memory].
	LogRequests bool
	// OnDelivery is called after the commit with each delivery of a lane and its result.
	OnDelivery func(Message, DeliveryResult)
	// Logger logs errors and missing deliveries.  Default: log.Default().
	Logger *log.Logger
}

// Receiver processes the requests of a relay.  It is an [http.Handler], and safe for concurrent use.
type Receiver struct {
	options  Options
	verifier *Verifier
	store    Store
	inbox    inbox
	// creation is held while the tables are created.
	creation chan struct{}
	isReady  atomic.Bool

	mutex    sync.RWMutex
	handlers []registeredHandler
	inFlight int
	received int
	totals   Totals
}

type registeredHandler struct {
	pattern pattern
	handler Handler
}

// New returns a receiver.
//
// The secrets are one or more of whsec_… (HMAC, also without its prefix) and whpk_… (Ed25519 public
// key): both the old and the new one while a secret is being rotated.  It returns an error if there is no secret, or an
// argument is out of range; the error never contains a secret.
func New(secrets []string, store Store, options Options) (*Receiver, error) {
	verifier, err := NewVerifier(secrets, VerifierOptions{HeaderPrefixes: options.HeaderPrefixes,
		Formats: options.Formats, Tolerance: options.Tolerance, Clock: options.Clock})
	if err != nil {
		return nil, err
	}
	if store == nil {
		return nil, errors.New("receiver: the store is nil")
	}
	if options.BodyBytesMax == 0 {
		options.BodyBytesMax = BodyBytesMax
	}
	if options.InFlightMax == 0 {
		options.InFlightMax = InFlightMax
	}
	if options.TransactionTimeout == 0 {
		options.TransactionTimeout = TransactionTimeout
	}
	if options.BodyBytesMax < 0 || options.InFlightMax < 0 || options.TransactionTimeout < 0 {
		return nil, errors.New("receiver: a limit is negative")
	}
	if options.Gaps != GapsReport && options.Gaps != GapsCatchUp {
		return nil, fmt.Errorf("receiver: gaps: there is no policy %d", options.Gaps)
	}
	if options.Unhandled != UnhandledRefuse && options.Unhandled != UnhandledIgnore {
		return nil, fmt.Errorf("receiver: unhandled: there is no policy %d", options.Unhandled)
	}
	if options.Gaps == GapsCatchUp && options.Fetch == nil {
		return nil, errors.New("receiver: gaps: GapsCatchUp needs Options.Fetch")
	}
	if options.Logger == nil {
		options.Logger = log.Default()
	}
	return &Receiver{
		options: options, verifier: verifier, store: store, inbox: newInbox(store),
		creation: make(chan struct{}, 1),
		totals:   Totals{Requests: map[Outcome]int64{}},
	}, nil
}

// Handle registers a handler for event types: `order.paid`, `order.*`, `**`.
//
// A pattern is dot-separated; `*` is one segment, a last `**` one or more.  All handlers of a type
// are called, in the order of their registration.  It panics if the pattern is invalid or the
// handler is nil, as [http.ServeMux.Handle] does.
func (r *Receiver) Handle(pattern string, handler Handler) {
	types, err := parsePattern(pattern)
	if err != nil {
		panic(err)
	}
	if handler == nil {
		panic("receiver: nil handler")
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.handlers = append(r.handlers, registeredHandler{types, handler})
}

// matching returns the handlers of an event type; an error if there is none, and such events are
// refused.
func (r *Receiver) matching(eventType string) ([]Handler, error) {
	var matching []Handler
	var known []string
	r.mutex.RLock()
	defer r.mutex.RUnlock()
	for _, each := range r.handlers {
		known = append(known, each.pattern.text)
		if each.pattern.matches(eventType) {
			matching = append(matching, each.handler)
		}
	}
	if len(matching) > 0 || r.options.Unhandled == UnhandledIgnore {
		return matching, nil
	}
	if len(known) == 0 {
		known = append(known, "none")
	}
	return nil, unhandledType{Refuse(fmt.Sprintf("no handler for the event type %s; the receiver has %s: add one, subscribe "+
		"the endpoint by --type, or set Unhandled to UnhandledIgnore", eventType, strings.Join(known, ", ")))}
}

// unhandledType is the refusal of an event whose type has no handler.
type unhandledType struct{ error }

func (u unhandledType) Unwrap() error { return u.error }

// Start creates the missing tables; otherwise the first request does so.
func (r *Receiver) Start(ctx context.Context) error {
	if r.isReady.Load() {
		return nil
	}
	select {
	case r.creation <- struct{}{}:
		defer func() { <-r.creation }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if r.isReady.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.options.TransactionTimeout)
	defer cancel()
	if err := r.store.create(ctx); err != nil {
		return err
	}
	r.isReady.Store(true)
	return nil
}

// ServeHTTP reads a request, processes it and writes the response.
//
// The server should have time-outs for reading requests (http.Server.ReadTimeout), because the body
// is read before the request counts as in flight.
func (r *Receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	response := r.serve(w, request)
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(response.Status)
	// An error means that the sender has closed the connection; it sends the delivery again.
	_, _ = w.Write(response.Body())
}

func (r *Receiver) serve(w http.ResponseWriter, request *http.Request) Response {
	read := Request{Method: request.Method, Header: request.Header}
	if request.Method == http.MethodPost {
		bytesMax := r.options.BodyBytesMax
		if request.Body == nil {
			// Only a server guarantees that there is one.
			request.Body = http.NoBody
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, request.Body, bytesMax))
		var exceeds *http.MaxBytesError
		if errors.As(err, &exceeds) {
			r.countRequest(OutcomeRejected)
			return *tooLarge(bytesMax)
		}
		if err != nil {
			r.countRequest(OutcomeRejected)
			return *rejected(http.StatusBadRequest, "the body could not be read")
		}
		read.Body = body
	}
	return r.Process(request.Context(), read)
}

// Process processes a request and returns its response, for servers without net/http.
func (r *Receiver) Process(ctx context.Context, request Request) Response {
	if others, admitted := r.admit(); !admitted {
		r.countRequest(OutcomePutOff)
		return putOff(fmt.Sprintf("%d requests are being processed", others), busyRetryAfter)
	}
	defer r.release()
	verified, refusal := r.read(request, false)
	if refusal != nil {
		r.countRequest(refusal.Outcome)
		return *refusal
	}
	response := r.respond(ctx, verified)
	r.countRequest(response.Outcome)
	if r.options.LogRequests {
		r.logRequest(ctx, verified, response)
	}
	return response
}

func (r *Receiver) admit() (others int, admitted bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.inFlight >= r.options.InFlightMax {
		return r.inFlight, false
	}
	r.inFlight++
	return r.inFlight, true
}

func (r *Receiver) release() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.inFlight--
}

// read verifies a request, and returns it or the response that rejects it.
func (r *Receiver) read(request Request, fetched bool) (*Verified, *Response) {
	if request.Method != http.MethodPost {
		return nil, notPost()
	}
	if int64(len(request.Body)) > r.options.BodyBytesMax {
		return nil, tooLarge(r.options.BodyBytesMax)
	}
	verified, err := r.verifier.verify(request.Header, request.Body, fetched)
	var bad *MessageError
	if errors.As(err, &bad) {
		return nil, rejected(http.StatusBadRequest, bad.Error())
	}
	if err != nil {
		return nil, unverified(err)
	}
	if len(verified.Messages) == 0 {
		prefix := r.verifier.prefixes[0]
		return nil, rejected(http.StatusBadRequest,
			fmt.Sprintf("the headers %sLane and %sSequence are missing", prefix, prefix))
	}
	return verified, nil
}
