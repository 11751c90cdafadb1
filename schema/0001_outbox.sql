-- Producer side: the outbox table, idempotency keys, the wake-up flag and the
-- functions that producers call.
--
-- Runs with search_path set to the target schema, so object names are not
-- qualified.  Functions keep that search_path (SET search_path FROM CURRENT):
-- they resolve the objects of this schema and never objects of the caller.

-- ---------------------------------------------------------------- the table

-- One row per event.  Append-only; rows are removed by dropping whole partitions.
--
-- id is GENERATED ALWAYS: producers need no privilege on the sequence and
-- cannot choose an id.  The identity must belong to the *parent* table: nextval()
-- takes a RowExclusiveLock on that sequence before it allocates, and the
-- sequencer uses this lock to distinguish an id that may still be committed
-- from an id that never will be.
CREATE TABLE outbox (
    id         bigint      GENERATED ALWAYS AS IDENTITY,
    event_id   uuid        NOT NULL DEFAULT gen_random_uuid(),
    tenant     text,
    type       text        NOT NULL,
    key        text,
    payload    jsonb,
    headers    jsonb,
    expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    erased_at  timestamptz,          -- when payload and headers were erased

    PRIMARY KEY (id),

    -- Constraint names are part of the error message that a producer receives.
    CONSTRAINT payload_must_not_be_null
        CHECK (payload IS NOT NULL OR erased_at IS NOT NULL),
    CONSTRAINT tenant_must_be_1_to_255_bytes
        CHECK (octet_length(tenant) BETWEEN 1 AND 255),
    CONSTRAINT type_must_be_at_most_255_bytes
        CHECK (octet_length(type) <= 255),
    CONSTRAINT type_must_be_dotted_segments_of_letters_digits_underscores
        CHECK (type ~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$'),
    -- Operational events (schema/0005_operational.sql) have an event_id of UUID version 8.
    -- Producers may not set event_id; its default is version 4.
    CONSTRAINT type_outbox_is_reserved_for_operational_events
        CHECK (NOT starts_with(type, 'outbox.') OR substr(event_id::text, 15, 1) = '8'),
    CONSTRAINT key_must_be_1_to_512_bytes
        CHECK (octet_length(key) BETWEEN 1 AND 512),
    CONSTRAINT headers_must_be_an_object_of_strings
        CHECK (jsonb_typeof(headers) = 'object'
               -- strict mode: lax mode would unwrap an array and match its elements.
               AND NOT headers @? 'strict $.* ? (@.type() != "string")'),
    CONSTRAINT headers_must_be_at_most_8192_bytes
        CHECK (octet_length(headers::text) <= 8192),
    CONSTRAINT payload_must_be_at_most_262144_bytes
        CHECK (octet_length(payload::text) <= 262144)
) PARTITION BY RANGE (id);

-- Lookup by event_id or key.  A bloom filter per 16 pages costs producers almost
-- nothing, unlike a B-tree over keys in random order.  Relay maintenance
-- summarizes it, not producers.  A filter takes 1.4 KB per column at this
-- n_distinct_per_range, and must fit into a page.
CREATE INDEX outbox_lookup ON outbox USING brin (
    event_id uuid_bloom_ops (n_distinct_per_range = 1200),
    key      text_bloom_ops (n_distinct_per_range = 1200)
) WITH (pages_per_range = 16);

-- Recently erased events, for which maintenance erases data written after the erasure.
CREATE INDEX outbox_erased ON outbox (erased_at) WHERE erased_at IS NOT NULL;

COMMENT ON TABLE outbox IS
    'Events, written in the same transaction as the change that they describe.';

-- Maximum payload size in bytes.  The payload limit is configurable; the other
-- limits are part of the contract.  Producers can read it before they insert.
-- It is never below the size of an operational event.
CREATE FUNCTION payload_bytes_max() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS 'SELECT 262144';
REVOKE ALL ON FUNCTION payload_bytes_max FROM PUBLIC;

-- Changes the payload limit.  NOT VALID skips existing rows of the outbox, so the
-- change is fast on any table size.  Future events and schedules are validated:
-- otherwise they would fail only when they become due.
CREATE FUNCTION set_payload_bytes_max(bytes_max integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    relation text;
BEGIN
    IF bytes_max NOT BETWEEN 1536 AND 67108864 THEN
        RAISE EXCEPTION 'the payload limit must be between 1536 and 67108864 bytes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOREACH relation IN ARRAY '{schedule,future_event,outbox}'::text[] LOOP
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT %I', relation,
                       'payload_must_be_at_most_' || payload_bytes_max() || '_bytes');
        EXECUTE format(
            'ALTER TABLE %I ADD CONSTRAINT %I CHECK (octet_length(payload::text) <= %s) %s',
            relation, 'payload_must_be_at_most_' || bytes_max || '_bytes', bytes_max,
            CASE relation WHEN 'outbox' THEN 'NOT VALID' ELSE '' END);
    END LOOP;
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION payload_bytes_max() RETURNS integer '
        'LANGUAGE sql IMMUTABLE PARALLEL SAFE AS %L', 'SELECT ' || bytes_max);
