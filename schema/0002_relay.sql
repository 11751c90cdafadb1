-- Relay side: endpoints, the cursor, lanes, deliveries, attempts and dead letters.
--
-- Each table has one kind of writer, so that writers do not wait for each other:
--   * the sequencer (the leading replica): batch, gap, delivery, lane_counter,
--     and the progress of replays (replay, replay_job_endpoint);
--   * the owner of an endpoint: lane_progress, lane_block, attempt,
--     dead_letter, endpoint_health;
--   * operator commands, holding the cursor row: endpoint, subscription,
--     lane, replay_job.

-- ------------------------------------------------------------ the timeline

-- Returns the server's timeline ID, which increases with every promotion of a standby
-- and every point-in-time recovery.  Both may lose committed transactions, including
-- assigned sequence numbers.  NULL: the server does not report it, because it is a
-- standby or because the role lacks the privilege.
CREATE FUNCTION server_timeline() RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION server_timeline FROM PUBLIC;

-- Returns the identity of this database: the cluster's system identifier and the database's
-- OID.  A dump that is restored elsewhere, and a copy in the same cluster, have another one,
-- although the timeline may be the same.  NULL: the server does not report it.
CREATE FUNCTION server_identity() RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT c.system_identifier || '/' || d.oid
              FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
             WHERE d.datname = pg_catalog.current_database());
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION server_identity FROM PUBLIC;

-- Aborts the message of which it is a part, unless the condition holds: its other statements
-- then do nothing, either.
CREATE FUNCTION abort_unless(condition boolean) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF condition IS NOT TRUE THEN
        RAISE EXCEPTION 'the change was planned for an earlier state'
              USING ERRCODE = 'OB001', HINT = 'Nothing was changed; plan it again.';
    END IF;
END $$;
REVOKE ALL ON FUNCTION abort_unless FROM PUBLIC;

-- --------------------------------------------------------------- endpoints

-- A destination and its configuration.  `state` is set by the operator (or by the owner,
-- when it disables the endpoint); the circuit breaker's state is in endpoint_health.
CREATE TABLE endpoint (
    id              uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    name            text        NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
    state           text        NOT NULL DEFAULT 'active'
                    CHECK (state IN ('active', 'paused', 'disabling', 'disabled',
                                     'removing', 'removed')),
    state_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    state_by        text,                     -- who set the state
    state_comment   text,                     -- comment given with the change

    -- Subscription; a change begins a new version in `subscription`.
    types           text[]      NOT NULL DEFAULT '{**}',
    tenant          text,                     -- NULL: events without a tenant
    all_tenants     boolean     NOT NULL DEFAULT false,
    filter          text,                     -- jsonpath condition inside $ ? (…)

    -- Request settings.
    url             text        NOT NULL,
    method          text        NOT NULL DEFAULT 'POST' CHECK (method IN ('POST', 'PUT', 'PATCH')),
    headers         jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    header_prefix   text        NOT NULL DEFAULT 'X-', -- of X-Sequence and the like
    format          text        NOT NULL DEFAULT 'envelope'
                    CHECK (format IN ('envelope', 'thin', 'raw', 'cloudevents',
                                      'cloudevents-binary')),
    source          text        NOT NULL DEFAULT '/outbox',  -- of CloudEvents
    connect_timeout_s double precision NOT NULL DEFAULT 5,
    timeout_s       double precision NOT NULL DEFAULT 15,
    in_flight_max   integer     CHECK (in_flight_max > 0),            -- NULL: one per lane
    rate_per_s      double precision CHECK (rate_per_s > 0),          -- NULL: no limit
    batch_max       integer     CHECK (batch_max > 0),                -- NULL: one per request
    keep_alive      boolean     NOT NULL DEFAULT true,  -- false: one request per connection

    -- Networks permitted in addition to public addresses, and TLS trust.
    allow_networks  text[]      NOT NULL DEFAULT '{}',
    ca              text,                     -- PEM; NULL: the system's certificate authorities
    identity        text,                     -- client certificate and private key (mutual TLS)
    identity_about  jsonb,                    -- properties of the certificate that may be shown

    -- Failure handling.
    retry           jsonb       NOT NULL,     -- fields of a RetryPolicy
    retryable       text[],                   -- statuses such as 429, 5xx; NULL: the default
    on_dead_letter  text        NOT NULL DEFAULT 'continue'
                    CHECK (on_dead_letter IN ('continue', 'block')),
    backlog_max     bigint           CHECK (backlog_max > 0),         -- NULL: no limit
    backlog_age_s   double precision CHECK (backlog_age_s > 0),       -- NULL: no limit
    disable_after_s   double precision NOT NULL DEFAULT 259200 CHECK (disable_after_s > 0),

    -- Interval of receiver checkpoints (the last sequence number of each lane); NULL: off.
    checkpoint_every_s double precision CHECK (checkpoint_every_s >= 1),

    lanes           integer     NOT NULL CHECK (lanes BETWEEN 1 AND 1024),
    generation      bigint      NOT NULL DEFAULT 1,  -- increases when lanes change
    resumes         integer     NOT NULL DEFAULT 0,  -- increases when an operator resumes
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (NOT (all_tenants AND tenant IS NOT NULL)),
    CHECK (NOT (format IN ('raw', 'cloudevents-binary') AND batch_max IS NOT NULL))
);
-- A name can be reused after its endpoint is removed.
CREATE UNIQUE INDEX endpoint_name ON endpoint (name) WHERE state <> 'removed';

