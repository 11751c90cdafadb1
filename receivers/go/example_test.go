package receiver_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"log"
	"net/http"
	"os"

	receiver "github.com/outbox-relay/receiver-go"
)

// A receiver with PostgreSQL: the order is updated if and only if the delivery is recorded.
func Example() {
	// The program imports a driver, such as github.com/jackc/pgx/v5/stdlib.
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	store, err := receiver.Postgres(db, receiver.PostgresOptions{})
	if err != nil {
		log.Fatal(err)
	}
	hooks, err := receiver.New([]string{os.Getenv("OUTBOX_SECRET")}, store, receiver.Options{})
	if err != nil {
		log.Fatal(err)
	}
	hooks.Handle("order.paid", func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
		var order struct {
			Total float64 `json:"total"`
		}
		if err := json.Unmarshal(m.Data, &order); err != nil {
			return receiver.Refuse("the payload is not an order")
		}
		_, err := tx.ExecContext(ctx, "UPDATE purchase SET paid = $2 WHERE id = $1", m.Key, order.Total)
		return err
	})
	http.Handle("/hooks", hooks)
}

// An effect that replaces a state: a late or replayed event does not overwrite a newer state.
func ExampleIsNewest() {
	var hooks *receiver.Receiver
	hooks.Handle("customer.changed", func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
		newest, err := receiver.IsNewest(ctx, "customer "+*m.Key, m)
		if err != nil || !newest {
			return err
		}
		_, err = tx.ExecContext(ctx, "UPDATE customer SET data = $2 WHERE id = $1", m.Key, string(m.Data))
		return err
	})
}

// A program that manages its requests and transactions itself.
func ExamplePostgresStore_Receive() {
	process := func(ctx context.Context, db *sql.DB, store *receiver.PostgresStore, request *http.Request, body []byte) error {
		verified, err := receiver.Verify(request.Header, body, os.Getenv("OUTBOX_SECRET"))
		if err != nil {
			return err
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		for _, m := range verified.Messages {
			result, err := store.Receive(ctx, tx, m)
			if err != nil {
				return err
			}
			if result.Fresh() {
				// … the effects, and then:
				if err := store.Confirm(ctx, tx, m.DeliveryID); err != nil {
					return err
				}
			}
		}
		return tx.Commit()
	}
	_ = process
}
