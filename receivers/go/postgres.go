package receiver

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Limits and default of the retention of X-Delivery values.
const (
	retentionDefault = 7 * 24 * time.Hour
	retentionMin     = time.Minute
	retentionMax     = 3650 * 24 * time.Hour
)

// PostgresOptions are the options of [Postgres]; the zero value has the defaults.
type PostgresOptions struct {
	// Prefix begins the names of the tables, optionally with a schema ("hooks.outbox").  Receivers
	// of different senders need different prefixes.  Default: "outbox".
	Prefix string
	// Retention is how long X-Delivery values are kept: a minute to ten years.  Default: 7 days.
	Retention time.Duration
	// FromStart: the inbox is older than every lane, so that numbers before the first one received
	// are missing, not unknown.
	FromStart bool
	// OverdueAfter: a missing number is overdue once overtaken by more than this many.  Default: 20.
	OverdueAfter int
	// TxOptions are the options of the transactions, such as the isolation level.
	TxOptions *sql.TxOptions
}

// PostgresStore keeps the records of a receiver in the database of its effects.
type PostgresStore struct {
	db        *sql.DB
	sql       *statements
	txOptions *sql.TxOptions
	options   inboxSettings
}

// Postgres returns a store in a PostgreSQL database, with any driver that has the placeholders $1,
// $2 and so on, such as pgx/stdlib or lib/pq.
//
// A delivery and the effects of its handlers are committed together.  The first request creates the
// tables that are missing; a role without the right to create tables can use existing ones, see
// [PostgresStore.Schema].  It returns an error if an option is out of range.
func Postgres(db *sql.DB, options PostgresOptions) (*PostgresStore, error) {
	if db == nil {
		return nil, errors.New("receiver: the database is nil")
	}
	if options.Prefix == "" {
		options.Prefix = DefaultPrefix
	}
	if options.Retention == 0 {
		options.Retention = retentionDefault
	}
	if options.Retention < retentionMin || options.Retention > retentionMax {
		return nil, fmt.Errorf("receiver: retention: must be between a minute and ten years, not %s", options.Retention)
	}
	settings, err := newInboxSettings(options.FromStart, options.OverdueAfter)
	if err != nil {
		return nil, err
	}
	settings.retention = options.Retention
	named, err := newStatements(options.Prefix)
	if err != nil {
		return nil, err
	}
	return &PostgresStore{db: db, sql: named, txOptions: options.TxOptions, options: settings}, nil
}

func newInboxSettings(fromStart bool, overdueAfter int) (inboxSettings, error) {
	if overdueAfter < 0 {
		return inboxSettings{}, fmt.Errorf("receiver: overdue after: must not be negative, as %d", overdueAfter)
	}
	if overdueAfter == 0 {
		overdueAfter = overdueAfterDefault
	}
	return inboxSettings{fromStart: fromStart, overdueAfter: int64(overdueAfter)}, nil
}

// Schema returns the DDL of the tables, for an application's own migrations.
func (s *PostgresStore) Schema() string { return strings.TrimSpace(s.sql.schema) + "\n" }

// Receive records a delivery in a transaction of the caller, which manages requests and
// transactions itself.  Process the message if the result is fresh, call [PostgresStore.Confirm],
// and commit.  The tables have to exist.
func (s *PostgresStore) Receive(ctx context.Context, tx *sql.Tx, m Message) (DeliveryResult, error) {
	return newInbox(s).receive(ctx, s.join(tx), &m, true)
}

// Confirm returns an error if a statement of the transaction has failed, or if it does not have the
// delivery any more.  Call it last, before the commit: some drivers report a successful commit
// although PostgreSQL has rolled back.
func (s *PostgresStore) Confirm(ctx context.Context, tx *sql.Tx, deliveryID string) error {
	return confirm(ctx, s.join(tx), deliveryID)
}

// IsNewest is [IsNewest] in a transaction of the caller.
func (s *PostgresStore) IsNewest(ctx context.Context, tx *sql.Tx, key string, m Message) (bool, error) {
	return newInbox(s).isNewest(ctx, s.join(tx), key, m)
}

func (s *PostgresStore) join(tx *sql.Tx) *postgresTransaction {
	return &postgresTransaction{tx: tx, sql: s.sql}
}

func (s *PostgresStore) settings() inboxSettings { return s.options }

func (s *PostgresStore) expiredBefore(now time.Time) string {
	return now.Add(-s.options.retention).UTC().Format(timestampLayout)
}

func (s *PostgresStore) create(ctx context.Context) error {
	var isThere bool
	if err := s.db.QueryRowContext(ctx, s.sql.isThere).Scan(&isThere); err != nil || isThere {
		return err
	}
	// In a transaction, so that the lock time-out is local to it.
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, s.sql.create); err != nil {
		return err
	}
	return tx.Commit()
}

func (s *PostgresStore) begin(ctx context.Context) (transaction, error) {
	tx, err := s.db.BeginTx(ctx, s.txOptions)
	if err != nil {
		return nil, err
	}
	return s.join(tx), nil
}

// postgresTransaction implements transaction; its documentation is there.
type postgresTransaction struct {
	tx  *sql.Tx
	sql *statements
}

