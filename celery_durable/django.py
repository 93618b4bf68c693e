"""The little that is known of Django here; it is not imported unless the application did."""

from __future__ import annotations

import sys


def in_open_transaction() -> bool:
    """Whether the calling thread is inside an ``atomic`` block of Django's."""
    database = sys.modules.get("django.db")
    connections = getattr(database, "connections", None)
    if connections is None:
        return False
    return any(connection.in_atomic_block for connection in connections.all(initialized_only=True))