-- Removing an endpoint does not require the privilege to write its headers.
CREATE FUNCTION clear_credentials() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    NEW.headers := '{}';
    NEW.identity := NULL;
    RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION clear_credentials FROM PUBLIC;
CREATE TRIGGER clear_credentials
    BEFORE UPDATE OF state ON endpoint FOR EACH ROW
    WHEN (NEW.state = 'removed')
    EXECUTE FUNCTION clear_credentials();

-- Signing secrets, `whsec_…` or (Ed25519) `whsk_…`; two are valid during a rotation.
--
-- These, an endpoint's `identity` and its header values are secrets.  They are encrypted
-- when relays have a key: see outbox/store/connection/secrets.py.
CREATE TABLE endpoint_secret (
    endpoint_id uuid        NOT NULL REFERENCES endpoint,
    id          integer     NOT NULL,
    secret      text        NOT NULL,
    key_id      text        GENERATED ALWAYS AS (   -- encryption key; NULL: plain text
                    CASE WHEN secret LIKE 'sealed:%' THEN split_part(secret, ':', 2) END) STORED,
    public_key  text,                               -- given to the receiver; NULL: symmetric
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz,
    PRIMARY KEY (endpoint_id, id)
);

-- Versions of an endpoint's subscription.  A version covers batches [from, to), which
-- distinguishes a missing delivery from a missing subscription.
CREATE TABLE subscription (
    endpoint_id uuid    NOT NULL REFERENCES endpoint,
    from_batch  bigint  NOT NULL,
    to_batch    bigint,
    types       text[]  NOT NULL,
    tenant      text,
    all_tenants boolean NOT NULL,
    filter      text,
    -- When the filter was stopped, because it is slow or fails; a stopped filter matches.
    filter_stopped_at  timestamptz,
    filter_stopped_reason text,
    PRIMARY KEY (endpoint_id, from_batch)
);
CREATE INDEX subscription_current ON subscription (endpoint_id) WHERE to_batch IS NULL;

