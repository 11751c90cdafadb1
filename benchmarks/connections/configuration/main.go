// A receiver on Go's net/http.
package main

import (
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "ok")
	})
	server := &http.Server{Addr: "127.0.0.1:" + os.Args[1], Handler: handler, IdleTimeout: time.Second}
	panic(server.ListenAndServe())
}
