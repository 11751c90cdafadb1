-- Compatible with programs of version 3.
--
-- API tokens: who may use the HTTP API, and with which scopes.

-- A token is a secret of 256 random bits, stored as its SHA-256.  A salted slow hash is
-- needed for passwords, which can be guessed; for random tokens a plain hash suffices, and
-- it can be found by an index.
CREATE TABLE token (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text        NOT NULL,
    hash         bytea       NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    scopes       text[]      NOT NULL
                 CHECK (cardinality(scopes) > 0 AND scopes <@ '{read,publish,operate}'),
    tenant       text        CHECK (octet_length(tenant) BETWEEN 1 AND 255), -- NULL: everything
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text        NOT NULL,
    expires_at   timestamptz,               -- NULL: does not expire
    revoked_at   timestamptz,
    revoked_by   text,
    last_used_at timestamptz,               -- written at most once a minute
    -- The journal shows the token as `token NAME`.
    CONSTRAINT name_must_be_1_to_100_letters_digits_dots_or_dashes
        CHECK (name ~ '^[A-Za-z0-9._-]{1,100}$'),
    CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);
-- A name can be reused after its token is revoked.
CREATE UNIQUE INDEX token_name ON token (name) WHERE revoked_at IS NULL;
