module github.com/outbox-relay/receiver-go/internal/testserver

go 1.19

require (
	github.com/lib/pq v1.10.7
	github.com/outbox-relay/receiver-go v0.0.0
)

// lib/pq is that of Debian's golang-github-lib-pq-dev, so that no module proxy is needed.
replace (
	github.com/lib/pq => /usr/share/gocode/src/github.com/lib/pq
	github.com/outbox-relay/receiver-go => ../..
)
