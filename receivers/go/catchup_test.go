package receiver

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// relay is a relay's listener for receivers, with deliveries of one lane.
type relay struct {
	acknowledged int64
	keptFrom     int64
	deadLettered map[int64]bool
	requests     []string
}

func (r *relay) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.requests = append(r.requests, request.URL.String())
	if request.Header.Get("Authorization") != "Bearer token" {
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"detail": "the token is not valid"}`)
		return
	}
	if len(r.requests) == 1 {
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	if request.URL.Path == "/v1/lanes" {
		fmt.Fprintf(w, `{"items": [{"lane": %q, "acknowledged": %d, "generation": 1}], "next": null}`,
			testLane, r.acknowledged)
		return
	}
	var after int64
	if _, err := fmt.Sscan(request.URL.Query().Get("after"), &after); err != nil {
		after = 3
		w.Write(encode(r.item(4)))
		return
	}
	items := []content{}
	last := min(after+2, r.acknowledged)
	for sequence := max(after+1, r.keptFrom); sequence <= last; sequence++ {
		items = append(items, r.item(sequence))
	}
	page := content{"items": items, "kept_from": r.keptFrom, "acknowledged": r.acknowledged, "next": nil}
	if last < r.acknowledged {
		page["next"] = last
	}
	w.Write(encode(page))
}

func (r *relay) item(sequence int64) content {
	request := event(sequence).request()
	headers := map[string]string{}
	for name := range request.Header {
		headers[name] = request.Header.Get(name)
	}
	item := content{"sequence": sequence, "headers": headers, "body": string(request.Body)}
	if r.deadLettered[sequence] {
		item["dead_lettered"] = "refused"
	}
	return item
}

func fetchFrom(t *testing.T, handler http.Handler, token string) *FetchClient {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client, err := NewFetchClient(server.URL, token, FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestCatchUp(t *testing.T) {
	source := &relay{acknowledged: 9, keptFrom: 4, deadLettered: map[int64]bool{5: true}}
	r, _ := newTestReceiver(t, Options{Fetch: fetchFrom(t, source, "token")})
	var processed []int64
	r.Handle("**", func(_ context.Context, _ *sql.Tx, m Message) error {
		if m.Sequence == 6 {
			return Refuse("never")
		}
		processed = append(processed, m.Sequence)
		return nil
	})
	process(t, r, event(1).request(), 200)
	process(t, r, event(7).request(), 200)
	results, err := r.CatchUp(context.Background())
	if err != nil || len(results) != 1 {
		t.Fatal(results, err)
	}
	got := results[0]
	if got.Fetched != 3 || got.DeadLettered != 1 || got.Acknowledged != 9 ||
		!equalRanges(got.Unavailable, []Range{{2, 3}, {6, 6}}) {
		t.Errorf("%+v", got)
	}
	if got := fmt.Sprint(processed); got != "[1 7 4 8 9]" {
		t.Error(got)
	}
	if results, err := r.CatchUp(context.Background()); err != nil || len(results) != 0 {
		t.Error("again:", results, err)
	}
}

func TestTheEndOfALaneIsRecordedOnce(t *testing.T) {
	source := &relay{acknowledged: 6, keptFrom: 1, deadLettered: map[int64]bool{4: true, 5: true}}
	r, written := newTestReceiver(t, Options{Fetch: fetchFrom(t, source, "token")})
	var processed []int64
	r.Handle("**", func(_ context.Context, _ *sql.Tx, m Message) error {
		if m.Sequence == 6 {
			return Refuse("never")
		}
		processed = append(processed, m.Sequence)
		return nil
	})
	process(t, r, event(1).request(), 200)
	results, err := r.CatchUp(context.Background())
	if err != nil || len(results) != 1 {
		t.Fatal(results, err)
	}
	if got := results[0]; got.Fetched != 2 || got.DeadLettered != 2 || !equalRanges(got.Unavailable, []Range{{6, 6}}) {
		t.Errorf("%+v", got)
	}
	if got := fmt.Sprint(processed); got != "[1 2 3]" {
		t.Error(got)
	}
	if !strings.Contains(written.String(), "caught up with 2 deliveries; dead-lettered: 2; refused or no longer retained: 6") {
		t.Error(written)
	}
	if results, err := r.CatchUp(context.Background()); err != nil || len(results) != 0 {
		t.Error("again:", results, err)
	}
}

func TestALaneThatWasLostAsAWholeIsFetchedFromItsStart(t *testing.T) {
	for _, fromStart := range []bool{false, true} {
		store, err := Memory(MemoryOptions{FromStart: fromStart})
		if err != nil {
			t.Fatal(err)
		}
		source := &relay{acknowledged: 2, keptFrom: 1}
		options := Options{Fetch: fetchFrom(t, source, "token"), Clock: testClock}
		r, err := New([]string{testKey}, store, options)
		if err != nil {
			t.Fatal(err)
		}
		r.Handle("**", func(context.Context, *sql.Tx, Message) error { return nil })
		results, err := r.CatchUp(context.Background())
		if err != nil || (len(results) == 1) != fromStart {
			t.Error(fromStart, results, err)
		}
	}
}

func TestGapsCatchUp(t *testing.T) {
	source := &relay{acknowledged: 4, keptFrom: 1}
	r, _ := newTestReceiver(t, Options{Fetch: fetchFrom(t, source, "token"), Gaps: GapsCatchUp})
	var processed []int64
	r.Handle("**", func(_ context.Context, _ *sql.Tx, m Message) error {
		processed = append(processed, m.Sequence)
		return nil
	})
	process(t, r, event(1).request(), 200)
	process(t, r, event(5).request(), 200)
	// The relay has not recorded 6 yet.
	process(t, r, event(7).request(), 503)
	if got := fmt.Sprint(processed); got != "[1 2 3 4 5]" {
		t.Error(got)
	}
}

func TestFetchPayload(t *testing.T) {
	r, _ := newTestReceiver(t, Options{Fetch: fetchFrom(t, &relay{}, "token"), Formats: []Format{FormatThin}})
	m := Message{DeliveryID: deliveryID(4), Lane: testLane, Sequence: 4}
	found, err := r.FetchPayload(context.Background(), m)
	if err != nil || string(found.Data) != `{"n":4}` {
		t.Error(found, err)
	}
	m.DeliveryID = deliveryID(5)
	var notFetched *FetchError
	if _, err := r.FetchPayload(context.Background(), m); !errors.As(err, &notFetched) {
		t.Error(err)
	}
}

func TestFetchErrors(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("a redirect was followed")
	}))
	defer elsewhere.Close()
	for name, each := range map[string]struct {
		handler http.HandlerFunc
		text    string
	}{
		"redirect": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, 302) }, "302"},
		"no JSON":  {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }, "not from a relay"},
		"no items": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") }, `"items"`},
		"token":    {(&relay{}).ServeHTTP, "401, the token is not valid"},
	} {
		_, err := fetchFrom(t, each.handler, "secrettoken").Lanes(context.Background())
		var notFetched *FetchError
		if !errors.As(err, &notFetched) || !strings.Contains(err.Error(), each.text) ||
			strings.Contains(err.Error(), "secrettoken") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, url := range []string{"", "ftp://127.0.0.1", "127.0.0.1:8081"} {
		if _, err := NewFetchClient(url, "token", FetchOptions{}); err == nil {
			t.Errorf("%q is no error", url)
		}
	}
	if _, err := NewFetchClient("http://127.0.0.1", "a\nsecret", FetchOptions{}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}

func TestRangesInJSON(t *testing.T) {
	text, err := json.Marshal([]Range{{1, 2}})
	if err != nil || string(text) != "[[1,2]]" {
		t.Error(string(text), err)
	}
	var ranges []Range
	if err := json.Unmarshal([]byte("[[1,2,3]]"), &ranges); err == nil {
		t.Error("three numbers are no range")
	}
}