END $$;
REVOKE ALL ON FUNCTION set_payload_bytes_max FROM PUBLIC;

-- -------------------------------------------------------- idempotency keys

-- A claimed key prevents a second event until it expires or is reset.  A reset
-- keeps the row and counts in resets.
CREATE TABLE idempotency_key (
    key        text        COLLATE "C" PRIMARY KEY,  -- "C": a prefix search is a range scan
    event_id   uuid,                 -- NULL: claimed, its event is not published yet
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    resets     integer     NOT NULL DEFAULT 0,
    request_digest bytea,            -- SHA-256 of the API request that claimed it, to refuse
                                     -- another request with the key; NULL: not claimed by the API
    CONSTRAINT once_must_be_1_to_512_bytes CHECK (octet_length(key) BETWEEN 1 AND 512)
);

-- Search by claim time.  Rows are stored roughly in this order, so a BRIN index
-- suffices and costs producers almost nothing.
CREATE INDEX idempotency_key_claimed ON idempotency_key USING brin (claimed_at)
  WITH (pages_per_range = 32, autosummarize = on);

-- Claims an idempotency key; returns true for exactly one caller.  The primary
-- key arbitrates: a second caller waits until the first transaction ends.  A
-- caller that claims without an event id then calls publish(claimed => true),
-- which lets the winner alone compute the payload.
--
-- DO NOTHING, not DO UPDATE: DO UPDATE would lock the row for each losing caller,
-- and the next caller would wait for that caller's transaction.
--
-- keep is the retention of the key; NULL means 30 days.
CREATE FUNCTION claim_once(
    once_key text, for_event uuid DEFAULT NULL, keep interval DEFAULT NULL,
    digest bytea DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    keep := coalesce(keep, interval '30 days');
    IF keep <= interval '0' OR keep > interval '876600 hours' THEN
        RAISE EXCEPTION 'once: the retention of a key must be more than 0 and at most a century'
            USING ERRCODE = 'check_violation';
    END IF;
    -- Retries when an expired row is deleted between the INSERT and the UPDATE.
    LOOP
        INSERT INTO idempotency_key (key, event_id, expires_at, request_digest)
        VALUES (once_key, for_event, clock_timestamp() + keep, digest)
        ON CONFLICT (key) DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        UPDATE idempotency_key SET event_id = for_event,
                        claimed_at = clock_timestamp(),
                        expires_at = clock_timestamp() + keep,
                        request_digest = digest
         WHERE key = once_key AND expires_at <= clock_timestamp();
        IF FOUND THEN
            RETURN true;
        END IF;
        IF EXISTS (SELECT FROM idempotency_key WHERE key = once_key) THEN
            RETURN false;
        END IF;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION claim_once FROM PUBLIC;

-- Releases an idempotency key; returns true if it was held.
CREATE FUNCTION reset_once(once_key text) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH released AS (
        UPDATE idempotency_key SET expires_at = clock_timestamp(), resets = resets + 1
         WHERE key = once_key AND expires_at > clock_timestamp()
        RETURNING 1)
    SELECT EXISTS (SELECT FROM released)
$$;
REVOKE ALL ON FUNCTION reset_once FROM PUBLIC;

-- ----------------------------------------------------------------- publish

-- Publishes one event and returns its event_id, or NULL when the idempotency key
-- `once` is already claimed.  Call it with named arguments:
-- SELECT publish(type => …).  `claimed` states that claim_once() has just claimed
-- `once` for this caller; otherwise `once_for` sets the retention of the key.
-- With a `deliver_at` in the future the event is stored in future_event until then.
CREATE FUNCTION publish(
    type       text,
    payload    jsonb,
    key        text        DEFAULT NULL,
    tenant     text        DEFAULT NULL,
    once       text        DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers    jsonb       DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL,
    claimed    boolean     DEFAULT false,
    once_for   interval    DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    new_id uuid := gen_random_uuid();
BEGIN
    IF starts_with(publish.type, 'outbox.') THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish.once_for IS NOT NULL AND (publish.once IS NULL OR publish.claimed) THEN
        RAISE EXCEPTION 'once_for: requires an idempotency key (once) that is not claimed yet'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish.claimed THEN
        UPDATE idempotency_key AS o SET event_id = new_id
         WHERE o.key = publish.once AND o.event_id IS NULL AND o.expires_at > clock_timestamp();
        IF NOT FOUND THEN
            RAISE EXCEPTION 'once: the key is not claimed, or its event is already published'
                USING ERRCODE = 'check_violation';
        END IF;
    ELSIF publish.once IS NOT NULL AND NOT claim_once(publish.once, new_id, publish.once_for) THEN
        RETURN NULL;
    END IF;
    IF publish.deliver_at > clock_timestamp() THEN
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  deliver_at)
        VALUES (new_id, publish.tenant, publish.type, publish.key,
                publish.payload, publish.headers, publish.expires_at, publish.deliver_at);
    ELSE
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at)
        VALUES (new_id, publish.tenant, publish.type, publish.key,
                publish.payload, publish.headers, publish.expires_at);
    END IF;
    RETURN new_id;
