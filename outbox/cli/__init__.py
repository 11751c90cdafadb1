"""The command `outbox`: words for people, exit codes and JSON for machines."""
