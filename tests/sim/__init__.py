"""Whole relays on virtual time, beside a simulated database, network and receivers.

    clockwork     processes with event loops of their own, one clock, one queue
    database/     the tables, transactions, locks and sessions of the server, and an
                  answer to each statement of `outbox.store`
    receivers     the network to the receivers, and what these do
    producers     the application; operators: people
    faults        what goes wrong; moments: when it hurts most
    checks        what must hold at every step; rest: at the end; books: what they go by;
                  timetable, replayed, operational: of what they say in their names
    mutants       known mistakes, each of which must be caught
    fleet         the relays' processes
    simulation    one seed, from the set-up to the verdict; hunt: many of them
    agreement     one script for both servers, the real one and ours

The relays are the real ones, from `outbox.relay.relay` down to the Python side of
`outbox.store`; what answers them is written anew here, from PostgreSQL's rules
about snapshots, row locks, sequences and notifications.  `test_agreement` holds the
answers against those of a real server.

    python3 run.py sim --seeds 10000           a long hunt
    python3 run.py sim --seed 42 --trace       one seed, step by step
"""
