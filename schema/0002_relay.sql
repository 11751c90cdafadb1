-- The relay's half: endpoints, the cursor, lanes, deliveries, attempts and
-- dead letters.
--
-- Who writes what, so that no two writers wait for each other:
--   * the sequencer (the replica that leads): batch, gap, delivery,
--     lane_counter, and how far replays are (replay, replay_part);
--   * the owner of an endpoint: lane_progress, lane_block, attempt,
--     dead_letter, endpoint_health;
--   * a command of an operator, under the cursor row: endpoint, subscription,
--     lane, replay_job.

-- ------------------------------------------------------------ the timeline

-- The server's timeline: its number rises with every promotion of a standby, and
-- with every recovery to an earlier moment.  Both may take back what was
-- committed, numbers that were given out among it.  NULL: this server does not
-- say, because it is a standby, or because its operator or provider forbids it.
CREATE FUNCTION server_timeline() RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION server_timeline FROM PUBLIC;

-- The number of an endpoint's next generation of lanes.  It is part of their
-- names, and no name may be used twice, although a change of lanes may be taken
-- back together with the timeline that it was made on: so each timeline has a
-- million numbers to itself.
CREATE FUNCTION next_generation(generation bigint) RETURNS bigint
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT greatest(generation + 1, (coalesce(server_timeline(), 1) - 1) * 1000000 + 1)
$$;
REVOKE ALL ON FUNCTION next_generation FROM PUBLIC;

-- --------------------------------------------------------------- endpoints

