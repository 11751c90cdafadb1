"""`python -m outbox` is the command `outbox`."""

from outbox.cli.main import main

main()