END $$;
REVOKE ALL ON FUNCTION publish FROM PUBLIC;

-- Publishes one event from text and numbers, which every driver has: for the package's client
-- library.  Returns its event_id, or NULL as publish() does, as the only element of an array: one
-- column costs drivers least.  A payload that is too large is reported by the array {NULL, its
-- size, the limit}, because a CHECK violation would abort the caller's transaction.
-- The expiry is computed with the database's clock, which also decides whether it has passed;
-- it counts from deliver_at for a delayed event.  A function, because many drivers do not
-- prepare statements, and planning the same expressions costs more than executing them.
CREATE FUNCTION publish_text(
    type         text,
    payload      text,
    key          text    DEFAULT NULL,
    tenant       text    DEFAULT NULL,
    once         text    DEFAULT NULL,
    headers      text    DEFAULT NULL,
    deliver_at   text    DEFAULT NULL,
    expires_in_s float8  DEFAULT NULL,
    once_for_s   float8  DEFAULT NULL,
    claimed      boolean DEFAULT false
) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    parsed jsonb       := publish_text.payload;
    size   integer     := octet_length(parsed::text);
    due    timestamptz := publish_text.deliver_at;
BEGIN
    IF size > payload_bytes_max() THEN
        RETURN ARRAY[NULL, size::text, payload_bytes_max()::text];
    END IF;
    RETURN ARRAY[publish(
        type => publish_text.type, payload => parsed, key => publish_text.key,
        tenant => publish_text.tenant, once => publish_text.once,
        expires_at => greatest(clock_timestamp(), due) + make_interval(secs => expires_in_s),
        headers => publish_text.headers::jsonb, deliver_at => due,
        claimed => publish_text.claimed, once_for => make_interval(secs => once_for_s))::text];
END $$;
REVOKE ALL ON FUNCTION publish_text FROM PUBLIC;