-- A destination, and what its operator asked for.  `state` is the operator's
-- word (and the owner's, when it disables); how well it works is endpoint_health.
CREATE TABLE endpoint (
    id              uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    name            text        NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
    state           text        NOT NULL DEFAULT 'active'
                    CHECK (state IN ('active', 'paused', 'disabling', 'disabled',
                                     'removing', 'removed')),
    state_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    state_by        text,                     -- who set it
    state_why       text,                     -- and what for

    -- What it receives; a change begins a new version in `subscription`.
    types           text[]      NOT NULL DEFAULT '{**}',
    tenant          text,                     -- NULL: events without a tenant
    all_tenants     boolean     NOT NULL DEFAULT false,
    filter          text,                     -- the inside of jsonpath's $ ? (…)

    -- How a request is made.
    url             text        NOT NULL,
    method          text        NOT NULL DEFAULT 'POST' CHECK (method IN ('POST', 'PUT', 'PATCH')),
    headers         jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    connect_timeout_s double precision NOT NULL DEFAULT 5,
    total_timeout_s   double precision NOT NULL DEFAULT 15,
    in_flight_max   integer     CHECK (in_flight_max > 0),            -- NULL: one for each lane
    rate_per_s      double precision CHECK (rate_per_s > 0),          -- NULL: no limit
    batch_max       integer     CHECK (batch_max > 0),                -- NULL: each by itself

    -- Where a request may go beside the open internet, and whom it trusts there.
    allow_networks  text[]      NOT NULL DEFAULT '{}',
    ca              text,                     -- PEM; NULL: the system's authorities
    identity        text,                     -- our own certificate and its key, for mutual TLS
    identity_about  jsonb,                    -- what of it may be shown

    -- What happens when one fails.
    retry           jsonb       NOT NULL,     -- the numbers of a RetryPolicy
    retryable       text[],                   -- statuses such as 429, 5xx; NULL: the usual ones
    on_dead_letter  text        NOT NULL DEFAULT 'continue'
                    CHECK (on_dead_letter IN ('continue', 'block')),
    backlog_count_max bigint           CHECK (backlog_count_max > 0),   -- NULL: no limit
    backlog_age_max_s double precision CHECK (backlog_age_max_s > 0),   -- NULL: no limit
    disable_after_s   double precision NOT NULL DEFAULT 259200 CHECK (disable_after_s > 0),

    -- How often its receiver is told the last number of each lane; NULL: never.
    checkpoint_every_s double precision CHECK (checkpoint_every_s >= 1),

    lanes           integer     NOT NULL CHECK (lanes BETWEEN 1 AND 1024),
    generation      bigint      NOT NULL DEFAULT 1,  -- rises when lanes change
    resumes         integer     NOT NULL DEFAULT 0,  -- rises when somebody says: try now
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (NOT (all_tenants AND tenant IS NOT NULL))
);
-- A name is free again once its endpoint is removed.
CREATE UNIQUE INDEX endpoint_name ON endpoint (name) WHERE state <> 'removed';

-- Whoever removes an endpoint need not be one who may write its headers.
CREATE FUNCTION forget_credentials() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    NEW.headers := '{}';
    NEW.identity := NULL;
    RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION forget_credentials FROM PUBLIC;
CREATE TRIGGER forget_credentials
    BEFORE UPDATE OF state ON endpoint FOR EACH ROW
    WHEN (NEW.state = 'removed')
    EXECUTE FUNCTION forget_credentials();

-- What signs, `whsec_…` or (ed25519) `whsk_…`; two are live while one replaces the other.
--
-- These, an endpoint's `identity`, and the values of its headers are secrets.  Where relays
-- have a key they are encrypted: see outbox/store/connection/secrets.py.
CREATE TABLE endpoint_secret (
    endpoint_id uuid        NOT NULL REFERENCES endpoint,
    id          integer     NOT NULL,
    secret      text        NOT NULL,
    key_id      text        GENERATED ALWAYS AS (   -- what it is encrypted with; NULL: in clear
                    CASE WHEN secret LIKE 'sealed:%' THEN split_part(secret, ':', 2) END) STORED,
    public_key  text,                               -- what the receiver has; NULL: the secret
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz,
    PRIMARY KEY (endpoint_id, id)
);

-- What an endpoint receives, versioned: it holds for batches [from, to), so a
-- missing delivery can be told from a missing subscription.
CREATE TABLE subscription (
    endpoint_id uuid    NOT NULL REFERENCES endpoint,
    from_batch  bigint  NOT NULL,
    to_batch    bigint,
    types       text[]  NOT NULL,
    tenant      text,
    all_tenants boolean NOT NULL,
    filter      text,
    -- Since when it counts as met, because it is slow or fails; in one line.
    filter_stopped_at  timestamptz,
    filter_stopped_why text,
    PRIMARY KEY (endpoint_id, from_batch)
);
CREATE INDEX subscription_current ON subscription (endpoint_id) WHERE to_batch IS NULL;

-- Whether a payload meets a filter; NULL: it cannot be evaluated, for which the
-- relay takes it as met.  For looking back at single events: to ask about many
-- at once, without a subtransaction for each, is the sequencer's business.
CREATE FUNCTION meets(payload jsonb, filter text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN coalesce(payload @? ('$ ? (' || filter || ')')::jsonpath, false);
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION meets FROM PUBLIC;

-- What an endpoint's owner knows of its health, kept so that the next owner need
-- not learn it anew.  A row of its own, because the owner writes it and the
-- operator writes `endpoint`.
CREATE TABLE endpoint_health (
    endpoint_id uuid        PRIMARY KEY REFERENCES endpoint,
    epoch       bigint      NOT NULL DEFAULT 0,  -- of the owner that may write
    state       text        NOT NULL DEFAULT 'healthy'
                CHECK (state IN ('healthy', 'failing', 'refusing', 'recovering')),
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    resumes     integer     NOT NULL DEFAULT 0,  -- endpoint.resumes, as last obeyed
    held_until  timestamptz,                     -- the receiver's Retry-After
    last_answer jsonb,                           -- what led to this state
    -- What an operational event told of it, so that the next owner tells no more than
    -- what follows from that.  NULL: nothing, or that it was over.
    told_held_since timestamptz,                 -- that it is held
    told_stalled_at timestamptz                  -- that a lane has had no success for long
);

-- An ordered stream of deliveries to one endpoint.  When the number of lanes or
-- the server's timeline changes, a new generation begins; the lanes of the old one
-- get nothing more, and the new one is sent when they are drained.
CREATE TABLE lane (
    id          bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id uuid    NOT NULL REFERENCES endpoint,
    generation  bigint  NOT NULL,
    slot        integer NOT NULL,
    UNIQUE (endpoint_id, generation, slot)
);

-- The last number given out in a lane.  Apart from lane_progress, because as
-- one table the sequencer and the owner deadlock.
-- One row for a lane.  The number is part of the key, because it rises with every
-- batch: while somebody keeps old versions of rows from being cleaned away, the newest
-- one is found by its number, or from the top, and none of the old ones is met.
CREATE TABLE lane_counter (
    lane_id  bigint NOT NULL REFERENCES lane,
    last_seq bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (lane_id, last_seq)
) WITH (fillfactor = 50);

-- Counts a lane on.  A statement for each lane, because of a join the planner, who
-- takes the table for as small as its newest rows are, may go through all of it.
CREATE FUNCTION count_on(lane bigint, was bigint, is_now bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE lane_counter SET last_seq = is_now WHERE lane_id = lane AND last_seq = was;
    IF NOT FOUND THEN
        UPDATE lane_counter SET last_seq = is_now WHERE lane_id = lane;
    END IF;
END $$;
REVOKE ALL ON FUNCTION count_on FROM PUBLIC;

-- How far a lane is: a checkpoint.  The truth is the checkpoint plus the
-- delivered rows of `attempt` behind it.  Retry state belongs to the number
-- acked_seq + 1, the only one that can be failing, and names it.
CREATE TABLE lane_progress (
    lane_id          bigint PRIMARY KEY REFERENCES lane,
    endpoint_id      uuid   NOT NULL REFERENCES endpoint,
    epoch            bigint NOT NULL DEFAULT 0,  -- of the owner that may write
    acked_seq        bigint NOT NULL DEFAULT 0,  -- delivered or given up, up to here
    delivered_seq    bigint NOT NULL DEFAULT 0,  -- the last one not given up
    floor_batch      bigint NOT NULL DEFAULT 0,  -- nothing owed lies below it
    head_seq         bigint,                     -- whom the retry state is of
    attempts         integer NOT NULL DEFAULT 0, -- requests made for it
    spent            integer NOT NULL DEFAULT 0, -- those that count: probes are free
    first_attempt_at timestamptz,
    next_attempt_at  timestamptz,
    last_answer      jsonb,
    success_at       timestamptz                 -- of the last delivery
) WITH (fillfactor = 50);
CREATE INDEX lane_progress_endpoint ON lane_progress (endpoint_id);

-- Lanes that wait for an operator, because a delivery was given up and their
-- endpoint says `block`.  The owner adds a row; an operator takes it away by
-- replaying or discarding the dead letter, or by resuming the endpoint.
CREATE TABLE lane_block (
    lane_id bigint      PRIMARY KEY REFERENCES lane,
    seq     bigint      NOT NULL,                -- the number that was given up
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- -------------------------------------------------------------- the cursor

-- A lock with a name on it.  `writer` is the replica that leads: it wrote last,
-- and its memory of the gaps' holders is the only one that can be trusted.
-- `version` rises with every change of who gets what.  A batch is written by who
-- holds this row and finds both as it knows them.  `timeline` is the server's, as
-- of the last batch: on another one, numbers that were given out may be unknown
-- here, so whoever leads begins new lanes before it sequences anything.
CREATE TABLE cursor (
    one         boolean     PRIMARY KEY DEFAULT true CHECK (one),
    writer      bigint,
    version     bigint      NOT NULL DEFAULT 1,
    erasures    bigint      NOT NULL DEFAULT 0, -- rises when payloads were erased
    timeline    bigint,                       -- NULL: the server did not say yet
    timeline_at timestamptz,                  -- when it changed; NULL: never
    lagging     boolean     NOT NULL DEFAULT false, -- it was told that events wait long,
    lagging_at  timestamptz                   -- and is not over; when that was told last
);
INSERT INTO cursor DEFAULT VALUES;

-- One row per batch of the sequencer; the newest is the cursor's state.
-- Every id up to `high` is sequenced, in an open gap, or proven dead.
CREATE TABLE batch (
    batch      bigint         NOT NULL,
    high       bigint         NOT NULL,
    young      int8multirange NOT NULL DEFAULT '{}',  -- open gaps, all of the young ones
    found      int8multirange NOT NULL DEFAULT '{}',  -- late ids sequenced by this batch
    dead       int8multirange NOT NULL DEFAULT '{}',  -- ids proven never to appear
    events     integer        NOT NULL DEFAULT 0,
    deliveries integer        NOT NULL DEFAULT 0,
    lanes      bigint[]       NOT NULL DEFAULT '{}',  -- who got something
    writer     bigint,
    at         timestamptz    NOT NULL DEFAULT clock_timestamp(),
    -- When a read began that saw all that was committed, and none of this batch's
    -- events: each of them was committed later.  NULL: not known.
    committed_after timestamptz,
    PRIMARY KEY (batch)
) PARTITION BY RANGE (batch);
CREATE INDEX batch_at ON batch (at);
-- Which batch an event is in: the first that is as high, unless it came late.
CREATE INDEX batch_high ON batch (high, batch);
CREATE INDEX batch_found ON batch (batch) WHERE NOT isempty(found);

-- Open gaps older than a second.  Read again only when one of their holders
-- ended, so a transaction open for hours costs nothing per batch.
CREATE TABLE gap (
    lo bigint PRIMARY KEY,
    hi bigint NOT NULL,           -- inclusive
    CHECK (lo <= hi)
);

-- One event in one lane.  Partitioned by batch, not by event: lanes are read
-- from their own batch on, and so touch only the newest partitions.
CREATE TABLE delivery (
    lane_id     bigint NOT NULL,
    batch       bigint NOT NULL,
    seq         bigint NOT NULL,
    outbox_id   bigint NOT NULL,
    replay_id   bigint,           -- set when this is sent again for a number of a lane,
    replay_seq  bigint,           -- and which number it stands for
    backfill_id bigint,           -- the job that gives it an X-Delivery of its own
    copy_id     bigint,           -- the dead letter that has a copy of the event
    was_backfill_id bigint,       -- of a job of kind lane: the backfill_id of what is sent again
    PRIMARY KEY (lane_id, batch, seq)
) PARTITION BY RANGE (batch);
-- By lane, so that what became of a replay of a million numbers is told by the
-- first and the last one in each lane that it went to.
CREATE INDEX delivery_replay ON delivery (replay_id, lane_id, seq) WHERE replay_id IS NOT NULL;
-- And by event; its other deliveries are found through its batch.
CREATE INDEX delivery_again ON delivery (outbox_id)
 WHERE replay_id IS NOT NULL OR backfill_id IS NOT NULL;
-- And by the copy that it needs, also after a replay of a replay.
CREATE INDEX delivery_copy ON delivery (copy_id) WHERE copy_id IS NOT NULL;

-- ---------------------------------------------------------------- delivery

-- Every attempt.  The rows with outcome 'delivered' are the acknowledgements.
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
    answer     jsonb,              -- what is kept of it, bounded
    PRIMARY KEY (lane_id, batch, seq, attempt, replica_id)
) PARTITION BY RANGE (batch);

-- What was given up, with its own copy of the event, so that it can be looked
-- at and replayed after the event's partition is gone.  A range (outbox_id is
-- NULL) stands for numbers that were given up together, unsent.
CREATE TABLE dead_letter (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id  uuid        NOT NULL REFERENCES endpoint,
    lane_id      bigint      NOT NULL REFERENCES lane,
    batch        bigint      NOT NULL,
    seq          bigint      NOT NULL,
    to_seq       bigint      NOT NULL,
    outbox_id    bigint,
    backfill_id  bigint,                       -- as its delivery had it
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
                                   'backlog', 'disabled', 'removed')),
    attempts     integer     NOT NULL,
    last_answer  jsonb,                        -- bounded; NULL: never sent
    began_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),  -- the last of a range
    state        text        NOT NULL DEFAULT 'dead'
                 CHECK (state IN ('dead', 'replaying', 'discarded')),
    replica_id   bigint,
    CHECK (seq <= to_seq),
    UNIQUE (lane_id, seq)
);
CREATE INDEX dead_letter_open ON dead_letter (id) WHERE state = 'dead';
CREATE INDEX dead_letter_owed ON dead_letter (endpoint_id, id) WHERE state = 'dead';
CREATE INDEX dead_letter_endpoint ON dead_letter (endpoint_id, id);
CREATE INDEX dead_letter_outbox ON dead_letter (outbox_id);
CREATE INDEX dead_letter_event ON dead_letter (event_id);
-- Ranges have no copies of their events, so they keep the log and the events.
CREATE INDEX dead_letter_range ON dead_letter (batch) WHERE outbox_id IS NULL AND state = 'dead';

