package receiver

import (
	"context"
	"database/sql"
	"time"
)

// Store keeps the records of a receiver: [Postgres] or [Memory].
type Store interface {
	// create creates the missing tables.
	create(ctx context.Context) error
	begin(ctx context.Context) (transaction, error)
	settings() inboxSettings
	// expiredBefore is the time before which a received delivery may have expired, RFC 3339.
	expiredBefore(now time.Time) string
}

// inboxSettings are the settings of an inbox that are not of its storage.
type inboxSettings struct {
	// fromStart: the inbox is older than every lane.
	fromStart bool
	// overdueAfter: a missing number is overdue once overtaken by more than this many.
	overdueAfter int64
	retention    time.Duration
}

// storedLane is a row of the inbox's lane table.
type storedLane struct {
	name  string
	state LaneState
	// Deliveries up to this number may have expired.
	forgotten int64
}

// storedDelivery is a row of the inbox's delivery table; one of another sender has no lane.
type storedDelivery struct {
	id       string
	lane     sql.NullString
	sequence sql.NullInt64
}

// latestEvent is a row of the inbox's table of the newest event of each key.
type latestEvent struct {
	key, deliveryID, lane string
	sequence              int64
	publishedAt           string
}

// loggedRequest is a row of the inbox's request table.
type loggedRequest struct {
	deliveryID      string
	lane, eventType *string
	sequence        *int64
	attempt         *int
	outcome         Outcome
	status          int
	reason          string
}

// transaction has the statements of an inbox in one transaction.  Its locks have a global order:
// lanes by name, then the X-Delivery.
type transaction interface {
	// sqlTx is nil in memory.
	sqlTx() *sql.Tx
	// advance is a fast path: the next number of a lane without missing numbers, and a new
	// X-Delivery.  It returns whether each of the two held.
	advance(ctx context.Context, deliveryID, lane string, sequence int64) (moved, claimed bool, err error)
	addLane(ctx context.Context, lane string) error
	// lockLanes locks lanes in the order of their names.
	lockLanes(ctx context.Context, lane, replayed string) (map[string]storedLane, error)
	// claim returns whether this X-Delivery is new; it waits for a concurrent claim.
	claim(ctx context.Context, deliveryID, lane string, sequence int64) (bool, error)
	unclaim(ctx context.Context, deliveryID string) error
	// confirm returns whether this X-Delivery is recorded; it fails in a failed transaction.
	confirm(ctx context.Context, deliveryID string) (bool, error)
	keepLane(ctx context.Context, lane string, state LaneState) error
	lanes(ctx context.Context) (map[string]storedLane, error)
	// latest records an event unless a newer one of its key is recorded, and returns whether it did.
	latest(ctx context.Context, event latestEvent) (bool, error)
	logRequest(ctx context.Context, request loggedRequest) error
	// lockOld selects and locks some expired deliveries.
	lockOld(ctx context.Context, retention time.Duration, rowsMax int) ([]storedDelivery, error)
	// forget records up to which number of a lane deliveries may have expired.
	forget(ctx context.Context, lane string, sequence int64) error
	expire(ctx context.Context, deliveryIDs []string) error
	expireRequests(ctx context.Context, retention time.Duration, rowsMax int) error

	commit() error
	// rollback does nothing after a commit.
	rollback()
}
