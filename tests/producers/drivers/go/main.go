// Command publish publishes with lib/pq: it reads {"dsn", "statements"} from stdin.
package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/lib/pq"
)

type statement struct {
	Name, Text string
	Arguments  []any
}

func main() {
	var given struct {
		DSN        string
		Statements []statement
	}
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("postgres", given.DSN)
	if err != nil {
		log.Fatal(err)
	}
	failures := []string{}
	for _, each := range given.Statements {
		for n, argument := range each.Arguments {
			switch argument := argument.(type) {
			case []any:
				each.Arguments[n] = pq.Array(argument)
			case string:
				if os.Getenv("AS_BYTES") != "" {
					each.Arguments[n] = []byte(argument)
				}
			}
		}
		if _, err := db.Exec(each.Text, each.Arguments...); err != nil {
			failures = append(failures, fmt.Sprintf("%s: %v", each.Name, err))
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(failures); err != nil {
		log.Fatal(err)
	}
}
