-- Programs of version 5 go on working.
--
-- What receivers may ask a relay for: see outbox/operations/lane_history.py.

-- A token with which the receiver of one endpoint fetches what its lanes delivered.  As
-- of the API's tokens, only the SHA-256 is kept.  Not the signing secret, because who
-- can sign can forge, and who only asks need not be able to.
CREATE TABLE fetch_token (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id  uuid        NOT NULL REFERENCES endpoint,
    hash         bytea       NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text        NOT NULL,
    expires_at   timestamptz,               -- NULL: it does not
    last_used_at timestamptz                -- written at most once a minute
);
CREATE INDEX fetch_token_endpoint ON fetch_token (endpoint_id);
