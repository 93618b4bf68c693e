"""Stores in the memory of this process, for tests: made once, and emptied from then on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_durable.store.store import Store

# By table prefix: a database in memory that has the tables, and nothing in them.
_empty: dict[str, sqlite3.Connection] = {}
# By namespace and prefix: stores that nobody uses now. What takes long is to put statements together, and an
# engine remembers those.
_idle: dict[tuple[str, str], list[Store]] = {}


@contextmanager
def store_in_memory(*, namespace: str, prefix: str) -> Iterator[Store]:
    """An empty store for the length of this block."""
    idle = _idle.setdefault((namespace, prefix), [])
    store = idle.pop() if idle else Store("sqlite://", namespace=namespace, prefix=prefix)
    if prefix not in _empty:
        store.upgrade()
        _empty[prefix] = sqlite3.connect(":memory:", check_same_thread=False)
        _connection(store).backup(_empty[prefix])
    _empty[prefix].backup(_connection(store))
    try:
        yield store
    finally:
        store.stopped_at.clear()
        idle.append(store)


def _connection(store: Store) -> sqlite3.Connection:
    """The one connection of a store in memory, which keeps its database alive."""
    borrowed = store.database.engine.raw_connection()
    connection: Any = borrowed.driver_connection
    borrowed.close()
    assert isinstance(connection, sqlite3.Connection)
    return connection