-- What is to be sent again: dead letters or the history of an endpoint, for operators,
-- or what a lane delivered, for its receiver.
-- To ask costs the same whatever its size: the leader takes from it, a helping at
-- a time, within the transactions of its batches (see outbox/core/sequencing/replay_throttle.py).
CREATE TABLE replay_job (
    id         bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind       text             NOT NULL CHECK (kind IN ('dead', 'history', 'lane')),
    state      text             NOT NULL DEFAULT 'running'
               CHECK (state IN ('running', 'done', 'aborted')),
    -- Which ones; NULL: whichever.
    endpoint   text,                          -- the name that was said
    lane_id    bigint           REFERENCES lane,
    types      text[],
    tenant     text,
    reason     text,
    since      timestamptz,
    until      timestamptz,                   -- exclusive
    -- Of history: gaps that were open when it was asked for.  What comes to light in
    -- them is sequenced after that, and so delivered anyway.
    gaps       int8multirange   NOT NULL DEFAULT '{}',
    rate_per_s double precision CHECK (rate_per_s > 0),    -- NULL: as fast as is good
    asked_at   timestamptz      NOT NULL DEFAULT clock_timestamp(),
    asked_by   text             NOT NULL,
    ended_at   timestamptz,
    CHECK ((kind = 'lane') = (lane_id IS NOT NULL))
);

