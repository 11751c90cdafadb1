-- The producers' half: the outbox table, once keys, the wake-up flag and the
-- functions that producers call.
--
-- Runs with search_path set to the target schema alone, so nothing here names
-- it.  Functions keep that search_path (SET search_path FROM CURRENT), which
-- both finds our tables and shuts out objects of the caller's.

-- ---------------------------------------------------------------- the table

-- One row per event.  Append-only; rows leave by dropping whole partitions.
--
-- id is GENERATED ALWAYS, so producers need no right on the sequence and
-- cannot choose an id.  It has to be an identity of the *parent*: its sequence
-- takes a RowExclusiveLock before it allocates, which the relay's cursor
-- relies on to tell ids that may still appear from ids that never will.
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
    erased_at  timestamptz,          -- payload and headers are gone since then

    PRIMARY KEY (id),

    -- The names are what a producer reads when it breaks one of them.
    CONSTRAINT payload_must_not_be_null
        CHECK (payload IS NOT NULL OR erased_at IS NOT NULL),
    CONSTRAINT tenant_must_be_1_to_255_bytes
        CHECK (octet_length(tenant) BETWEEN 1 AND 255),
    CONSTRAINT type_must_be_at_most_255_bytes
        CHECK (octet_length(type) <= 255),
    CONSTRAINT type_must_be_dotted_segments_of_letters_digits_underscores
        CHECK (type ~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$'),
    -- Of those that the relay writes itself (schema/0005_operational.sql) event_id is of
    -- version 8; who may publish alone has no right to choose one, and gets version 4.
    CONSTRAINT type_outbox_is_reserved_for_operational_events
        CHECK (NOT starts_with(type, 'outbox.') OR substr(event_id::text, 15, 1) = '8'),
    CONSTRAINT key_must_be_1_to_512_bytes
        CHECK (octet_length(key) BETWEEN 1 AND 512),
    CONSTRAINT headers_must_be_an_object_of_strings
        CHECK (jsonb_typeof(headers) = 'object'
               -- strict: lax would look into an array and find its strings.
               AND NOT headers @? 'strict $.* ? (@.type() != "string")'),
    CONSTRAINT headers_must_be_at_most_8192_bytes
        CHECK (octet_length(headers::text) <= 8192),
    CONSTRAINT payload_must_be_at_most_262144_bytes
        CHECK (octet_length(payload::text) <= 262144)
) PARTITION BY RANGE (id);

-- For looking an event up by its event_id or its key.  A bloom filter for each 16
-- pages costs producers next to nothing, unlike a tree of keys in random order; it is
-- written by the relay's maintenance, not by them.  An attribute's filter takes
-- 1.4 KB at this number of distinct values, and has to fit into a page.
CREATE INDEX outbox_lookup ON outbox USING brin (
    event_id uuid_bloom_ops (n_distinct_per_range = 1200),
    key      text_bloom_ops (n_distinct_per_range = 1200)
) WITH (pages_per_range = 16);

-- Those whose leftovers maintenance looks for.
CREATE INDEX outbox_erased ON outbox (erased_at) WHERE erased_at IS NOT NULL;

COMMENT ON TABLE outbox IS
    'Events, written in the same transaction as the change they tell of.';

-- The payload limit is a setting; the others are part of the contract.  It
-- stands here too, so that a producer can ask before it is refused.  It is never so low
-- that it would refuse what the relay says about itself.
CREATE FUNCTION payload_bytes_max() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS 'SELECT 262144';
REVOKE ALL ON FUNCTION payload_bytes_max FROM PUBLIC;

-- Rows of the outbox are not looked at again, so this is quick on any size.  What
-- waits for its time is, or it would be refused only then, when nobody is there.
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

-- --------------------------------------------------------------- once keys

-- A claimed key publishes no second event until it expires or is reset.  A
-- reset keeps the row, so that it can be told how often that happened.
CREATE TABLE once (
    key        text        COLLATE "C" PRIMARY KEY,  -- so a prefix is a range of it
    event_id   uuid,                 -- NULL: claimed, its event is not written yet
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    resets     integer     NOT NULL DEFAULT 0,
    CONSTRAINT once_must_be_1_to_512_bytes CHECK (octet_length(key) BETWEEN 1 AND 512)
);

-- What was claimed when.  Keys are claimed in the order of their rows, mostly, so the
-- bounds of some pages will do, which cost producers next to nothing.
CREATE INDEX once_claimed ON once USING brin (claimed_at)
  WITH (pages_per_range = 32, autosummarize = on);

