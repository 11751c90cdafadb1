"""PostgreSQL: the only place with SQL.  Every statement has a name and a reason."""
