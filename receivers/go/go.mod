module github.com/outbox-relay/receiver-go

go 1.19