func (t *postgresTransaction) sqlTx() *sql.Tx { return t.tx }
func (t *postgresTransaction) commit() error  { return t.tx.Commit() }

func (t *postgresTransaction) rollback() {
	// Its error is that the transaction has ended, or that the connection is lost.
	_ = t.tx.Rollback()
}

func (t *postgresTransaction) advance(ctx context.Context, deliveryID, lane string, sequence int64) (moved, claimed bool, err error) {
	err = t.tx.QueryRowContext(ctx, t.sql.advance, sequence, lane, deliveryID).Scan(&moved, &claimed)
	return moved, claimed, err
}

func (t *postgresTransaction) exec(ctx context.Context, statement string, parameters ...any) error {
	_, err := t.tx.ExecContext(ctx, statement, parameters...)
	return err
}

// returnsRow reports whether a statement returns a row.
func (t *postgresTransaction) returnsRow(ctx context.Context, statement string, parameters ...any) (bool, error) {
	var one int
	err := t.tx.QueryRowContext(ctx, statement, parameters...).Scan(&one)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (t *postgresTransaction) addLane(ctx context.Context, lane string) error {
	return t.exec(ctx, t.sql.addLane, lane)
}

func (t *postgresTransaction) lockLanes(ctx context.Context, lane, replayed string) (map[string]storedLane, error) {
	return t.queryLanes(ctx, t.sql.lockLanes, lane, replayed)
}

func (t *postgresTransaction) lanes(ctx context.Context) (map[string]storedLane, error) {
	return t.queryLanes(ctx, t.sql.lanes)
}

func (t *postgresTransaction) queryLanes(ctx context.Context, statement string, parameters ...any) (map[string]storedLane, error) {
	rows, err := t.tx.QueryContext(ctx, statement, parameters...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	lanes := map[string]storedLane{}
	for rows.Next() {
		var lane storedLane
		var texts [3]string
		err := rows.Scan(&lane.name, &lane.state.High, &lane.state.Ended, &texts[0], &texts[1], &texts[2],
			&lane.forgotten)
		if err != nil {
			return nil, err
		}
		for i, ranges := range []*[]Range{&lane.state.Missing, &lane.state.Holes, &lane.state.Unknown} {
			if err := json.Unmarshal([]byte(texts[i]), ranges); err != nil {
				return nil, fmt.Errorf("receiver: the ranges of lane %q: %w", lane.name, err)
			}
		}
		lanes[lane.name] = lane
	}
	return lanes, rows.Err()
}

func (t *postgresTransaction) claim(ctx context.Context, deliveryID, lane string, sequence int64) (bool, error) {
	return t.returnsRow(ctx, t.sql.claim, deliveryID, lane, sequence)
}

func (t *postgresTransaction) unclaim(ctx context.Context, deliveryID string) error {
	return t.exec(ctx, t.sql.unclaim, deliveryID)
}

func (t *postgresTransaction) confirm(ctx context.Context, deliveryID string) (bool, error) {
	return t.returnsRow(ctx, t.sql.confirm, deliveryID)
}

func (t *postgresTransaction) keepLane(ctx context.Context, lane string, state LaneState) error {
	parameters := []any{lane, state.High, state.Ended}
	for _, ranges := range [][]Range{state.Missing, state.Holes, state.Unknown} {
		text, err := json.Marshal(ranges)
		if err != nil {
			return fmt.Errorf("receiver: the ranges of lane %q: %w", lane, err)
		}
		parameters = append(parameters, string(text))
	}
	return t.exec(ctx, t.sql.keepLane, parameters...)
}

func (t *postgresTransaction) latest(ctx context.Context, e latestEvent) (bool, error) {
	return t.returnsRow(ctx, t.sql.latest, e.key, e.deliveryID, e.lane, e.sequence, e.publishedAt)
}

func (t *postgresTransaction) logRequest(ctx context.Context, r loggedRequest) error {
	return t.exec(ctx, t.sql.logRequest, r.deliveryID, r.lane, r.sequence, r.eventType, r.attempt,
		string(r.outcome), r.status, r.reason)
}

func (t *postgresTransaction) lockOld(ctx context.Context, retention time.Duration, rowsMax int) ([]storedDelivery, error) {
	rows, err := t.tx.QueryContext(ctx, t.sql.lockOld, retention.Seconds(), rowsMax)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var old []storedDelivery
	for rows.Next() {
		var each storedDelivery
		if err := rows.Scan(&each.id, &each.lane, &each.sequence); err != nil {
			return nil, err
		}
		old = append(old, each)
	}
	return old, rows.Err()
}

func (t *postgresTransaction) forget(ctx context.Context, lane string, sequence int64) error {
	return t.exec(ctx, t.sql.forget, lane, sequence)
}

func (t *postgresTransaction) expire(ctx context.Context, deliveryIDs []string) error {
	text, err := json.Marshal(deliveryIDs)
	if err != nil {
		return fmt.Errorf("receiver: the deliveries to expire: %w", err)
	}
	return t.exec(ctx, t.sql.expire, string(text))
}

func (t *postgresTransaction) expireRequests(ctx context.Context, retention time.Duration, rowsMax int) error {
	return t.exec(ctx, t.sql.expireRequests, retention.Seconds(), rowsMax)
}