-- Publishes many events with one statement, in array order, and returns their
-- event_ids, NULL where `once` is already claimed.  The arrays have equal length; a NULL
-- array means NULL for every event.  `digests` are those of API requests; see idempotency_key.
CREATE FUNCTION publish_many(
    types      text[],
    payloads   jsonb[],
    keys       text[]        DEFAULT NULL,
    tenants    text[]        DEFAULT NULL,
    onces      text[]        DEFAULT NULL,
    expires_at timestamptz[] DEFAULT NULL,
    headers    jsonb[]       DEFAULT NULL,
    deliver_at timestamptz[] DEFAULT NULL,
    once_for   interval[]    DEFAULT NULL,
    digests    bytea[]       DEFAULT NULL
) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    event_ids uuid[];
BEGIN
    -- unnest() would fill a shorter array with NULL.
    IF cardinality(types) <> ANY (ARRAY[
           cardinality(payloads), cardinality(keys), cardinality(tenants), cardinality(onces),
           cardinality(publish_many.expires_at), cardinality(publish_many.headers),
           cardinality(publish_many.deliver_at), cardinality(publish_many.once_for),
           cardinality(digests)]) THEN
        RAISE EXCEPTION 'arrays: each must have one element for each of types, or be NULL'
            USING ERRCODE = 'check_violation';
    END IF;
    IF EXISTS (SELECT FROM unnest(types) AS t WHERE starts_with(t, 'outbox.')) THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    -- requested: one row per event.  MATERIALIZED, because a second evaluation would
    -- generate other event ids.  In the order of idempotency keys, in which accepted claims
    -- them: otherwise two callers with the same keys in different orders would deadlock.
    -- accepted: the rows whose idempotency key was claimed.
    WITH requested AS MATERIALIZED (
        SELECT e.*, gen_random_uuid() AS event_id,
               coalesce(e.deliver_at > clock_timestamp(), false) AS is_delayed
          FROM unnest(types, payloads, keys, tenants, onces,
                      publish_many.expires_at, publish_many.headers, publish_many.deliver_at,
                      publish_many.once_for, publish_many.digests)
               WITH ORDINALITY AS e(type, payload, key, tenant, once, expires_at, headers,
                                    deliver_at, once_for, digest, n)
         ORDER BY e.once COLLATE "C", e.n),
    accepted AS MATERIALIZED (
        SELECT r.* FROM requested r
         WHERE r.once IS NULL OR claim_once(r.once, r.event_id, r.once_for, r.digest)),
    published AS (
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at
          FROM accepted a WHERE NOT a.is_delayed ORDER BY a.n),
    delayed AS (
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  deliver_at)
        SELECT a.event_id, a.tenant, a.type, a.key, a.payload, a.headers, a.expires_at,
               a.deliver_at
          FROM accepted a WHERE a.is_delayed ORDER BY a.n)
    SELECT array_agg(a.event_id ORDER BY r.n) INTO event_ids
      FROM requested r LEFT JOIN accepted a ON a.n = r.n;
    RETURN event_ids;
END $$;
REVOKE ALL ON FUNCTION publish_many FROM PUBLIC;

-- ----------------------------------------------------------------- wake-up

-- Wake-up flag for producers: 1 means that a relay polls; any other value is the
-- epoch second until which all relays may be asleep.  It is a sequence because
-- reading a sequence ignores snapshots: a REPEATABLE READ producer would read an
-- old value from a row, and its notification would be lost.
CREATE SEQUENCE wakeup;
DO $$ BEGIN PERFORM setval('wakeup', 1); END $$;
-- The trigger's WHEN clause runs with the producer's privileges.
GRANT SELECT ON SEQUENCE wakeup TO PUBLIC;

-- Notifies the relay.  The channel is named after the schema.  A session that uses
-- PREPARE TRANSACTION, which NOTIFY does not support, sets "<schema>.notify" to off.
CREATE FUNCTION notify_relay() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF coalesce(current_setting(
           regexp_replace(current_schema(), '[^A-Za-z0-9_]', '_', 'g') || '.notify',
           true), '') <> 'off' THEN
        PERFORM pg_notify(current_schema(), '');
    END IF;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION notify_relay FROM PUBLIC;

-- Tested in WHEN, not in the function: half the cost for every producer.  After the
-- epoch second has passed, producers do not notify a relay that died while asleep.
CREATE TRIGGER notify_relay
    AFTER INSERT ON outbox FOR EACH STATEMENT
    WHEN (pg_sequence_last_value('wakeup'::regclass) > extract(epoch FROM clock_timestamp()))
    EXECUTE FUNCTION notify_relay();
ALTER TABLE outbox ENABLE ALWAYS TRIGGER notify_relay;
