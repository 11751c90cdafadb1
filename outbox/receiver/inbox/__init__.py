"""What a receiver remembers, in the database of its effects: each takes part in the other's
transaction, so that an event is processed and remembered, or neither.

    taking        how one delivery is taken: a plan of statements, without any I/O
    statements    the SQL, for PostgreSQL and for SQLite
    drivers       runs it on asyncpg, psycopg, SQLAlchemy, Django and sqlite3
    inbox         all of that behind one name
    memory        the same without a database, for a window of time
"""
