// Command testserver is a receiver for tests that are written in other languages.
//
// Its settings are environment variables: OUTBOX_SECRET, OUTBOX_LISTEN, DATABASE_URL (absent: the
// memory store), OUTBOX_HEADER_PREFIX, OUTBOX_FORMATS, OUTBOX_FETCH_URL and OUTBOX_FETCH_TOKEN.
package main

import (
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	receiver "github.com/outbox-relay/receiver-go"
)

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	effects, store, err := openEffects()
	if err != nil {
		return err
	}
	options := receiver.Options{HeaderPrefixes: list("OUTBOX_HEADER_PREFIX")}
	for _, format := range list("OUTBOX_FORMATS") {
		options.Formats = append(options.Formats, receiver.Format(format))
	}
	if fetchURL := os.Getenv("OUTBOX_FETCH_URL"); fetchURL != "" {
		client, err := receiver.NewFetchClient(fetchURL, os.Getenv("OUTBOX_FETCH_TOKEN"), receiver.FetchOptions{})
		if err != nil {
			return err
		}
		options.Fetch = client
	}
	hooks, err := receiver.New(list("OUTBOX_SECRET"), store, options)
	if err != nil {
		return err
	}
	hooks.Handle("**", effects.add)

	mux := http.NewServeMux()
	mux.Handle("/", hooks)
	mux.HandleFunc("/processed", func(w http.ResponseWriter, request *http.Request) {
		ids, err := effects.processed(request.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		writeJSON(w, ids)
	})
	mux.HandleFunc("/catch-up", func(w http.ResponseWriter, request *http.Request) {
		results, err := hooks.CatchUp(request.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		processed := 0
		for _, result := range results {
			processed += result.Fetched
		}
		writeJSON(w, map[string]int{"processed": processed})
	})
	return serve(ctx, mux)
}

func serve(ctx context.Context, handler http.Handler) error {
	address := os.Getenv("OUTBOX_LISTEN")
	if address == "" {
		address = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Printf("listening on http://%s/\n", listener.Addr())
	server := &http.Server{Handler: handler, ReadTimeout: 30 * time.Second, IdleTimeout: time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(ctx)
}

func list(variable string) []string {
	if os.Getenv(variable) == "" {
		return nil
	}
	return strings.Split(os.Getenv(variable), ",")
}

// writeJSON writes a response in one write to the connection: a client that reads a response only
// once would otherwise see the first 4 KiB of it.
func writeJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	connection, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer connection.Close()
	head := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"+
		"Connection: close\r\n\r\n", len(body))
	if _, err := connection.Write(append([]byte(head), body...)); err != nil {
		log.Print(err)
	}
}

// effects are the effects of the handler.
type effects interface {
	add(ctx context.Context, tx *sql.Tx, m receiver.Message) error
	processed(ctx context.Context) ([]string, error)
}

func openEffects() (effects, receiver.Store, error) {
	dsn := os.Getenv("DATABASE_URL")
	if dsn == "" {
		store, err := receiver.Memory(receiver.MemoryOptions{})
		return &memoryEffects{}, store, err
	}
	dsn, err := withoutTLS(dsn)
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open(driverName, dsn)
	if err != nil {
		return nil, nil, err
	}
	db.SetMaxOpenConns(20)
	store, err := receiver.Postgres(db, receiver.PostgresOptions{})
	return &tableEffects{db}, store, err
}

// withoutTLS adds sslmode=disable to a URL that has no sslmode: test servers have no certificate.
func withoutTLS(dsn string) (string, error) {
	parsed, err := url.Parse(dsn)
	if err != nil {
		return "", errors.New("DATABASE_URL is not a URL")
	}
	query := parsed.Query()
	if query.Get("sslmode") == "" {
		query.Set("sslmode", "disable")
	}
	parsed.RawQuery = query.Encode()
	return parsed.String(), nil
}

type memoryEffects struct {
	mutex sync.Mutex
	ids   []string
}

func (e *memoryEffects) add(_ context.Context, _ *sql.Tx, m receiver.Message) error {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.ids = append(e.ids, m.EventID)
	return nil
}

func (e *memoryEffects) processed(context.Context) ([]string, error) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return append([]string{}, e.ids...), nil
}

type tableEffects struct{ db *sql.DB }

func (e *tableEffects) add(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
	data := string(m.Data)
	if m.Binary != nil {
		data = base64.StdEncoding.EncodeToString(m.Binary)
	}
	_, err := tx.ExecContext(ctx, "INSERT INTO effect (event_id, type, key, data) VALUES ($1, $2, $3, $4)",
		m.EventID, m.Type, m.Key, data)
	return err
}

func (e *tableEffects) processed(ctx context.Context) ([]string, error) {
	rows, err := e.db.QueryContext(ctx, "SELECT event_id FROM effect ORDER BY id")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	ids := []string{}
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
