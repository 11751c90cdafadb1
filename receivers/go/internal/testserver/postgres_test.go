package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	receiver "github.com/outbox-relay/receiver-go"
)

// Tests of the store in PostgreSQL.  DATABASE_URL names a database whose tables they may drop.

var key = []byte("testing only, not a secret")

type request struct {
	sequence, previous int64
	replayOf           map[string]any
	timestamp          string
}

func (r request) signed() receiver.Request {
	id := fmt.Sprintf("0d9ff25f-6f0b-8e0d-9d4b-%012d", r.sequence)
	content := map[string]any{
		"id": fmt.Sprint("event-", r.sequence), "type": "order.paid", "timestamp": r.timestamp,
		"lane": "a-1-0", "sequence": r.sequence, "previous_sequence": r.previous, "data": r.sequence,
	}
	if r.timestamp == "" {
		content["timestamp"] = time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")
	}
	if r.replayOf != nil {
		content["replay_of"] = r.replayOf
	}
	body, err := json.Marshal(content)
	if err != nil {
		panic(err)
	}
	at := strconv.FormatInt(time.Now().Unix(), 10)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(id + "." + at + "."))
	mac.Write(body)
	header := http.Header{}
	for name, value := range map[string]string{
		"webhook-id": id, "webhook-timestamp": at, "X-Delivery": id, "X-Lane": "a-1-0",
		"webhook-signature": "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)),
		"X-Sequence":        fmt.Sprint(r.sequence), "X-Previous-Sequence": fmt.Sprint(r.previous),
		"X-Event": "order.paid", "X-Event-Id": fmt.Sprint("event-", r.sequence),
	} {
		header.Set(name, value)
	}
	return receiver.Request{Method: http.MethodPost, Header: header, Body: body}
}

func number(sequence int64) receiver.Request {
	return request{sequence: sequence, previous: sequence - 1}.signed()
}

type fixture struct {
	*testing.T
	db      *sql.DB
	hooks   *receiver.Receiver
	handler receiver.Handler
	log     *bytes.Buffer
}

func connect(t *testing.T) *sql.DB {
	t.Helper()
	dsn := os.Getenv("DATABASE_URL")
	if dsn == "" {
		t.Skip("DATABASE_URL is not set")
	}
	dsn, err := withoutTLS(dsn)
	if err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open(driverName, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func open(t *testing.T, store receiver.PostgresOptions, options receiver.Options) *fixture {
	t.Helper()
	f := &fixture{T: t, db: connect(t), log: &bytes.Buffer{}}
	f.exec(`DROP TABLE IF EXISTS effect, outbox_inbox, outbox_lane, outbox_latest, outbox_request`)
	f.exec(`DROP SCHEMA IF EXISTS hooks CASCADE`)
	f.exec(`CREATE TABLE effect (event_id text)`)
	f.handler = f.insert
	f.create(store, options)
	return f
}

func (f *fixture) create(storeOptions receiver.PostgresOptions, options receiver.Options) {
	f.Helper()
	store, err := receiver.Postgres(f.db, storeOptions)
	if err != nil {
		f.Fatal(err)
	}
	options.Logger = log.New(f.log, "", 0)
	f.hooks, err = receiver.New([]string{"whsec_" + base64.StdEncoding.EncodeToString(key)}, store, options)
	if err != nil {
		f.Fatal(err)
	}
	f.hooks.Handle("**", func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
		return f.handler(ctx, tx, m)
	})
}

func (f *fixture) insert(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO effect VALUES ($1)", m.EventID)
	return err
}

func (f *fixture) exec(statement string) {
	f.Helper()
	if _, err := f.db.Exec(statement); err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) query(statement string) string {
	f.Helper()
	var text string
	if err := f.db.QueryRow(statement).Scan(&text); err != nil {
		f.Fatal(err)
	}
	return text
}

func (f *fixture) effects() string {
	f.Helper()
	return f.query("SELECT coalesce(string_agg(event_id, ' ' ORDER BY event_id), '') FROM effect")
}

func (f *fixture) process(r receiver.Request, status int) receiver.Response {
	f.Helper()
	response := f.hooks.Process(context.Background(), r)
	if response.Status != status {
		f.Errorf("%d %s, not %d: %s", response.Status, response.Text, status, f.log)
	}
	return response
}

func TestEffectsAreCommittedWithTheRecord(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{LogRequests: true})
	f.process(number(1), 200)
	f.process(number(1), 200)
	f.process(number(4), 200)
	f.process(request{sequence: 6, previous: 4}.signed(), 200)
	f.process(number(3), 200)
	if got := f.effects(); got != "event-1 event-3 event-4 event-6" {
		t.Error(got)
	}
	state := f.query("SELECT concat(high, missing, holes, unknown, ended) FROM outbox_lane")
	if state != "6[[2, 2]][[5, 5]][]f" {
		t.Error(state)
	}
	outcomes := f.query("SELECT string_agg(outcome, ' ' ORDER BY id) FROM outbox_request")
	if outcomes != "processed duplicate processed processed processed" {
		t.Error(outcomes)
	}
}

