package receiver

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// process sends a request to a receiver and compares the status.
func process(t *testing.T, r *Receiver, request Request, status int) Response {
	t.Helper()
	response := r.Process(context.Background(), request)
	if response.Status != status {
		t.Errorf("%d %s, not %d", response.Status, response.Text, status)
	}
	return response
}

func TestEachDeliveryIsProcessedOnce(t *testing.T) {
	r, _ := newTestReceiver(t, Options{})
	var processed []string
	r.Handle("order.*", func(_ context.Context, tx *sql.Tx, m Message) error {
		processed = append(processed, m.EventID)
		if tx != nil {
			t.Error("memory has no transaction of database/sql")
		}
		return nil
	})
	process(t, r, event(1).request(), 200)
	process(t, r, event(2).request(), 200)
	if response := process(t, r, event(1).request(), 200); response.Outcome != OutcomeDuplicate {
		t.Error(response)
	}
	process(t, r, batch(event(2), event(3), event(4)), 200)
	if got := strings.Join(processed, " "); got != "event-1 event-2 event-3 event-4" {
		t.Error(got)
	}
	// Another delivery with a number that was used.
	other := event(2).request()
	for _, name := range []string{idHeader, "X-Delivery"} {
		other.Header.Set(name, deliveryID(99))
	}
	sign(other.Header, other.Body, testTime)
	if response := process(t, r, other, 422); response.Outcome != OutcomeConflict {
		t.Error(response)
	}
	totals := r.Totals()
	if totals.Requests[OutcomeProcessed] != 3 || totals.Requests[OutcomeDuplicate] != 1 {
		t.Errorf("%+v", totals)
	}
}

