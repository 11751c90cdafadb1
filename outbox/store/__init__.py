"""PostgreSQL: connections, migrations, and the SQL of the relay.

Operations, producers and the receiver's inbox have their own SQL, in their packages.  Every
statement has a name and a reason.
"""
