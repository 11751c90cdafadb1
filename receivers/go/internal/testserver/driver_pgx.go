//go:build pgx

package main

// With the tag pgx the server uses the other common driver.
import _ "github.com/jackc/pgx/v4/stdlib"

const driverName = "pgx"
