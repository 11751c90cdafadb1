// Package receiver receives the deliveries of an outbox relay: it verifies their signatures,
// processes each one once, and detects missing ones.
//
//	store, err := receiver.Postgres(db, receiver.PostgresOptions{})
//	…
//	hooks, err := receiver.New([]string{os.Getenv("OUTBOX_SECRET")}, store, receiver.Options{})
//	…
//	hooks.Handle("order.*", func(ctx context.Context, tx *sql.Tx, m receiver.Message) error {
//		_, err := tx.ExecContext(ctx, "INSERT INTO purchase (id, event) VALUES ($1, $2)", m.Key, m.EventID)
//		return err
//	})
//	http.Handle("/hooks", hooks)
//
// A relay delivers at least once, over HTTP, in lanes whose deliveries have the sequence numbers
// 1, 2, 3 …  For each request a [Receiver]
//
//  1. verifies the signature of the body, and compares the headers with it, or verifies the
//     signature of the headers where a format has one;
//  2. opens a transaction and records the delivery in it: it locks the row of the lane, looks up
//     the sequence number and inserts the X-Delivery;
//  3. calls the handlers of the event type with the same transaction, if the delivery is new;
//  4. commits, and only then responds 2xx.
//
// An error before the commit rolls everything back, and the relay retries.
//
// [Postgres] keeps the records in the database of the effects, in tables that receivers of other
// languages can share; [Memory] keeps them in the process, for effects that are idempotent.
// [Verify] and [PostgresStore.Receive] are the parts for programs that manage requests and
// transactions themselves.
//
// The package has no dependencies.  It works with every driver of database/sql that has
// PostgreSQL's placeholders ($1), such as pgx/stdlib and lib/pq.
package receiver
