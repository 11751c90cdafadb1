package receiver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sort"
	"sync"
	"time"
)

const (
	memoryWindowDefault = 300 * time.Second
	memorySeenMax       = 1_000_000
	memoryLanesMax      = 10_000
	memoryLatestMax     = 1_000_000
	memoryLockWait      = 30 * time.Second
)

// errMemoryLock reports a lock that was not granted in time, for example in a deadlock of handlers
// that call IsNewest for several keys in different orders.
var errMemoryLock = errors.New("receiver: a lock of the memory store was not granted in time")

// MemoryOptions are the options of [Memory]; the zero value has the defaults.
type MemoryOptions struct {
	// Window is how long X-Delivery values are kept.  Default: 300 s.
	Window time.Duration
	// FromStart: the process is older than every lane, so that numbers before the first one received
	// are missing, not unknown.
	FromStart bool
	// OverdueAfter: a missing number is overdue once overtaken by more than this many.  Default: 20.
	OverdueAfter int
}

// MemoryStore keeps the records of a receiver in the process, for a limited time.
type MemoryStore struct {
	window  time.Duration
	options inboxSettings
	clock   func() time.Time

	mutex     sync.Mutex
	seen      *orderedMap[string, seenDelivery]
	laneRows  *orderedMap[string, LaneState]
	forgotten map[string]int64
	latest    *orderedMap[string, latestRow]
	locks     map[memoryLock]*memoryTransaction
}

type memoryLock struct{ kind, name string }

type seenDelivery struct {
	at       time.Time
	lane     string
	sequence int64
}

type latestRow struct {
	latestEvent
	againAt string
}

// Memory returns a store in memory, for effects that are idempotent, such as invalidating a cache.
//
// Handlers get a nil *sql.Tx.  A restart forgets everything, and effects elsewhere are not in a
// transaction with the record: after a crash an event may be processed again.  Changes are visible
// to others after the commit; lanes and X-Delivery values are locked, so that concurrent copies wait
// for each other.  It returns an error if an option is out of range.
func Memory(options MemoryOptions) (*MemoryStore, error) {
	if options.Window == 0 {
		options.Window = memoryWindowDefault
	}
	if options.Window < 0 {
		return nil, fmt.Errorf("receiver: window: must not be negative, as %s", options.Window)
	}
	settings, err := newInboxSettings(options.FromStart, options.OverdueAfter)
	if err != nil {
		return nil, err
	}
	return &MemoryStore{
		window: options.Window, options: settings, clock: time.Now,
		seen:      newOrderedMap[string, seenDelivery](),
		laneRows:  newOrderedMap[string, LaneState](),
		forgotten: map[string]int64{},
		latest:    newOrderedMap[string, latestRow](),
		locks:     map[memoryLock]*memoryTransaction{},
	}, nil
}

func (s *MemoryStore) create(context.Context) error { return nil }
func (s *MemoryStore) settings() inboxSettings      { return s.options }

// expiredBefore is after every time: the window is short, so the numbers that a lane has forgotten
// decide.
func (s *MemoryStore) expiredBefore(time.Time) string { return "9999" }

func (s *MemoryStore) begin(context.Context) (transaction, error) {
	return &memoryTransaction{
		store: s, released: make(chan struct{}), locked: map[memoryLock]bool{},
		seen: map[string]seenDelivery{}, laneRows: map[string]LaneState{}, latestRows: map[string]latestRow{},
	}, nil
}

// memoryTransaction has private changes and two-phase locking.
type memoryTransaction struct {
	store      *MemoryStore
	released   chan struct{}
	ended      bool
	locked     map[memoryLock]bool
	seen       map[string]seenDelivery
	laneRows   map[string]LaneState
	latestRows map[string]latestRow
}

func (t *memoryTransaction) sqlTx() *sql.Tx { return nil }

// lock locks rows in the order of their names, and waits for other transactions.
func (t *memoryTransaction) lock(ctx context.Context, kind string, names ...string) error {
	sort.Strings(names)
	timeout := time.NewTimer(memoryLockWait)
	defer timeout.Stop()
	for {
		holder := t.tryLock(kind, names)
		if holder == nil {
			return nil
		}
		select {
		case <-holder.released:
		case <-ctx.Done():
			return ctx.Err()
		case <-timeout.C:
			return errMemoryLock
		}
	}
}

func (t *memoryTransaction) tryLock(kind string, names []string) *memoryTransaction {
	t.store.mutex.Lock()
	defer t.store.mutex.Unlock()
	for _, name := range names {
		lock := memoryLock{kind, name}
		if holder := t.store.locks[lock]; holder != nil && holder != t {
			return holder
		}
		t.store.locks[lock] = t
		t.locked[lock] = true
	}
	return nil
}

func (t *memoryTransaction) commit() error {
	t.end(true)
	return nil
}

func (t *memoryTransaction) rollback() { t.end(false) }

func (t *memoryTransaction) end(commits bool) {
	s := t.store
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if t.ended {
		return
	}
	t.ended = true
	for lock := range t.locked {
		delete(s.locks, lock)
	}
	if commits {
		for id, each := range t.seen {
			s.seen.set(id, each)
		}
		for lane, state := range t.laneRows {
			s.laneRows.set(lane, state)
		}
		for key, each := range t.latestRows {
			s.latest.set(key, each)
		}
		s.forget()
	}
	// A waiting transaction continues once the mutex is free, after the commit.
	close(t.released)
}

