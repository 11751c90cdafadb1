"""PostgreSQL: connections, migrations, and the SQL of the relay.

Operations, producers and the receiver's inbox have the SQL of their own, in their packages.  Every
statement has a name and a reason.
"""
