package receiver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
)

const (
	// expireEvery is the number of deliveries between two deletions of expired rows.
	expireEvery    = 1000
	expireStepsMax = 20
)

// errNotRecorded rolls back: deliveries before one are missing, or one of a batch conflicts.
var errNotRecorded = errors.New("receiver: not recorded")

// inTransaction calls a function in a transaction with a time-out, and commits unless it fails.
func (r *Receiver) inTransaction(ctx context.Context, use func(ctx context.Context, t transaction) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.options.TransactionTimeout)
	defer cancel()
	t, err := r.store.begin(ctx)
	if err == nil {
		// After a panic, too.
		defer t.rollback()
		err = use(ctx, t)
		if err == nil {
			err = t.commit()
		}
	}
	if err != nil && ctx.Err() != nil && !isDecision(err) {
		// database/sql rolls back at the time-out, and statements then fail for another reason.
		return fmt.Errorf("%w: %v", ctx.Err(), err)
	}
	return err
}

// isDecision reports whether an error is a decision on the delivery, whatever the database does.
func isDecision(err error) bool {
	var refused *RefusedError
	var busy *BusyError
	return errors.Is(err, errNotRecorded) || errors.As(err, &refused) || errors.As(err, &busy)
}

func (r *Receiver) respond(ctx context.Context, verified *Verified) Response {
	if err := r.Start(ctx); err != nil {
		return r.failed(err, verified.MessageID)
	}
	response := r.receiveMessages(ctx, verified.Messages)
	if response.Status < http.StatusInternalServerError && r.isTimeToExpire(len(verified.Messages)) {
		r.expire(ctx)
	}
	return response
}

// receiveMessages processes messages in one transaction, or else each in a transaction of its own.
func (r *Receiver) receiveMessages(ctx context.Context, messages []Message) Response {
	if canShareTransaction(messages) {
		// An error is not logged: the failing delivery is found by processing each one alone.
		if results, err := r.process(ctx, messages, r.options.Gaps == GapsReport); err == nil {
			return r.committed(messages, results)
		}
	}
	var results []DeliveryResult
	for n, message := range messages {
		result, err := r.receiveOne(ctx, message)
		if err != nil {
			r.committed(messages, results)
			return partialResponse(messages, n, r.failed(err, message.DeliveryID))
		}
		results = append(results, result)
		if result.Outcome == DeliveryConflict {
			break
		}
	}
	return r.committed(messages, results)
}

// canShareTransaction reports whether a batch may be processed in one transaction.
//
// Not with a replay from another lane: it also locks that lane, and the global lock order (lanes by
// name) holds only if the transaction has no lock yet.
func canShareTransaction(messages []Message) bool {
	for _, message := range messages {
		if message.ReplayOf != nil && message.ReplayOf.Lane != message.Lane {
			return false
		}
	}
	return len(messages) > 1
}

// receiveOne processes a delivery, after the missing ones before it if the policy requires it.
func (r *Receiver) receiveOne(ctx context.Context, message Message) (DeliveryResult, error) {
	alone := []Message{message}
	results, err := r.process(ctx, alone, r.options.Gaps == GapsReport)
	if errors.Is(err, errNotRecorded) {
		if err := r.catchUpBefore(ctx, message); err != nil {
			return DeliveryResult{}, err
		}
		results, err = r.process(ctx, alone, true)
	}
	if err != nil {
		return DeliveryResult{}, err
	}
	return results[0], nil
}

// process records and processes deliveries in one transaction; allowGaps: also when deliveries
// before them are missing.
func (r *Receiver) process(ctx context.Context, messages []Message, allowGaps bool) ([]DeliveryResult, error) {
	results := make([]DeliveryResult, len(messages))
	err := r.inTransaction(ctx, func(ctx context.Context, t transaction) error {
		first := ""
		for i := range messages {
			message := &messages[i]
			result, err := r.inbox.receive(ctx, t, message, allowGaps)
			if err != nil {
				return err
			}
			results[i] = result
			conflicts := result.Outcome == DeliveryConflict
			if result.Outcome == deliveryEarly || conflicts && len(messages) > 1 {
				return errNotRecorded
			}
			if !result.Fresh() {
				continue
			}
			// The first one: a handler of any later one may have rolled it back.
			if first == "" {
				first = message.DeliveryID
			}
			if err := r.callHandlers(ctx, t, *message); err != nil {
				return err
			}
		}
		if first == "" {
			return nil
		}
		return confirm(ctx, t, first)
	})
	if err != nil {
		return nil, err
	}
	return results, nil
}

