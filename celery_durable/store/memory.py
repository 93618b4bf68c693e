"""Stores in the memory of this process, for tests: made once, and emptied from then on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Column, MetaData, String, Table

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
        _create_tables(store)
        _empty[prefix] = sqlite3.connect(":memory:", check_same_thread=False)
        _connection(store).backup(_empty[prefix])
    _empty[prefix].backup(_connection(store))
    try:
        yield store
    finally:
        store.stopped_at.clear()
        idle.append(store)


def _create_tables(store: Store) -> None:
    """What the migrations would come to. To import Alembic would take the longest part of a first test."""
    schema = store.context.schema
    versions = Table(schema.version_table, MetaData(), Column("version_num", String(32), nullable=False))
    with store.database.transaction() as connection:
        schema.metadata.create_all(connection)
        versions.create(connection)
        connection.execute(versions.insert().values(version_num=_newest_version()))


def _newest_version() -> str:
    names = (path.name for path in (Path(__file__).parent / "migrations" / "versions").glob("[0-9]*.py"))
    return max(names).partition("_")[0]


def _connection(store: Store) -> sqlite3.Connection:
    """The one connection of a store in memory, which keeps its database alive."""
    borrowed = store.database.engine.raw_connection()
    connection: Any = borrowed.driver_connection
    borrowed.close()
    assert isinstance(connection, sqlite3.Connection)
    return connection
