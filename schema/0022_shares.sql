-- Relays stop first.
--
-- What keeps one tenant from taking what others need.

-- ------------------------------------------------------------------ erasure

-- The last erasure of a tenant: it has erased all events up to `data ->> 'through_id'`.
CREATE INDEX journal_erased ON journal ((data ->> 'tenant'), id) WHERE kind = 'erased';
