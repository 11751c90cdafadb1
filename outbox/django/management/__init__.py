"""Management commands of the Django project."""
