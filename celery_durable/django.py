"""The little that is known of Django here; it is not imported unless the application did."""

from __future__ import annotations

import sys


def open_transactions() -> int:
    """How many ``atomic`` blocks of Django's the calling thread is inside of."""
    database = sys.modules.get("django.db")
    connections = getattr(database, "connections", None)
    if connections is None:
        return 0
    found = 0
    for connection in connections.all(initialized_only=True):
        # Before 4.1 Django knows only whether it is in one.
        found += len(getattr(connection, "atomic_blocks", ())) or int(connection.in_atomic_block)
    return found
