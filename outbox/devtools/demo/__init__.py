"""`outbox demo`: a real database, an application, a relay that is killed, and checks."""