// forget removes what is older than the window or exceeds the memory limits.
func (s *MemoryStore) forget() {
	oldest := s.clock().Add(-s.window)
	for {
		id, first, found := s.seen.first()
		if !found || s.seen.len() <= memorySeenMax && first.at.After(oldest) {
			break
		}
		s.seen.remove(id)
		if _, known := s.laneRows.get(first.lane); known {
			s.forgotten[first.lane] = max(first.sequence, s.forgotten[first.lane])
		}
	}
	for s.laneRows.len() > memoryLanesMax {
		lane, _, _ := s.laneRows.first()
		s.laneRows.remove(lane)
		delete(s.forgotten, lane)
	}
	for s.latest.len() > memoryLatestMax {
		key, _, _ := s.latest.first()
		s.latest.remove(key)
	}
}

// advance is never taken: in memory it saves no round trip.
func (t *memoryTransaction) advance(context.Context, string, string, int64) (bool, bool, error) {
	return false, false, nil
}

// addLane does nothing, because lockLanes creates a lane.
func (t *memoryTransaction) addLane(context.Context, string) error { return nil }

func (t *memoryTransaction) lockLanes(ctx context.Context, lane, replayed string) (map[string]storedLane, error) {
	if err := t.lock(ctx, "lane", lane, replayed); err != nil {
		return nil, err
	}
	t.store.mutex.Lock()
	defer t.store.mutex.Unlock()
	lanes := map[string]storedLane{}
	for _, name := range []string{lane, replayed} {
		state, found := t.laneRows[name]
		if !found {
			state, found = t.store.laneRows.get(name)
		}
		// A delivery creates its own lane, not the one that it replays.
		if found || name == lane {
			lanes[name] = storedLane{name: name, state: state, forgotten: t.store.forgotten[name]}
		}
	}
	return lanes, nil
}

func (t *memoryTransaction) lanes(context.Context) (map[string]storedLane, error) {
	t.store.mutex.Lock()
	defer t.store.mutex.Unlock()
	lanes := map[string]storedLane{}
	t.store.laneRows.each(func(name string, state LaneState) {
		lanes[name] = storedLane{name: name, state: state, forgotten: t.store.forgotten[name]}
	})
	for name, state := range t.laneRows {
		lanes[name] = storedLane{name: name, state: state, forgotten: t.store.forgotten[name]}
	}
	return lanes, nil
}

func (t *memoryTransaction) keepLane(_ context.Context, lane string, state LaneState) error {
	t.laneRows[lane] = state
	return nil
}

func (t *memoryTransaction) claim(ctx context.Context, deliveryID, lane string, sequence int64) (bool, error) {
	if err := t.lock(ctx, "delivery", deliveryID); err != nil {
		return false, err
	}
	t.store.mutex.Lock()
	defer t.store.mutex.Unlock()
	now := t.store.clock()
	known, found := t.seen[deliveryID]
	if !found {
		known, found = t.store.seen.get(deliveryID)
	}
	if found && known.at.After(now.Add(-t.store.window)) {
		return false, nil
	}
	t.seen[deliveryID] = seenDelivery{at: now, lane: lane, sequence: sequence}
	return true, nil
}

func (t *memoryTransaction) unclaim(_ context.Context, deliveryID string) error {
	delete(t.seen, deliveryID)
	return nil
}

func (t *memoryTransaction) confirm(_ context.Context, deliveryID string) (bool, error) {
	_, found := t.seen[deliveryID]
	return found, nil
}

func (t *memoryTransaction) latest(ctx context.Context, event latestEvent) (bool, error) {
	if err := t.lock(ctx, "key", event.key); err != nil {
		return false, err
	}
	t.store.mutex.Lock()
	defer t.store.mutex.Unlock()
	known, found := t.latestRows[event.key]
	if !found {
		known, found = t.store.latest.get(event.key)
	}
	if found && known.deliveryID == event.deliveryID {
		return true, nil
	}
	changed := latestRow{latestEvent: event}
	if found {
		var isNewer bool
		switch event.lane {
		case "":
			isNewer = known.publishedAt < event.publishedAt && known.againAt < event.publishedAt
			changed = known
			changed.deliveryID, changed.againAt = event.deliveryID, event.publishedAt
		case known.lane:
			isNewer = known.sequence < event.sequence && known.againAt <= event.publishedAt
		default:
			isNewer = known.publishedAt <= event.publishedAt && known.againAt <= event.publishedAt
		}
		if !isNewer {
			return false, nil
		}
	}
	t.latestRows[event.key] = changed
	return true, nil
}

// Memory has no log of requests, and a commit expires deliveries.
func (t *memoryTransaction) logRequest(context.Context, loggedRequest) error { return nil }
func (t *memoryTransaction) lockOld(context.Context, time.Duration, int) ([]storedDelivery, error) {
	return nil, nil
}
func (t *memoryTransaction) forget(context.Context, string, int64) error              { return nil }
func (t *memoryTransaction) expire(context.Context, []string) error                   { return nil }
func (t *memoryTransaction) expireRequests(context.Context, time.Duration, int) error { return nil }
