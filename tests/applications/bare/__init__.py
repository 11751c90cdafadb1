"""Programs that use `outbox-relay` without an extra, with a DSN and a version as arguments.

They run in the environments of `tests.applications.test_bare`, and import no other test module.
"""