-- A job at one endpoint: how far it is, in ids of dead letters or of events, or in
-- numbers of a lane.  It
-- covers what there was when it was asked for, and so it ends.
CREATE TABLE replay_part (
    job_id      bigint NOT NULL REFERENCES replay_job,
    endpoint_id uuid   NOT NULL,  -- who asks holds no endpoint while it waits for the cursor
    first_id    bigint NOT NULL,
    next_id     bigint NOT NULL,              -- the next one to look at
    last_id     bigint NOT NULL,
    expected    bigint,                       -- how many there were; NULL: nobody counted
    taken       bigint NOT NULL DEFAULT 0,    -- deliveries made of it
    erased      bigint NOT NULL DEFAULT 0,    -- passed over: the event is gone
    batch       bigint,                       -- that the last helping went into
    -- The lowest id of an event that a backfill may still have to read: retention keeps
    -- that and what is above while the part has not ended.
    from_id     bigint,
    ended_at    timestamptz,                  -- all of it was delivered or given up,
    why         text                          -- or nothing more was taken; NULL: it was all
                CHECK (why IN ('aborted', 'disabled', 'removed', 'unsubscribed')),
    PRIMARY KEY (job_id, endpoint_id)
) WITH (fillfactor = 50);
CREATE INDEX replay_part_job ON replay_part (job_id) WHERE ended_at IS NULL;
CREATE INDEX replay_part_endpoint ON replay_part (endpoint_id) WHERE ended_at IS NULL;