func newTestStore(t *testing.T) Store {
	store, err := Memory(MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestATypeWithoutAHandlerIsRefusedOrIgnored(t *testing.T) {
	r, _ := newTestReceiver(t, Options{})
	r.Handle("order.payed", func(context.Context, *sql.Tx, Message) error { return nil })
	r.Handle("invoice.*", func(context.Context, *sql.Tx, Message) error { return nil })
	given := event(1)
	response := process(t, r, given.request(), 422)
	want := "no handler for the event type " + given["type"].(string) + "; the receiver has order.payed, invoice.*: add one, " +
		"subscribe the endpoint by --type, or set Unhandled to UnhandledIgnore"
	if response.Text != want {
		t.Error(response.Text)
	}
	// Nothing is recorded: the replay of the dead letter is processed once there is a handler.
	r.Handle("**", func(context.Context, *sql.Tx, Message) error { return nil })
	if response := process(t, r, given.request(), 200); response.Text != "processed" {
		t.Error(response.Text)
	}
	ignoring, _ := newTestReceiver(t, Options{Unhandled: UnhandledIgnore})
	process(t, ignoring, event(1).request(), 200)
	if _, err := New([]string{testKey}, newTestStore(t), Options{Unhandled: 7}); err == nil {
		t.Error("another policy is accepted")
	}
}

func TestSeveralSecretsInOneTextSayWhatIsMeant(t *testing.T) {
	for _, text := range []string{testKey + "," + testKey, testKey + "\n" + testKey} {
		_, err := New([]string{text}, newTestStore(t), Options{})
		if err == nil || !strings.Contains(err.Error(), "strings.Split") || strings.Contains(err.Error(), testKey) {
			t.Error(err)
		}
	}
	if _, err := New(strings.Split(testKey+","+testKey+"\n", ","), newTestStore(t), Options{}); err != nil {
		t.Error(err)
	}
}

func TestErrorsOfHandlersRollBack(t *testing.T) {
	r, written := newTestReceiver(t, Options{})
	var fail func() error
	r.Handle("**", func(context.Context, *sql.Tx, Message) error { return fail() })
	for _, each := range []struct {
		fail       func() error
		status     int
		retryAfter string
		text       string
	}{
		{func() error { return errors.New("detail of db-7") }, 500, "", "the receiver failed"},
		{func() error { panic("detail of db-7") }, 500, "", "the receiver failed"},
		{func() error { return fmt.Errorf("call: %w", &net.OpError{Op: "dial", Err: io.EOF}) }, 500, "", "the receiver failed"},
		{func() error { return fmt.Errorf("wrapped: %w", Refuse("no such\nproduct")) }, 422, "", "no such product"},
		{func() error { return Busy("later", 1500*time.Millisecond) }, 503, "2", "later"},
		{func() error { return fmt.Errorf("db: %w", stateError("40001")) }, 503, "1", "the receiver's database is busy"},
		{func() error { return driver.ErrBadConn }, 503, "5", "the receiver's database is not available"},
		{func() error { return nil }, 200, "", "processed"},
	} {
		fail = each.fail
		response := process(t, r, event(1).request(), each.status)
		if response.Header.Get("Retry-After") != each.retryAfter || response.Text != each.text {
			t.Errorf("%+v", response)
		}
	}
	if !strings.Contains(written.String(), "detail of db-7") {
		t.Error("the log does not have the error")
	}
}

func TestABatchStopsAtTheDeliveryThatFails(t *testing.T) {
	r, _ := newTestReceiver(t, Options{})
	var processed []int64
	r.Handle("**", func(_ context.Context, _ *sql.Tx, m Message) error {
		if m.Sequence == 3 {
			return Refuse("no")
		}
		processed = append(processed, m.Sequence)
		return nil
	})
	response := process(t, r, batch(event(1), event(2), event(3), event(4)), 422)
	if response.Header.Get("X-Accepted-Through") != "2" {
		t.Errorf("%+v", response)
	}
	process(t, r, event(2).request(), 200)
	// 1 and 2 ran twice: in the transaction that was rolled back, and alone.
	if got := fmt.Sprint(processed); got != "[1 2 1 2]" {
		t.Error(got)
	}
}

func TestHTTP(t *testing.T) {
	r, _ := newTestReceiver(t, Options{BodyBytesMax: 2000})
	r.Handle("**", func(context.Context, *sql.Tx, Message) error { return nil })
	server := httptest.NewServer(r)
	defer server.Close()
	send := func(method string, body io.Reader, header http.Header) *http.Response {
		request, err := http.NewRequest(method, server.URL, body)
		if err != nil {
			t.Fatal(err)
		}
		request.Header = header
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { response.Body.Close() })
		return response
	}
	request := event(1).request()
	response := send(http.MethodPost, bytes.NewReader(request.Body), request.Header)
	if response.StatusCode != 200 || readAll(t, response.Body) != "processed\n" {
		t.Error(response)
	}
	if response := send(http.MethodGet, nil, http.Header{}); response.StatusCode != 405 || response.Header.Get("Allow") != "POST" {
		t.Error(response)
	}
	if response := send(http.MethodPost, strings.NewReader(strings.Repeat("x", 2001)), http.Header{}); response.StatusCode != 413 {
		t.Error(response)
	}
	if response := send(http.MethodPost, strings.NewReader("x"), http.Header{}); response.StatusCode != 401 {
		t.Error(response)
	}
	foreign := http.Header{}
	foreign.Set(idHeader, "msg_1")
	sign(foreign, []byte("{}"), testTime.Add(-time.Hour))
	if response := send(http.MethodPost, strings.NewReader("{}"), foreign); response.StatusCode != 503 ||
		response.Header.Get("X-Refused") != "timestamp" {
		t.Error(response)
	}
	sign(foreign, []byte("{}"), testTime)
	if response := send(http.MethodPost, strings.NewReader("{}"), foreign); response.StatusCode != 400 {
		t.Error(response)
	}
}

func TestInFlightMax(t *testing.T) {
	r, _ := newTestReceiver(t, Options{InFlightMax: 1})
	began, release := make(chan struct{}), make(chan struct{})
	r.Handle("**", func(context.Context, *sql.Tx, Message) error {
		close(began)
		<-release
		return nil
	})
	done := make(chan Response)
	go func() { done <- r.Process(context.Background(), event(1).request()) }()
	select {
	case <-began:
	case response := <-done:
		t.Fatalf("%+v", response)
	}
	response := process(t, r, event(1).request(), 503)
	if response.Header.Get("Retry-After") != "1" || response.Text != "1 requests are being processed" {
		t.Errorf("%+v", response)
	}
	close(release)
	if response := <-done; response.Status != 200 {
		t.Errorf("%+v", response)
	}
}

func TestCopiesAtOnceAreProcessedOnce(t *testing.T) {
	r, _ := newTestReceiver(t, Options{})
	var mutex sync.Mutex
	count := 0
	r.Handle("**", func(context.Context, *sql.Tx, Message) error {
		mutex.Lock()
		defer mutex.Unlock()
		count++
		return nil
	})
	var group sync.WaitGroup
	for i := 0; i < 20; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			if response := r.Process(context.Background(), event(1).request()); response.Status != 200 {
				t.Errorf("%+v", response)
			}
		}()
	}
	group.Wait()
	if count != 1 {
		t.Errorf("processed %d times", count)
	}
}