-- Returns whether a payload matches a filter; NULL when the filter cannot be evaluated,
-- which the relay treats as a match.  For lookups of single events: the sequencer
-- evaluates many events at once, without a subtransaction per event.
CREATE FUNCTION matches_filter(payload jsonb, filter text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN coalesce(payload @? ('$ ? (' || filter || ')')::jsonpath, false);
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION matches_filter FROM PUBLIC;

-- State of an endpoint's circuit breaker, kept across owners.  A separate table, because
-- the owner writes it and operators write `endpoint`.
CREATE TABLE endpoint_health (
    endpoint_id uuid        PRIMARY KEY REFERENCES endpoint,
    epoch       bigint      NOT NULL DEFAULT 0,  -- fencing: only this owner may write
    state       text        NOT NULL DEFAULT 'healthy'
                CHECK (state IN ('healthy', 'failing', 'rejecting', 'recovering')),
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    resumes     integer     NOT NULL DEFAULT 0,  -- endpoint.resumes, as last applied
    held_until  timestamptz,                     -- end of the receiver's Retry-After
    last_response jsonb,                         -- the response that led to this state
    unsolicited_at timestamptz,                  -- last data that belongs to no request; NULL: never
    -- The last operational events reported, so that a new owner reports only changes.
    -- NULL: none, or already ended.
    reported_held_since timestamptz,             -- outbox.endpoint.held
    reported_stalled_at timestamptz              -- outbox.endpoint.stalled
);

-- An ordered stream of deliveries to one endpoint.  A change of the lane count or of the
-- server's timeline or identity begins a new generation; lanes of the old generation receive no new
-- deliveries, and the new generation is sent when the old one is drained.
CREATE TABLE lane (
    id          bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id uuid    NOT NULL REFERENCES endpoint,
    generation  bigint  NOT NULL,
    slot        integer NOT NULL,
    skip_seq    bigint,                          -- the delivery that an operator skipped last
    UNIQUE (endpoint_id, generation, slot)
);
CREATE INDEX lane_skipped ON lane (endpoint_id) WHERE skip_seq IS NOT NULL;

-- The last sequence number assigned in a lane; one row per lane.  Separate from
-- lane_progress, because the sequencer and the owner would deadlock on one table.
-- last_seq is part of the primary key because every batch increases it: while an old
-- snapshot keeps dead row versions from being removed, the current row is found by its
-- last_seq or by a backward index scan, which does not visit dead versions.
CREATE TABLE lane_counter (
    lane_id  bigint NOT NULL REFERENCES lane,
    last_seq bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (lane_id, last_seq)
) WITH (fillfactor = 50);

-- The advance of a lane's counter as the sequencer writes it: one parameter is an array of these.
-- A relay of another version may be running, so a row with other fields needs a type of its own.
CREATE TYPE counter_row AS (
    lane_id  bigint,
    old_seq  bigint,
    last_seq bigint
);

-- Advances a lane's counter.  One statement per lane: for a join, the planner may choose
-- a sequential scan, because it estimates the table from the few current rows.  It fails if the
-- counter has another value: the sequence numbers of the batch would be wrong.
CREATE FUNCTION advance_lane_counter(lane bigint, old_seq bigint, new_seq bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE lane_counter SET last_seq = new_seq WHERE lane_id = lane AND last_seq = old_seq;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the last sequence number of lane % is not %', lane, old_seq
              USING HINT = 'The batch was not written; the relay reads the counters again.';
    END IF;
END $$;
REVOKE ALL ON FUNCTION advance_lane_counter FROM PUBLIC;

-- Checkpoint of a lane.  A lane's position is this checkpoint plus the delivered rows
-- of `attempt` after it.  The retry state belongs to sequence number acked_seq + 1, the
-- only one that can be retrying; retry_seq names it.
CREATE TABLE lane_progress (
    lane_id          bigint PRIMARY KEY REFERENCES lane,
    endpoint_id      uuid   NOT NULL REFERENCES endpoint,
    epoch            bigint NOT NULL DEFAULT 0,  -- fencing: only this owner may write
    acked_seq        bigint NOT NULL DEFAULT 0,  -- delivered or dead-lettered up to here
    delivered_seq    bigint NOT NULL DEFAULT 0,  -- the last one that was delivered
    floor_batch      bigint NOT NULL DEFAULT 0,  -- no pending delivery is in an older batch
    retry_seq        bigint,                     -- sequence number of the retry state
    attempts         integer NOT NULL DEFAULT 0, -- requests made for it
    spent            integer NOT NULL DEFAULT 0, -- those that count; probes do not
    first_attempt_at timestamptz,
    next_attempt_at  timestamptz,
    last_response    jsonb,
    success_at       timestamptz                 -- of the last delivery
) WITH (fillfactor = 50);
CREATE INDEX lane_progress_endpoint ON lane_progress (endpoint_id);

-- A row of `lane_progress` as the owner writes it, like `counter_row`.
CREATE TYPE progress_row AS (
    lane_id          bigint,
    epoch            bigint,
    acked_seq        bigint,
    delivered_seq    bigint,
    floor_batch      bigint,
    retry_seq        bigint,
    attempts         integer,
    spent            integer,
    first_attempt_at double precision,  -- seconds since 1970
    next_attempt_at  double precision,
    last_response    jsonb,
    success_at       double precision
);

-- Lanes blocked by a dead letter, when the endpoint's on_dead_letter is `block`.  The
-- owner inserts a row; an operator deletes it by replaying or discarding the dead
-- letter, or by resuming the endpoint.
CREATE TABLE lane_block (
    lane_id bigint      PRIMARY KEY REFERENCES lane,
    seq     bigint      NOT NULL,                -- the dead-lettered sequence number
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- -------------------------------------------------------------- the cursor

-- The sequencer's lock row.  `writer` is the leading replica: it wrote the last batch, and
-- only its memory of the transactions that hold gaps open is valid.  `version` increases
-- with every routing change.  A batch is written (optimistic concurrency) only while the
-- row is locked and both values are unchanged.  `timeline` and `identity` are those of the
-- server at the last batch: after a failover or a restore, assigned sequence numbers may be
-- lost, so the leader begins new lanes before it sequences.
CREATE TABLE cursor (
    one         boolean     PRIMARY KEY DEFAULT true CHECK (one),
    writer      bigint,
    version     bigint      NOT NULL DEFAULT 1,
    erasures    bigint      NOT NULL DEFAULT 0, -- increases when payloads are erased
    timeline    bigint,                       -- NULL: not yet known
    identity    text,                         -- server_identity(); NULL: not yet known
    timeline_at timestamptz                   -- when one of them changed; NULL: never
);
INSERT INTO cursor DEFAULT VALUES;

-- Returns whether the server was promoted, or the database restored or copied, since the last
-- batch, so that the next leader begins new lanes.
CREATE FUNCTION history_changed() RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(timeline <> server_timeline(), false)
           OR coalesce(identity <> server_identity(), false)
      FROM cursor
$$;
REVOKE ALL ON FUNCTION history_changed FROM PUBLIC;

-- Returns the number of an endpoint's first generation of lanes in a new history.  The
-- generation is part of each lane name, and a name must never be reused, although any number
-- of lane changes may be lost, and one dump may be restored several times.  No counter in this
-- database survives that, but the time does: milliseconds since 1970.
CREATE FUNCTION first_generation(generation bigint) RETURNS bigint
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT greatest(generation + 1, (extract(epoch FROM statement_timestamp()) * 1000)::bigint)
$$;
REVOKE ALL ON FUNCTION first_generation FROM PUBLIC;

-- Returns the number of an endpoint's next generation of lanes.
CREATE FUNCTION next_generation(generation bigint) RETURNS bigint
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN history_changed() THEN first_generation(generation) ELSE generation + 1 END
$$;
REVOKE ALL ON FUNCTION next_generation FROM PUBLIC;

-- Locks of relays that belong to no other row.  They are not advisory locks, because any role
-- that may connect can take those.
--
--   future events   the row lock; the session that has it moves delayed events
--   maintenance     a lease, because maintenance takes more than one transaction
CREATE TABLE lock (
    name       text        PRIMARY KEY,
    holder     text,       -- of a lease: the session's application name,
    token      uuid,       -- what the session knows it by,
    expires_at timestamptz -- and its end; NULL: it is free
);
INSERT INTO lock (name) VALUES ('future events'), ('maintenance');

-- Whether outbox.relay.lagging was reported and has not ended, and when it was last reported.
-- Not in the cursor row: a session that holds that row is reported by this event.
CREATE TABLE lag_report (
    one        boolean     PRIMARY KEY DEFAULT true CHECK (one),
    lagging    boolean     NOT NULL DEFAULT false,
    lagging_at timestamptz
);
INSERT INTO lag_report DEFAULT VALUES;

-- One row per batch of the sequencer; the newest row is the cursor's position.
-- Every id up to `high` is sequenced, in an open gap, or proven dead.
CREATE TABLE batch (
    batch      bigint         NOT NULL,
    high       bigint         NOT NULL,
    young      int8multirange NOT NULL DEFAULT '{}',  -- open gaps, mostly younger than a second
    found      int8multirange NOT NULL DEFAULT '{}',  -- ids of gaps sequenced by this batch
    dead       int8multirange NOT NULL DEFAULT '{}',  -- ids proven never to appear
    events     integer        NOT NULL DEFAULT 0,
    deliveries integer        NOT NULL DEFAULT 0,
    lanes      bigint[]       NOT NULL DEFAULT '{}',  -- lanes with new deliveries
    writer     bigint,
    at         timestamptz    NOT NULL DEFAULT clock_timestamp(),
    -- Lower bound of the commit time of this batch's events: the start of a read that saw
    -- all committed events and none of these.  NULL: not known.
    committed_after timestamptz,
    PRIMARY KEY (batch)
) PARTITION BY RANGE (batch);
CREATE INDEX batch_at ON batch (at);
-- Finds the batch of an event: the first batch with high >= id, unless the id was in a gap.
CREATE INDEX batch_high ON batch (high, batch);
CREATE INDEX batch_found ON batch (batch) WHERE NOT isempty(found);
-- Finds committed events that were skipped.
CREATE INDEX batch_dead ON batch (batch) WHERE NOT isempty(dead);

-- Open gaps that are old, or too many for the batch row.  A gap is read again only when one
-- of the transactions that hold it open ends, so a transaction open for hours costs nothing
-- per batch.
CREATE TABLE gap (
    lo bigint PRIMARY KEY,
    hi bigint NOT NULL,           -- inclusive
    CHECK (lo <= hi)
);

-- One event in one lane.  Partitioned by batch, not by event: a lane is read from its
-- floor batch on, and so reads only the newest partitions.
CREATE TABLE delivery (
    lane_id     bigint NOT NULL,
    batch       bigint NOT NULL,
    seq         bigint NOT NULL,
    outbox_id   bigint NOT NULL,
    replay_id   bigint,           -- the replay that sends it again,
    replay_seq  bigint,           -- and the original sequence number
    backfill_id bigint,           -- the job that gives it an X-Delivery of its own
    copy_id     bigint,           -- the dead letter that holds a copy of the event
    PRIMARY KEY (lane_id, batch, seq)
) PARTITION BY RANGE (batch);
-- By lane: the progress of a replay of a million deliveries is read from the first and
-- the last one in each of its lanes.
CREATE INDEX delivery_replay ON delivery (replay_id, lane_id, seq) WHERE replay_id IS NOT NULL;
-- By event; other deliveries of an event are found through its batch.
CREATE INDEX delivery_repeated ON delivery (outbox_id)
 WHERE replay_id IS NOT NULL OR backfill_id IS NOT NULL;
-- By the dead letter whose copy it needs, including replays of replays.
CREATE INDEX delivery_copy ON delivery (copy_id) WHERE copy_id IS NOT NULL;

-- A row of `delivery` as the sequencer writes it, like `counter_row`.
CREATE TYPE delivery_row AS (
    lane_id     bigint,
    seq         bigint,
    outbox_id   bigint,
    replay_id   bigint,
    replay_seq  bigint,
    backfill_id bigint,
    copy_id     bigint
);

-- ---------------------------------------------------------------- delivery

-- Every attempt.  Rows with outcome 'delivered' are the acknowledgements.
CREATE TABLE attempt (
    lane_id    bigint      NOT NULL,
    batch      bigint      NOT NULL,
    seq        bigint      NOT NULL,
    attempt    integer     NOT NULL,
    replica_id bigint      NOT NULL,
    outcome    text        NOT NULL CHECK (outcome IN ('delivered', 'retry', 'refused')),
    status     integer,
    error      text,
    started_at timestamptz NOT NULL,
    elapsed_ms real        NOT NULL,
    response   jsonb,              -- the stored response, bounded in size
    PRIMARY KEY (lane_id, batch, seq, attempt, replica_id)
) PARTITION BY RANGE (batch);

-- A row of `attempt` as its owner writes it, like `counter_row`.
CREATE TYPE attempt_row AS (
    lane_id    bigint,
    batch      bigint,
    seq        bigint,
    attempt    integer,
    outcome    text,
    status     integer,
    error      text,
    started_us bigint,             -- microseconds since 1970
    elapsed_us bigint,
    response   jsonb
);

-- Dead letters, with their own copy of the event: they can be inspected and replayed after
-- the event's partition is dropped.  A range (outbox_id is NULL) covers consecutive
-- deliveries that were dead-lettered together, unsent.
CREATE TABLE dead_letter (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id  uuid        NOT NULL REFERENCES endpoint,
    lane_id      bigint      NOT NULL REFERENCES lane,
    batch        bigint      NOT NULL,
    seq          bigint      NOT NULL,
    to_seq       bigint      NOT NULL,
    outbox_id    bigint,
    backfill_id  bigint,                       -- copied from its delivery
    event_id     uuid,
    tenant       text,
    type         text,
    key          text,
    payload      jsonb,
    headers      jsonb,
    published_at timestamptz,
    expires_at   timestamptz,
    reason       text        NOT NULL
                 CHECK (reason IN ('refused', 'exhausted', 'expired', 'erased',
                                   'skipped', 'backlog', 'disabled', 'removed')),
    attempts     integer     NOT NULL,
    last_response jsonb,                       -- bounded; NULL: never sent
    began_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),  -- of a range: the latest
    state        text        NOT NULL DEFAULT 'dead'
                 CHECK (state IN ('dead', 'replaying', 'discarded')),
    replica_id   bigint,
    erased_at    timestamptz,                  -- when the copy and the response were erased
    CHECK (seq <= to_seq),
    UNIQUE (lane_id, seq)
);
CREATE INDEX dead_letter_open ON dead_letter (id) WHERE state = 'dead';
CREATE INDEX dead_letter_endpoint_open ON dead_letter (endpoint_id, id) WHERE state = 'dead';
CREATE INDEX dead_letter_endpoint ON dead_letter (endpoint_id, id);
CREATE INDEX dead_letter_outbox ON dead_letter (outbox_id);
CREATE INDEX dead_letter_event ON dead_letter (event_id);
-- Like outbox_erased, for events whose row is gone.
CREATE INDEX dead_letter_erased ON dead_letter (erased_at) WHERE erased_at IS NOT NULL;
-- Ranges have no copies of their events, so they pin the log and the events.
CREATE INDEX dead_letter_range ON dead_letter (batch) WHERE outbox_id IS NULL AND state = 'dead';

-- Replay jobs: dead letters or an endpoint's history, requested by an operator.  Creating a
-- job takes constant time: the leader processes it in chunks, each written together with its
-- batch (see outbox/core/sequencing/replay_throttle.py).
CREATE TABLE replay_job (
    id         bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind       text             NOT NULL CHECK (kind IN ('dead', 'history')),
    state      text             NOT NULL DEFAULT 'running'
               CHECK (state IN ('running', 'done', 'aborted')),
    -- Selection; NULL: no restriction.
    endpoint   text,                          -- the name as requested
    types      text[],
    tenant     text,
    reason     text,
    since      timestamptz,
    until      timestamptz,                   -- exclusive
    -- For history: gaps open at the time of the request.  Events found in them later are
    -- sequenced later, and so are delivered as live events.
    gaps       int8multirange   NOT NULL DEFAULT '{}',
    rate_per_s double precision CHECK (rate_per_s > 0),    -- NULL: adaptive
    requested_at   timestamptz      NOT NULL DEFAULT clock_timestamp(),
    requested_by   text             NOT NULL,
    ended_at   timestamptz
);

-- One endpoint's part of a replay job: its progress in ids of dead letters or events.  The
-- range is fixed at the time of the request, so the job ends.
CREATE TABLE replay_job_endpoint (
    job_id      bigint NOT NULL REFERENCES replay_job,
    endpoint_id uuid   NOT NULL,  -- no foreign key: it would lock the endpoint during the wait
    first_id    bigint NOT NULL,
    next_id     bigint NOT NULL,              -- the next id to read
    last_id     bigint NOT NULL,
    expected    bigint,                       -- number of items; NULL: not counted
    taken       bigint NOT NULL DEFAULT 0,    -- deliveries created
    erased      bigint NOT NULL DEFAULT 0,    -- skipped: the event was erased
    batch       bigint,                       -- batch of the last chunk
    -- The lowest event id that a backfill may still read: retention keeps this and higher
    -- ids until the part ends.
    from_id     bigint,
    ended_at    timestamptz,                  -- all deliveries created, or stopped;
    end_reason  text                          -- reason of the stop; NULL: completed
                CHECK (end_reason IN ('aborted', 'disabled', 'removed', 'unsubscribed')),
    PRIMARY KEY (job_id, endpoint_id)
) WITH (fillfactor = 50);
CREATE INDEX replay_job_endpoint_running ON replay_job_endpoint (job_id) WHERE ended_at IS NULL;
CREATE INDEX replay_job_endpoint_endpoint ON replay_job_endpoint (endpoint_id) WHERE ended_at IS NULL;

-- Sequence numbers of a lane that are being replayed: those of a dead letter, one or a
-- range.  Each following batch consumes some and creates deliveries for them.
CREATE TABLE replay (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id      bigint      NOT NULL REFERENCES replay_job,
    endpoint_id uuid        NOT NULL,
    dead_id     bigint      NOT NULL REFERENCES dead_letter,
    requested_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_seq    bigint      NOT NULL,         -- the next sequence number to replay
    next_batch  bigint      NOT NULL,         -- no remaining one is in an older batch
    to_seq      bigint      NOT NULL          -- the last one
);
CREATE INDEX replay_pending ON replay (endpoint_id, job_id, id) WHERE next_seq <= to_seq;
CREATE INDEX replay_dead ON replay (dead_id, id);

-- ---------------------------------------------------------------- replicas

-- A running relay.  The fence is a FOR KEY SHARE lock on this row, taken in the same
-- statement that writes.  Expiring a replica deletes the row; any statement of that replica
-- that is still in transit then writes nothing.
CREATE TABLE replica (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    label         text        NOT NULL UNIQUE,    -- application_name of its sessions
    name          text        NOT NULL,
    version       text        NOT NULL,
    sequencer_pid integer,                        -- the backend that writes its batches
    keys          text[]      NOT NULL DEFAULT '{}', -- ids of its decryption keys
    renewals      bigint      NOT NULL DEFAULT 0, -- peers watch this counter, not clocks
    lease_s       double precision NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at    timestamptz NOT NULL
);

-- The owner of each endpoint.  The epoch increases with every change of ownership.
CREATE TABLE ownership (
    endpoint_id uuid   PRIMARY KEY REFERENCES endpoint,
    replica_id  bigint,                        -- NULL: free to be claimed
    epoch       bigint NOT NULL DEFAULT 0
);
CREATE INDEX ownership_replica ON ownership (replica_id);

-- ----------------------------------------------------------------- history

-- Every change that no other append-only table records.
CREATE TABLE journal (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind        text        NOT NULL,
    actor       text        NOT NULL,
    endpoint_id uuid,
    data        jsonb       NOT NULL DEFAULT '{}',
    -- The first entry of an operator's change has the change's id, so that a change whose
    -- response was lost can be recognized, and is not executed twice.
    request     uuid,
    -- `actor` is stated by the writer; session_role is the authenticated login role.
    session_role name       NOT NULL DEFAULT session_user
);
CREATE INDEX journal_endpoint ON journal (endpoint_id, id);
CREATE UNIQUE INDEX journal_request ON journal (request) WHERE request IS NOT NULL;

-- ----------------------------------------------------------------- periods

-- Ids and batches are numbered by period: period n has the numbers from n × 10^11, and
-- one partition with room for all of them.  A period therefore ends at any chosen time
-- and is dropped as a whole.  A new period begins by advancing the numbers, never by
-- changing partition bounds, which would block producers.
--
-- `events`: periods of outbox ids; `log`: periods of batches.
CREATE TABLE period (
    kind       text        NOT NULL CHECK (kind IN ('events', 'log')),
    number     bigint      NOT NULL,
    began_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    high       bigint      NOT NULL DEFAULT 0,  -- the cursor's position when it began
    ended_at   timestamptz,
    last_batch bigint,      -- for events: no later batch contains one of them
    dropped_at timestamptz, -- decision to drop; the partitions are dropped soon after
    PRIMARY KEY (kind, number)
);
INSERT INTO period (kind, number) VALUES ('events', 0), ('log', 0);

-- Creates the partition of a period.  CREATE TABLE … LIKE followed by ATTACH, because
-- CREATE TABLE … PARTITION OF would block every producer.
CREATE FUNCTION make_partition(
    parent regclass, number bigint, width bigint DEFAULT 100000000000
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    child text := (SELECT relname FROM pg_class WHERE oid = parent) || '_' || number;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', child, parent);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                   parent, child, number * width, (number + 1) * width);
END $$;
REVOKE ALL ON FUNCTION make_partition FROM PUBLIC;

DO $$ BEGIN
    PERFORM make_partition(parent, number)
       FROM unnest('{outbox,batch,delivery,attempt}'::regclass[]) parent,
            generate_series(0, 2) number;
END $$;

INSERT INTO batch (batch, high) VALUES (0, 0);