-- Numbers of a lane that are being sent again: a dead letter's, one or all of a range,
-- or what the lane of the job delivered.  The next batches consume it, some numbers each,
-- and make deliveries of them.
CREATE TABLE replay (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id      bigint      NOT NULL REFERENCES replay_job,
    endpoint_id uuid        NOT NULL,
    dead_id     bigint      REFERENCES dead_letter,   -- NULL: of the job's lane
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_seq    bigint      NOT NULL,         -- the next one to take
    next_batch  bigint      NOT NULL,         -- none of those left lies below it
    to_seq      bigint      NOT NULL          -- the last one
);
CREATE INDEX replay_pending ON replay (endpoint_id, job_id, id) WHERE next_seq <= to_seq;
CREATE INDEX replay_dead ON replay (dead_id, id);

-- ---------------------------------------------------------------- replicas

-- A running relay.  Locking this row FOR KEY SHARE in the very statement that
-- writes is the fence: whoever buries a replica deletes the row, after which
-- nothing that it still has on the wire to us can be written.
CREATE TABLE replica (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL,
    version    text        NOT NULL,
    pids       integer[]   NOT NULL,           -- its backends, ended at burial
    keys       text[]      NOT NULL DEFAULT '{}', -- ids of those that it decrypts with
    renewals   bigint      NOT NULL DEFAULT 0, -- others watch this, not clocks
    lease_s    double precision NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL
);