func TestATimeLimitPostponesTheDelivery(t *testing.T) {
	r, _ := newTestReceiver(t, Options{TransactionTimeout: 20 * time.Millisecond})
	r.Handle("**", func(ctx context.Context, _ *sql.Tx, _ Message) error {
		<-ctx.Done()
		return ctx.Err()
	})
	process(t, r, event(1).request(), 503)
}

func TestGapsAreReported(t *testing.T) {
	r, written := newTestReceiver(t, Options{})
	r.Handle("**", func(context.Context, *sql.Tx, Message) error { return nil })
	process(t, r, event(1).request(), 200)
	process(t, r, event(3).request(), 200)
	if !strings.Contains(written.String(), "sequence 3 arrived before 2") || r.Totals().Gaps != 1 {
		t.Error(written, r.Totals())
	}
	var result DeliveryResult
	r.options.OnDelivery = func(_ Message, each DeliveryResult) { result = each; panic("ignored") }
	process(t, r, event(2).request(), 200)
	if !result.Fresh() || result.Observation.Was != StateMissing {
		t.Errorf("%+v", result)
	}
}

func TestIsNewest(t *testing.T) {
	r, _ := newTestReceiver(t, Options{})
	var newest []bool
	r.Handle("**", func(ctx context.Context, _ *sql.Tx, m Message) error {
		isNewest, err := IsNewest(ctx, "customer 7", m)
		newest = append(newest, isNewest)
		return err
	})
	for _, sequence := range []int64{1, 3, 2} {
		process(t, r, event(sequence).request(), 200)
	}
	if got := fmt.Sprint(newest); got != "[true true false]" {
		t.Error(got)
	}
	if _, err := IsNewest(context.Background(), "x", Message{}); err == nil {
		t.Error("without a handler's context")
	}
}

func TestInvalidArguments(t *testing.T) {
	store, err := Memory(MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, options := range map[string]Options{
		"prefix": {HeaderPrefixes: []string{"webhook-"}}, "format": {Formats: []Format{"xml"}},
		"limit": {InFlightMax: -1}, "gaps": {Gaps: GapsCatchUp},
	} {
		if _, err := New([]string{testKey}, store, options); err == nil {
			t.Errorf("%s is no error", name)
		}
	}
	if _, err := Postgres(&sql.DB{}, PostgresOptions{Prefix: "a;b"}); err == nil {
		t.Error("prefix of tables")
	}
	if _, err := Postgres(&sql.DB{}, PostgresOptions{Retention: time.Second}); err == nil {
		t.Error("retention")
	}
}

type stateError string

func (e stateError) Error() string    { return "state " + string(e) }
func (e stateError) SQLState() string { return string(e) }

type fieldsError string

func (e fieldsError) Error() string     { return "state " + string(e) }
func (e fieldsError) Get(k byte) string { return map[byte]string{'C': string(e)}[k] }

func TestConditions(t *testing.T) {
	for err, want := range map[error]databaseCondition{
		stateError("40P01"): databaseBusy, stateError("40001"): databaseBusy, stateError("55P03"): databaseBusy,
		stateError("57014"): databaseBusy, stateError("57P01"): databaseUnavailable,
		stateError("28P01"): databaseUnavailable, stateError("53300"): databaseUnavailable,
		stateError("42P01"): databaseOther, stateError("23505"): databaseOther, fieldsError("08006"): databaseUnavailable,
		driver.ErrBadConn: databaseUnavailable, io.EOF: databaseUnavailable,
		&net.OpError{Op: "dial", Err: io.EOF}: databaseUnavailable,
		context.DeadlineExceeded:              databaseBusy, sql.ErrTxDone: databaseOther,
		&handlerError{io.EOF}: databaseOther, &handlerError{stateError("40001")}: databaseBusy,
		&handlerError{context.DeadlineExceeded}: databaseOther,
	} {
		if got := conditionOf(fmt.Errorf("wrapped: %w", err)); got != want {
			t.Errorf("%v: %d, not %d", err, got, want)
		}
	}
}
