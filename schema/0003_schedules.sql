-- What enters the outbox by the clock: events that wait for their time, and
-- schedules.  The database's clock decides, and a relay moves them.

-- ----------------------------------------------------------- future events

-- An event that waits for `deliver_at`: publish() writes it here, and the relay moves
-- it into the outbox, by one statement.  It has the columns and the rules of the
-- outbox, whatever its payload limit is now: what would be refused when its time has
-- come is refused when it is published.
CREATE TABLE future_event (
    LIKE outbox INCLUDING CONSTRAINTS,
    deliver_at timestamptz NOT NULL,

    PRIMARY KEY (id),
    CONSTRAINT deliver_at_must_be_finite CHECK (isfinite(deliver_at)),
    CONSTRAINT expires_at_must_be_after_deliver_at CHECK (expires_at > deliver_at)
);
ALTER TABLE future_event
    DROP COLUMN erased_at,
    ALTER payload SET NOT NULL,
    ALTER id ADD GENERATED ALWAYS AS IDENTITY,
    ALTER created_at SET DEFAULT clock_timestamp();
-- Those of one key go in the order of their time, then in that of their insertion.
CREATE INDEX future_event_due ON future_event (deliver_at, id);
CREATE UNIQUE INDEX future_event_event ON future_event (event_id);

-- --------------------------------------------------------------- schedules

-- An event that is published again and again, by a cron expression: tenant, type,
-- key, payload and headers are those of each of them, under the outbox's rules.
CREATE TABLE schedule (
    LIKE outbox INCLUDING CONSTRAINTS,
    name           text        NOT NULL UNIQUE,
    cron           text        NOT NULL,  -- five fields, or a nickname such as @daily
    timezone       text        NOT NULL,  -- of the IANA database: Europe/Berlin

    -- What becomes of ticks whose time went by while no relay ran: `skip` publishes
    -- those that are at most grace_s old, `once` one for all, `all` each.
    misfire        text        NOT NULL CHECK (misfire IN ('skip', 'once', 'all')),
    grace_s        double precision NOT NULL CHECK (grace_s >= 0),
    -- `wait`: the next run only after the last one was delivered or given up.
    overlap        text        NOT NULL CHECK (overlap IN ('allow', 'wait')),

    state          text        NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused')),
    state_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    state_by       text,                  -- who set it
    state_why      text,                  -- and what for

    next_at        timestamptz NOT NULL,  -- the first tick that is not decided yet
    look_at        timestamptz NOT NULL,  -- next_at, or later while the last run is waited for
    last_at        timestamptz,           -- the tick that was published last
    last_run_at    timestamptz,           -- and when that was
    last_outbox_id bigint,
    last_event_id  uuid,

    PRIMARY KEY (id),
    -- It is sent as a header.
    CONSTRAINT name_must_be_1_to_100_letters_digits_dots_or_dashes
        CHECK (name ~ '^[A-Za-z0-9._-]{1,100}$'),
    -- Each event gets headers that tell of its schedule.
    CONSTRAINT headers_must_be_at_most_7680_bytes
        CHECK (octet_length(headers::text) <= 7680)
);
ALTER TABLE schedule
    DROP COLUMN event_id,
    DROP COLUMN expires_at,
    DROP COLUMN erased_at,
    ALTER payload SET NOT NULL,
    ALTER id ADD GENERATED ALWAYS AS IDENTITY,
    ALTER created_at SET DEFAULT clock_timestamp(),
    -- The one of this name went with event_id; the outbox would refuse each of its events.
    ADD CONSTRAINT type_outbox_is_reserved_for_operational_events
        CHECK (NOT starts_with(type, 'outbox.'));
CREATE INDEX schedule_due ON schedule (look_at, id) WHERE state = 'active';