func TestNothingIsCommittedUnlessTheHandlerSucceeds(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{})
	fails := func(use func(ctx context.Context, tx *sql.Tx) error) receiver.Handler {
		return func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
			if err := f.insert(ctx, tx, m); err != nil {
				return err
			}
			return use(ctx, tx)
		}
	}
	exec := func(statements ...string) func(context.Context, *sql.Tx) error {
		return func(ctx context.Context, tx *sql.Tx) (err error) {
			for _, each := range statements {
				_, err = tx.ExecContext(ctx, each)
			}
			return err
		}
	}
	for name, each := range map[string]struct {
		use    func(ctx context.Context, tx *sql.Tx) error
		status int
	}{
		"error":           {func(context.Context, *sql.Tx) error { return errors.New("no") }, 500},
		"panic":           {func(context.Context, *sql.Tx) error { panic("no") }, 500},
		"refused":         {func(context.Context, *sql.Tx) error { return receiver.Refuse("no") }, 422},
		"busy":            {func(context.Context, *sql.Tx) error { return receiver.Busy("no", time.Second) }, 503},
		"error ignored":   {func(ctx context.Context, tx *sql.Tx) error { _ = exec("SELECT 1/0")(ctx, tx); return nil }, 500},
		"rolled back":     {func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }, 500},
		"rolled back, 2":  {exec("ROLLBACK", "BEGIN"), 500},
		"serialization":   {exec("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"), 503},
		"connection lost": {exec("SELECT pg_terminate_backend(pg_backend_pid())"), 503},
		"missing table":   {exec("SELECT * FROM missing"), 500},
	} {
		f.handler = fails(each.use)
		response := f.process(number(1), each.status)
		if f.effects() != "" || strings.Contains(response.Text, "missing") {
			t.Errorf("%s: %s, %q", name, f.effects(), response.Text)
		}
		if f.query("SELECT count(*) FROM outbox_inbox") != "0" {
			t.Errorf("%s: recorded", name)
		}
	}
	f.handler = f.insert
	f.process(number(1), 200)
	if f.effects() != "event-1" {
		t.Error(f.effects())
	}
}

func TestATimeLimitEndsTheTransaction(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{TransactionTimeout: 300 * time.Millisecond})
	f.handler = func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
		_, err := tx.ExecContext(ctx, "SELECT pg_sleep(30)")
		return err
	}
	response := f.process(number(1), 503)
	if response.Header.Get("Retry-After") != "1" {
		t.Error(response)
	}
}

func TestAnUnreachableDatabase(t *testing.T) {
	db, err := sql.Open(driverName, "postgresql://postgres@127.0.0.1:1/x?sslmode=disable&connect_timeout=2")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	f := &fixture{T: t, db: db, log: &bytes.Buffer{}}
	f.create(receiver.PostgresOptions{}, receiver.Options{})
	response := f.process(number(1), 503)
	if response.Header.Get("Retry-After") != "5" || strings.Contains(response.Text, "127.0.0.1") {
		t.Error(response)
	}
}

