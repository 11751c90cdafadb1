//go:build !pgx

package main

// The driver of the tests.
import _ "github.com/lib/pq"

const driverName = "postgres"
