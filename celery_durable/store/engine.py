"""Connections: an engine for each process, short transactions, errors in our own words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.pool import StaticPool

from celery_durable.errors import StoreUnavailable

#: Connections of one process for its tasks, its main process or its scheduler. The heartbeats have
#: one more of their own.
POOL_SIZE = 4
#: Seconds to wait for a connection to be made, and for SQLite's one write lock.
CONNECT_TIMEOUT = 5
BUSY_TIMEOUT = 10.0

_STATEMENTS = "celery_durable_statements"
_UNDEFINED_TABLE = "42P01"

# Engines inherited over a fork. Their sockets belong to the parent: they are neither used nor closed
# here, and kept referenced so that the garbage collector does not close them either.
_inherited: list[Engine] = []


class Database:
    """The way to one database, safe over forks: each process makes connections of its own."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        pool_size: int = POOL_SIZE,
        busy_timeout: float = BUSY_TIMEOUT,
        statement_timeout: float | None = None,
    ) -> None:
        self._url = make_url(url)
        self._options = dict(options or {})
        self._pool_size = pool_size
        self._busy_timeout = busy_timeout
        self._statement_timeout = statement_timeout
        self._engine: Engine | None = None
        self._pid = 0
        self._lock = threading.Lock()

    @property
    def dialect_name(self) -> str:
        return self._url.get_backend_name()

    @property
    def is_sqlite(self) -> bool:
        return self.dialect_name == "sqlite"

    @property
    def is_in_memory(self) -> bool:
        return self.is_sqlite and self._url.database in (None, "", ":memory:")

    @property
    def file(self) -> str:
        """The path of a SQLite file."""
        return self._url.database or ""

    @property
    def url(self) -> str:
        """The address without its password."""
        return self._url.render_as_string(hide_password=True)

    @property
    def engine(self) -> Engine:
        """This process's engine."""
        if self._engine is None or self._pid != os.getpid():
            self._open()
        assert self._engine is not None
        return self._engine

    def _open(self) -> None:
        if self._pid != os.getpid():
            # The lock may have been held by a thread that does not exist on this side of the fork.
            self._lock = threading.Lock()
        with self._lock:
            if self._engine is not None and self._pid == os.getpid():
                return
            if self._engine is not None:
                _inherited.append(self._engine)
            self._engine = self._sqlite() if self.is_sqlite else self._postgresql()
            self._pid = os.getpid()

    def _postgresql(self) -> Engine:
        arguments: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT,
            "application_name": "celery_durable",
            # Dead peers are noticed in seconds, not in the two hours of the kernel's default.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        if self._statement_timeout is not None:
            arguments["options"] = f"-c statement_timeout={int(self._statement_timeout * 1000)}"
        options = {
            "pool_size": self._pool_size,
            "max_overflow": 0,
            "pool_timeout": 30,
            **self._options,
        }
        options["connect_args"] = {**arguments, **self._options.get("connect_args", {})}
        return create_engine(self._url, **options)

    def _sqlite(self) -> Engine:
        options: dict[str, Any] = {**self._options}
        if self.is_in_memory:
            # One connection, or each thread would see an empty database of its own.
            options.setdefault("poolclass", StaticPool)
        else:
            options.setdefault("pool_size", self._pool_size)
            options.setdefault("max_overflow", 0)
        options["connect_args"] = {
            "check_same_thread": False,
            "timeout": self._busy_timeout,
            **self._options.get("connect_args", {}),
        }
        engine = create_engine(self._url, **options)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
        return engine

    @contextmanager
    def statements(self) -> Iterator[Connection]:
        """A connection on which each statement is a transaction of its own.

        Raises:
            StoreUnavailable: the database cannot be reached, or refused for now.
        """
        with _translated(self), self.engine.connect() as connection:
            if self.is_sqlite:
                yield connection.execution_options(**{_STATEMENTS: True})
            else:
                yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One short transaction: committed at the end, rolled back by an exception.

        Raises:
            StoreUnavailable: the database cannot be reached, or refused for now.
        """
        with _translated(self), self.engine.begin() as connection:
            yield connection

    def dispose(self) -> None:
        """Close this process's connections."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()


@contextmanager
def _translated(database: Database) -> Iterator[None]:
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, exc.InternalError) as error:
        raise StoreUnavailable(f"{database.url}: {_first_line(error)}") from error
    except exc.DBAPIError as error:
        # SQLite counts a missing table among the operational errors; a worker is about to create it.
        if error.connection_invalidated or getattr(error.orig, "sqlstate", None) == _UNDEFINED_TABLE:
            raise StoreUnavailable(f"{database.url}: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().split("\n", 1)[0] or type(cause).__name__


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own transactions begin too late: a read before the write would lie outside, and
    # two read-then-write transactions would lose an update. So we begin them ourselves.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: what was committed survives a power cut; the default of WAL builds (NORMAL) may lose the last.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    # Without an open transaction the driver commits each statement by itself.
    if not connection.get_execution_options().get(_STATEMENTS):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
