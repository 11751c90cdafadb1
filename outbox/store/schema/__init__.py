"""The schema's migrations and its version, for a connection of any driver.

Django and Alembic migrate with the application's driver, so nothing here imports one.
"""