-- Claims a once key: true for exactly one caller.  The primary key decides; a
-- second caller waits until the first one's transaction ends.  Whoever claims
-- without naming an event goes on with publish(claimed => true), which lets the
-- winner alone work out the payload.
--
-- DO NOTHING, not DO UPDATE: that would lock the row for every loser, and the
-- next caller would wait for a loser's transaction.
--
-- `keep` is how long nobody else gets the key; NULL stands for 30 days.
CREATE FUNCTION claim_once(
    once_key text, for_event uuid DEFAULT NULL, keep interval DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    keep := coalesce(keep, interval '30 days');
    IF keep <= interval '0' OR keep > interval '876600 hours' THEN
        RAISE EXCEPTION 'once: a key is kept for more than 0 and at most a century'
            USING ERRCODE = 'check_violation';
    END IF;
    -- Again, when a row that had expired was deleted between the two.
    LOOP
        INSERT INTO once (key, event_id, expires_at)
        VALUES (once_key, for_event, clock_timestamp() + keep)
        ON CONFLICT (key) DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        UPDATE once SET event_id = for_event,
                        claimed_at = clock_timestamp(),
                        expires_at = clock_timestamp() + keep
         WHERE key = once_key AND expires_at <= clock_timestamp();
        IF FOUND THEN
            RETURN true;
        END IF;
        IF EXISTS (SELECT FROM once WHERE key = once_key) THEN
            RETURN false;
        END IF;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION claim_once FROM PUBLIC;

-- Frees a once key; true if it was held.
CREATE FUNCTION reset_once(once_key text) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH freed AS (
        UPDATE once SET expires_at = clock_timestamp(), resets = resets + 1
         WHERE key = once_key AND expires_at > clock_timestamp()
        RETURNING 1)
    SELECT EXISTS (SELECT FROM freed)
$$;
REVOKE ALL ON FUNCTION reset_once FROM PUBLIC;

-- ----------------------------------------------------------------- publish

-- Publishes one event and returns its event_id, or NULL when `once` was
-- already taken.  Call it with named arguments: SELECT publish(type => …).
-- `claimed` goes with a `once` key that claim_once() has just given us; otherwise
-- `once_for` says how long nobody else gets it.  With a `deliver_at` in the future
-- it waits in future_event until then.
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
        RAISE EXCEPTION 'once_for: goes with a once key that is not claimed yet'
            USING ERRCODE = 'check_violation';
    END IF;
    IF publish.claimed THEN
        UPDATE once AS o SET event_id = new_id
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

-- Publishes many events with one statement, in the order of the arrays, and
-- returns their event_ids, NULL where `once` was already taken.  An array that
-- is NULL stands for NULLs.
CREATE FUNCTION publish_many(
    types      text[],
    payloads   jsonb[],
    keys       text[]        DEFAULT NULL,
    tenants    text[]        DEFAULT NULL,
    onces      text[]        DEFAULT NULL,
    expires_at timestamptz[] DEFAULT NULL,
    headers    jsonb[]       DEFAULT NULL,
    deliver_at timestamptz[] DEFAULT NULL,
    once_for   interval[]    DEFAULT NULL
) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    event_ids uuid[];
BEGIN
    IF EXISTS (SELECT FROM unnest(types) AS t WHERE starts_with(t, 'outbox.')) THEN
        RAISE EXCEPTION 'type: "outbox." is reserved for operational events'
            USING ERRCODE = 'check_violation';
    END IF;
    -- Materialised, because a second evaluation would make other ids.
    WITH asked AS MATERIALIZED (
        SELECT e.*, gen_random_uuid() AS event_id,
               coalesce(e.deliver_at > clock_timestamp(), false) AS waits
          FROM unnest(types, payloads, keys, tenants, onces,
                      publish_many.expires_at, publish_many.headers, publish_many.deliver_at,
                      publish_many.once_for)
               WITH ORDINALITY AS e(type, payload, key, tenant, once, expires_at, headers,
                                    deliver_at, once_for, n)),
    won AS MATERIALIZED (
        SELECT a.* FROM asked a WHERE a.once IS NULL OR claim_once(a.once, a.event_id, a.once_for)),
    written AS (
        INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at)
        SELECT w.event_id, w.tenant, w.type, w.key, w.payload, w.headers, w.expires_at
          FROM won w WHERE NOT w.waits ORDER BY w.n),
    kept AS (
        INSERT INTO future_event (event_id, tenant, type, key, payload, headers, expires_at,
                                  deliver_at)
        SELECT w.event_id, w.tenant, w.type, w.key, w.payload, w.headers, w.expires_at,
               w.deliver_at
          FROM won w WHERE w.waits ORDER BY w.n)
    SELECT array_agg(w.event_id ORDER BY a.n) INTO event_ids
      FROM asked a LEFT JOIN won w ON w.n = a.n;
    RETURN event_ids;
END $$;
REVOKE ALL ON FUNCTION publish_many FROM PUBLIC;

-- ----------------------------------------------------------------- wake-up

-- The flag that tells producers whether somebody sleeps: 1 means awake, any
-- other value is the epoch second until which a relay may be asleep.  It is a
-- sequence because reading one ignores snapshots; an ordinary row would show a
-- REPEATABLE READ producer an old value and lose the wake-up.
CREATE SEQUENCE wakeup;
DO $$ BEGIN PERFORM setval('wakeup', 1); END $$;
-- The trigger's WHEN runs with the producer's rights.
GRANT SELECT ON SEQUENCE wakeup TO PUBLIC;

-- The channel is the schema's name.  A session that uses PREPARE TRANSACTION,
-- which NOTIFY forbids, sets "<schema>.notify" to off.
CREATE FUNCTION ring() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF coalesce(current_setting(
           regexp_replace(current_schema(), '[^A-Za-z0-9_]', '_', 'g') || '.notify',
           true), '') <> 'off' THEN
        PERFORM pg_notify(current_schema(), '');
    END IF;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION ring FROM PUBLIC;

-- Tested in WHEN, not in the function: half the cost for every producer, and
-- after the epoch second has passed nobody pays for a relay that died asleep.
CREATE TRIGGER ring_the_relay
    AFTER INSERT ON outbox FOR EACH STATEMENT
    WHEN (pg_sequence_last_value('wakeup'::regclass) > extract(epoch FROM clock_timestamp()))
    EXECUTE FUNCTION ring();
ALTER TABLE outbox ENABLE ALWAYS TRIGGER ring_the_relay;