func TestARoleThatCannotCreateTables(t *testing.T) {
	f := open(t, receiver.PostgresOptions{Prefix: "hooks.shop"}, receiver.Options{})
	f.exec("CREATE SCHEMA hooks")
	f.process(number(1), 200)
	f.exec(`DROP ROLE IF EXISTS receiver_without_create`)
	f.exec(`CREATE ROLE receiver_without_create`)
	f.exec(`GRANT USAGE ON SCHEMA hooks TO receiver_without_create`)
	f.exec(`GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA hooks TO receiver_without_create`)
	f.exec(`GRANT INSERT ON effect TO receiver_without_create`)
	defer func() {
		f.exec(`DROP OWNED BY receiver_without_create`)
		f.exec(`DROP ROLE receiver_without_create`)
	}()
	f.db.SetMaxOpenConns(1)
	f.exec("SET ROLE receiver_without_create")
	f.create(receiver.PostgresOptions{Prefix: "hooks.shop"}, receiver.Options{})
	f.process(number(2), 200)
	f.create(receiver.PostgresOptions{Prefix: "hooks.other"}, receiver.Options{})
	f.process(number(3), 500)
	f.exec("RESET ROLE")
}

func TestManyReceiversCreateTheTablesAtOnce(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{})
	failures := make(chan error)
	for i := 0; i < 8; i++ {
		go func() {
			store, err := receiver.Postgres(f.db, receiver.PostgresOptions{})
			if err == nil {
				var hooks *receiver.Receiver
				hooks, err = receiver.New([]string{"whsec_" + base64.StdEncoding.EncodeToString(key)}, store, receiver.Options{})
				if err == nil {
					err = hooks.Start(context.Background())
				}
			}
			failures <- err
		}()
	}
	for i := 0; i < 8; i++ {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
}

func TestExpiredDeliveriesAreDeleted(t *testing.T) {
	f := open(t, receiver.PostgresOptions{Retention: time.Hour}, receiver.Options{})
	for sequence := int64(1); sequence <= 3; sequence++ {
		f.process(number(sequence), 200)
	}
	f.exec("UPDATE outbox_inbox SET received_at = received_at - interval '2 hours' WHERE sequence < 3")
	// The first request of a receiver deletes expired rows.
	f.create(receiver.PostgresOptions{Retention: time.Hour}, receiver.Options{})
	f.process(number(4), 200)
	got := f.query("SELECT concat(string_agg(sequence::text, ' ' ORDER BY sequence), ' forgotten ', " +
		"(SELECT forgotten FROM outbox_lane)) FROM outbox_inbox")
	if got != "3 4 forgotten 2" {
		t.Error(got)
	}
	// Its row has expired, but its number was seen.
	old := time.Now().Add(-2 * time.Hour).UTC().Format("2006-01-02T15:04:05.000000Z")
	response := f.process(request{sequence: 1, timestamp: old}.signed(), 200)
	if response.Outcome != receiver.OutcomeDuplicate {
		t.Error(response)
	}
}

func TestIsNewestInPostgreSQL(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{})
	f.handler = func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
		newest, err := receiver.IsNewest(ctx, "customer 7", m)
		if err == nil && newest {
			err = f.insert(ctx, tx, m)
		}
		return err
	}
	for _, sequence := range []int64{1, 3, 2} {
		f.process(number(sequence), 200)
	}
	if got := f.effects(); got != "event-1 event-3" {
		t.Error(got)
	}
}

func TestTransactionsOfTheCaller(t *testing.T) {
	f := open(t, receiver.PostgresOptions{}, receiver.Options{})
	store, err := receiver.Postgres(f.db, receiver.PostgresOptions{})
	if err != nil {
		t.Fatal(err)
	}
	f.exec(store.Schema())
	request := number(1)
	verified, err := receiver.Verify(request.Header, request.Body, "whsec_"+base64.StdEncoding.EncodeToString(key))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []receiver.DeliveryOutcome{receiver.DeliveryFresh, receiver.DeliveryDuplicate} {
		tx, err := f.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		result, err := store.Receive(context.Background(), tx, verified.Messages[0])
		if err != nil || result.Outcome != want {
			t.Error(result, err)
		}
		if err := store.Confirm(context.Background(), tx, verified.Messages[0].DeliveryID); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
	}
}
