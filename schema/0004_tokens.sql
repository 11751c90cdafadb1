-- Programs of version 3 go on working.
--
-- Who may use the HTTP API, and for what.

-- A token is a secret of 256 random bits, of which only the SHA-256 is kept.  A slow
-- hash with a salt protects what people choose, because that can be guessed; here
-- there is nothing to guess from, and a plain hash can be looked up by an index.
CREATE TABLE token (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text        NOT NULL,
    hash         bytea       NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    scopes       text[]      NOT NULL
                 CHECK (cardinality(scopes) > 0 AND scopes <@ '{read,publish,operate}'),
    tenant       text        CHECK (octet_length(tenant) BETWEEN 1 AND 255), -- NULL: everything
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text        NOT NULL,
    expires_at   timestamptz,               -- NULL: never
    revoked_at   timestamptz,
    revoked_by   text,
    last_used_at timestamptz,               -- written at most once a minute
    -- It stands in the journal as `token NAME`.
    CONSTRAINT name_must_be_1_to_100_letters_digits_dots_or_dashes
        CHECK (name ~ '^[A-Za-z0-9._-]{1,100}$'),
    CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);
-- A name is free again once its token is revoked.
CREATE UNIQUE INDEX token_name ON token (name) WHERE revoked_at IS NULL;
