-- Compatible with programs of version 5.
--
-- Requests of receivers to a relay: see outbox/operations/lane_history.py.

-- A token with which the receiver of one endpoint fetches what its lanes delivered.  As with
-- API tokens, only the SHA-256 is stored.  It is not the signing secret, because a holder of
-- that secret can forge deliveries.
CREATE TABLE fetch_token (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id  uuid        NOT NULL REFERENCES endpoint,
    hash         bytea       NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text        NOT NULL,
    expires_at   timestamptz,               -- NULL: does not expire
    last_used_at timestamptz                -- written at most once a minute
);
CREATE INDEX fetch_token_endpoint ON fetch_token (endpoint_id);
