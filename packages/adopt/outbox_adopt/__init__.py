"""`outbox adopt`: move in from another outbox table.

Theory of operation.  An adoption has a table, a mapping of its columns, and a phase:

    plan ──start──> dual_run ──cut-over──> held ──> cut_over ──retire──> (no adoption)
                       │                    │           │
                       └──undo              └──undo     └──undo──> returning ──> (no adoption)

*Dual run.*  A trigger publishes an event of each new row in the application's transaction, with
the prefix `shadow.` before its type: only an endpoint that subscribes to `shadow.*` gets it.
The old poller delivers as before.

*Held.*  From now on the trigger hides new rows from the old poller: it marks them as sent, or
deletes them, and keeps their events in the ledger.  The cut-over does the same with all pending
rows, in batches from the last row on: the old poller sends from the first one on, so it sends
no row after a held one.  Rows that the poller has locked are left to it, and held if it does not
send them.  A poller that locks nothing may have read rows before: for a settling time, each row
that it still marks as sent is struck off the ledger.  Then the held rows are published in the
order of the old table, in batches; the last batch also replaces the trigger.

*Cut over.*  The trigger publishes each new row in the application's transaction, and hides it.

Order: a change of phase replaces the trigger, for which PostgreSQL waits for all transactions that
have written to the table, and lets later ones wait.  So an event of the trigger has a higher id
than every held one, and is committed after them.

Each step is one message or statement; one that locks the table is sent again if its locks are not
granted (see `outbox.store.connection.lock_retry`): an operator's client that falls silent holds
nothing, and an interrupted command can be run again.  All of them lock the adoption's row, so
that two commands run one after the other.

Rights: the triggers run with the rights of the role that made them.  It owns the adopted table, the
schema and everything that the table uses, so that code of another role gets no rights by them; see
`read_source`.  The application's role needs no new privilege.
"""
