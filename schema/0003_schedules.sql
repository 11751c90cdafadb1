-- Delayed events and schedules.  Both are due by the database's clock, and a relay moves
-- them into the outbox.

-- ---------------------------------------------------------- delayed events

-- An event with a `deliver_at` in the future: publish() inserts it here, and the relay moves
-- it into the outbox with one statement.  It has the columns and constraints of the outbox,
-- including the current payload limit, so an invalid event is rejected when it is published.
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
-- Events of one key are published in order of deliver_at, then of insertion.
CREATE INDEX future_event_due ON future_event (deliver_at, id);
CREATE UNIQUE INDEX future_event_event ON future_event (event_id);

-- --------------------------------------------------------------- schedules

-- A cron schedule that publishes an event at each run.  tenant, type, key, payload and
-- headers are those of every event, under the outbox's constraints.
CREATE TABLE schedule (
    LIKE outbox INCLUDING CONSTRAINTS,
    name           text        NOT NULL UNIQUE,
    cron           text        NOT NULL,  -- five fields, or a nickname such as @daily
    timezone       text        NOT NULL,  -- name in the IANA database: Europe/Berlin

    -- Runs missed while no relay ran: `skip` publishes those at most grace_s seconds late,
    -- `once` publishes one event for all of them, `all` publishes each.
    misfire        text        NOT NULL CHECK (misfire IN ('skip', 'once', 'all')),
    grace_s        double precision NOT NULL CHECK (grace_s >= 0),
    -- `wait`: the next run starts after the last event was delivered or dead-lettered.
    overlap        text        NOT NULL CHECK (overlap IN ('allow', 'wait')),

    state          text        NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused')),
    state_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    state_by       text,                  -- who set the state
    state_comment  text,                  -- comment given with the change

    next_at        timestamptz NOT NULL,  -- the first run that is not decided yet
    due_at         timestamptz NOT NULL,  -- next_at, or later while the last run is pending
    last_at        timestamptz,           -- the scheduled time of the last published run
    last_run_at    timestamptz,           -- when it was published
    last_outbox_id bigint,
    last_event_id  uuid,

    PRIMARY KEY (id),
    -- The name is sent as a header.
    CONSTRAINT name_must_be_1_to_100_letters_digits_dots_or_dashes
        CHECK (name ~ '^[A-Za-z0-9._-]{1,100}$'),
    -- The relay adds headers that identify the schedule.
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
    -- The copied constraint was dropped with event_id; the outbox would reject each event.
    ADD CONSTRAINT type_outbox_is_reserved_for_operational_events
        CHECK (NOT starts_with(type, 'outbox.'));
CREATE INDEX schedule_due ON schedule (due_at, id) WHERE state = 'active';