// confirm returns an error if a statement of the transaction has failed, or a handler has rolled the
// delivery back.
func confirm(ctx context.Context, t transaction, deliveryID string) error {
	found, err := t.confirm(ctx, deliveryID)
	if err == nil && !found {
		return errors.New("receiver: a handler rolled the delivery back; return Refuse or another error")
	}
	return err
}

type transactionKey struct{}

// callHandlers calls the handlers of a delivery, whose context has the transaction for IsNewest.
func (r *Receiver) callHandlers(ctx context.Context, t transaction, message Message) error {
	ctx = context.WithValue(ctx, transactionKey{}, handlerTransaction{r.inbox, t})
	handlers, err := r.matching(message.Type)
	if err != nil {
		return err
	}
	for _, handler := range handlers {
		err := callHandler(ctx, handler, t, message)
		if err == nil {
			continue
		}
		if isNetworkError(err) && !isDecision(err) {
			// The handler's own connection, or that of the database?
			if _, lost := t.confirm(ctx, message.DeliveryID); conditionOf(lost) == databaseUnavailable {
				return lost
			}
		}
		return &handlerError{err}
	}
	return nil
}

// callHandler calls a handler; a panic becomes an error with its stack.
func callHandler(ctx context.Context, handler Handler, t transaction, message Message) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("a handler panicked: %v\n%s", value, debug.Stack())
		}
	}()
	return handler(ctx, t.sqlTx(), message)
}

type handlerTransaction struct {
	inbox inbox
	t     transaction
}

// IsNewest reports whether a delivery is the newest event of a key seen so far, and records it if
// so.
//
// It is for effects that replace a state: applied only if this is true, a late or replayed event
// never overwrites a newer state.  The key identifies the state, such as "customer 7".  The context
// has to be that of a handler; otherwise it returns an error.
func IsNewest(ctx context.Context, key string, m Message) (bool, error) {
	current, found := ctx.Value(transactionKey{}).(handlerTransaction)
	if !found {
		return false, errors.New("receiver: IsNewest needs the context of a handler")
	}
	return current.inbox.isNewest(ctx, current.t, key, m)
}

// committed counts and reports the committed deliveries of a request, and returns its response.  The
// results are of the first messages; the remaining ones were not processed.
func (r *Receiver) committed(messages []Message, results []DeliveryResult) Response {
	response := newResponse(OutcomeDuplicate, http.StatusOK, "processed before")
	for n, result := range results {
		message := messages[n]
		r.reportDelivery(message, result)
		if result.Outcome == DeliveryConflict {
			// Not 409: receivers use it for a duplicate that they already have.
			conflict := newResponse(OutcomeConflict, http.StatusUnprocessableEntity,
				fmt.Sprintf("sequence %d of %s was used by another delivery", message.Sequence, message.Lane))
			return partialResponse(messages, n, conflict)
		}
		if result.Fresh() {
			response = newResponse(OutcomeProcessed, http.StatusOK, "processed")
		}
	}
	return response
}

// failed maps the error of a rolled-back request to its response.
//
// The response does not contain the error, which may name the database; only the reasons of Refuse
// and Busy are for the sender.
func (r *Receiver) failed(err error, messageID string) Response {
	var refused *RefusedError
	if errors.As(err, &refused) {
		return newResponse(OutcomeRefused, http.StatusUnprocessableEntity, refused.Reason)
	}
	var busy *BusyError
	if errors.As(err, &busy) {
		return putOff(busy.Reason, busy.RetryAfter)
	}
	switch conditionOf(err) {
	case databaseUnavailable:
		r.logf("the database is not available: %v", err)
		return putOff("the receiver's database is not available", unavailableRetryAfter)
	case databaseBusy:
		r.logf("the database is busy: %s is postponed: %v", messageID, err)
		return putOff("the receiver's database is busy", busyRetryAfter)
	}
	r.logf("delivery %s was not processed: %v", messageID, err)
	return newResponse(OutcomeFailed, http.StatusInternalServerError, "the receiver failed")
}

// isTimeToExpire counts received deliveries: true for the first ones and then every expireEvery.
func (r *Receiver) isTimeToExpire(received int) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	before := r.received
	r.received += received
	return before == 0 || before/expireEvery < r.received/expireEvery
}

// expire deletes expired rows, a bounded number in each transaction.
func (r *Receiver) expire(ctx context.Context) {
	for step := 0; step < expireStepsMax; step++ {
		expired := 0
		err := r.inTransaction(ctx, func(ctx context.Context, t transaction) (err error) {
			expired, err = r.inbox.expire(ctx, t)
			return err
		})
		if err != nil {
			// The delivery is committed; expired rows are deleted at a later attempt.
			r.logf("expired rows were not deleted: %v", err)
			return
		}
		if expired < expireRows {
			return
		}
	}
}
