package receiver

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
)

// databaseCondition is a condition of the database that may end without a change of the program.
type databaseCondition int

const (
	databaseOther databaseCondition = iota
	// databaseUnavailable: there is no connection, or the server cannot serve it.
	databaseUnavailable
	// databaseBusy: others use the connections or rows, or a time limit was reached.
	databaseBusy
)

// conditionBySQLState has classes and codes of
// https://www.postgresql.org/docs/current/errcodes-appendix.html
var conditionBySQLState = map[string]databaseCondition{
	"08":    databaseUnavailable, // connection exception; all errors of PgBouncer
	"28":    databaseUnavailable, // the login was refused
	"3D":    databaseUnavailable, // no such database, reported at the login
	"53":    databaseUnavailable, // insufficient resources: connections, disk, memory
	"57":    databaseUnavailable, // shutdown, start or crash of the server
	"58":    databaseUnavailable, // system error, such as of a disk
	"57014": databaseBusy,        // query canceled, as by statement_timeout
	"40001": databaseBusy,        // serialization failure
	"40P01": databaseBusy,        // deadlock detected
	"55P03": databaseBusy,        // lock not available, as by lock_timeout
	"25P03": databaseBusy,        // idle in transaction session timeout
	"25P04": databaseBusy,        // transaction timeout
}

// handlerError is an error of a handler.  Its network errors and time-outs are its own: they say
// nothing about the database.
type handlerError struct{ err error }

func (e *handlerError) Error() string { return e.err.Error() }
func (e *handlerError) Unwrap() error { return e.err }

// conditionOf returns the condition of the database that an error reports.
func conditionOf(err error) databaseCondition {
	if code := sqlState(err); len(code) == 5 {
		if condition := conditionBySQLState[code]; condition != databaseOther {
			return condition
		}
		return conditionBySQLState[code[:2]]
	}
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) {
		return databaseUnavailable
	}
	var ofHandler *handlerError
	if errors.As(err, &ofHandler) {
		return databaseOther
	}
	// The time limit of the transaction, also while it waits for a connection of the pool.
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, errMemoryLock) {
		return databaseBusy
	}
	if isNetworkError(err) {
		return databaseUnavailable
	}
	return databaseOther
}

// isNetworkError reports whether a connection could not be made or was lost.
func isNetworkError(err error) bool {
	var ofNetwork net.Error
	return errors.As(err, &ofNetwork) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// sqlState returns the SQLSTATE of an error of pgx or lib/pq; "": it is none of the server.
func sqlState(err error) string {
	// pgconn.PgError, and pq.Error from version 1.10.
	var withState interface{ SQLState() string }
	if errors.As(err, &withState) {
		return withState.SQLState()
	}
	// Older versions of pq.Error.
	var withFields interface{ Get(k byte) string }
	if errors.As(err, &withFields) {
		return withFields.Get('C')
	}
	return ""
}