-- Who delivers to an endpoint.  The epoch rises with every change of hands.
CREATE TABLE ownership (
    endpoint_id uuid   PRIMARY KEY REFERENCES endpoint,
    replica_id  bigint,                        -- NULL: free to be claimed
    epoch       bigint NOT NULL DEFAULT 0
);
CREATE INDEX ownership_replica ON ownership (replica_id);

-- ----------------------------------------------------------------- history

-- Everything that happened and stands in no other append-only table.
CREATE TABLE journal (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind        text        NOT NULL,
    actor       text        NOT NULL,
    endpoint_id uuid,
    data        jsonb       NOT NULL DEFAULT '{}',
    -- `actor` is what the writer says; this is how it logged in, and not the writer's to say.
    session_role name       NOT NULL DEFAULT session_user
);
CREATE INDEX journal_endpoint ON journal (endpoint_id, id);

-- ----------------------------------------------------------------- periods

-- Ids and batches are numbered by period: those of period n are n × 10^11 and
-- above, and each period has a partition of its own, with room for all that
-- could ever be written in it.  So a period ends when time says so, and is
-- dropped whole.  A new one begins by moving the numbers on, never by moving
-- the bounds of a partition, for which producers would have to wait.
--
-- `events` are periods of outbox ids, `log` those of batches.
CREATE TABLE period (
    kind       text        NOT NULL CHECK (kind IN ('events', 'log')),
    number     bigint      NOT NULL,
    began_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    high       bigint      NOT NULL DEFAULT 0,  -- the cursor's, when it began
    ended_at   timestamptz,
    last_batch bigint,      -- of events: no later batch sequences one of them
    dropped_at timestamptz, -- decided; the partitions go soon after
    PRIMARY KEY (kind, number)
);
INSERT INTO period (kind, number) VALUES ('events', 0), ('log', 0);

-- Makes the partition of a period.  CREATE … LIKE and then ATTACH, because
-- CREATE … PARTITION OF would block every producer.
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
