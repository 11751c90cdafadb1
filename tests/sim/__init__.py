"""Whole relays in virtual time, with a simulated database, network and receivers.

    clockwork     processes with event loops of their own, one clock, one queue
    database/     the tables, transactions, locks and sessions of the server
    stores/       stand-ins for the stores of `outbox.store`, method by method
    receivers     the receivers and the network to them; received: what they have seen
    producers     the application; operators: the commands of operators
    faults        the faults; fault_plan: when they occur; moments: what most of them wait for
    restores      the database is replaced by an earlier dump of it
    checks        invariants of every step; rest: of the end; books: their data;
                  timetable, replayed, operational: of schedules, replays, events
    mutants       known mistakes, each of which must be caught
    fleet         the relays' processes
    simulation    one seed, from the set-up to the final checks; hunt: many seeds
    agreement     one script of calls for the real stores and for the simulated ones

The relays are the real ones.  Their connections have simulated stores, which are written
from PostgreSQL's rules about snapshots, row locks, sequences and notifications, and know
no text of SQL.  `test_agreement` compares them with the real stores and a real server;
`test_stores` compares their methods.

    python3 run.py sim --seeds 10000           a long hunt
    python3 run.py sim --seed 42 --trace       one seed, with a log of its steps
"""
