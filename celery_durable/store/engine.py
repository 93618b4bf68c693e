"""Connections: an engine for each process, short transactions, errors in our own words."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    PoolProxiedConnection,
    QueuePool,
    create_engine,
    event,
    exc,
    make_url,
)

from celery_durable.checks import redacted
from celery_durable.clock import monotonic
from celery_durable.errors import LoginRefused, StoreUnavailable, WrongTables
from celery_durable.store.forks import gate
from celery_durable.store.sqlite import TurnTaker, prepare

#: Connections of one process for its tasks, its main process or its scheduler. The heartbeats have
#: one more of their own.
POOL_SIZE = 4
#: Seconds to wait for a free connection, for one to be made, and for SQLite's one write lock.
POOL_TIMEOUT = 30
CONNECT_TIMEOUT = 5
BUSY_TIMEOUT = 10.0
#: A connection that nobody has used for so many seconds is tried before it is: the server may have been
#: restarted, or a firewall may have forgotten it, and the first statement of a claim must not find out.
IDLE_TIME = 10.0

_TRANSACTION = "celery_durable_transaction"
_USED_AT = "celery_durable_used_at"
#: What PostgreSQL answers when a table, its schema, a column or a function is not there, and SQLite.
_MISSING = frozenset({"42P01", "3F000", "42703", "42883"})
_MISSING_WORDS = ("no such table", "no such column", "no such function", " has no column named ")
#: SQLSTATEs of a login that the server refuses for a reason that stays: no such database, a wrong password,
#: a user that may not. libpq hands on its words only.
_REFUSED = frozenset({"3D000", "28P01", "28000"})
_REFUSED_WORDS = re.compile(
    r'FATAL: +(?:(?:database|role) ".*" does not exist|password authentication failed|no pg_hba\.conf entry)'
    r"|no password supplied"
)
#: What the driver, or the pool, raises when the database cannot be reached or refuses for now.
_AWAY = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, exc.InternalError)


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
        turn_taker: type[TurnTaker] = TurnTaker,
    ) -> None:
        self._url = make_url(url)
        self._options = dict(options or {})
        self._pool_size = pool_size
        self._busy_timeout = busy_timeout
        self._statement_timeout = statement_timeout
        self._turn_taker = turn_taker
        # By process. The sockets of an engine that was inherited over a fork belong to the parent: they are
        # neither used nor closed here, and kept so that the garbage collector does not close them either.
        self._engines: dict[int, Engine] = {}
        if self._outlives_its_connections:
            gate.closes(self)

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
    def _outlives_its_connections(self) -> bool:
        """Whether it is a SQLite file. A shared cache in memory ends with its last connection."""
        is_shared_memory = ":memory:" in self.file or self._url.query.get("mode") == "memory"
        return self.is_sqlite and not (self.is_in_memory or is_shared_memory)

    @property
    def file(self) -> str:
        """The path of a SQLite file."""
        return self._url.database or ""

    @property
    def url(self) -> str:
        """The address without its passwords."""
        return redacted(self._url.render_as_string(hide_password=False))

    @property
    def engine(self) -> Engine:
        """This process's engine."""
        engine = self._engines.get(os.getpid())
        if engine is None:
            # An engine connects when it is first used, so it does no harm if two threads make one each:
            # both use the same. A lock might be held by a thread that the fork has not brought along.
            engine = self._engines.setdefault(os.getpid(), self._made())
        return engine

    def _made(self) -> Engine:
        options: dict[str, Any] = {
            # The parameters are the users' task arguments: they have no place in a log.
            "hide_parameters": True,
            **({} if "poolclass" in self._options else self._pool_options()),
            **self._options,
            # Most of what we do is one statement: nothing begins a transaction but ``transaction``.
            "isolation_level": "AUTOCOMMIT",
        }
        if self.is_sqlite:
            options["connect_args"] = {
                "check_same_thread": False,
                **({"factory": self._turn_taker} if self._url.get_driver_name() == "pysqlite" else {}),
                "timeout": self._busy_timeout,
                **options.get("connect_args", {}),
            }
            engine = create_engine(self._url, **options)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_immediate)
            return engine
        options["connect_args"] = self._postgresql_arguments(options.get("connect_args", {}))
        engine = create_engine(self._url, **options)
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", _Ping(engine))
        return engine

    def _pool_options(self) -> dict[str, Any]:
        if self.is_in_memory:
            # The database is in its one connection: threads wait for each other.
            return {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_timeout": POOL_TIMEOUT}
        return {"pool_size": self._pool_size, "max_overflow": 0, "pool_timeout": POOL_TIMEOUT}

    def _postgresql_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        # Python cannot say the year 10000, which the last hours of 9999 are in some time zones.
        session = ["-c timezone=UTC"]
        if self._statement_timeout is not None:
            session.append(f"-c statement_timeout={int(self._statement_timeout * 1000)}")
        if "options" in given:
            session.append(given["options"])
        return {
            "connect_timeout": CONNECT_TIMEOUT,
            "application_name": "celery_durable",
            # Peers that are gone are noticed in seconds, not in the kernel's hours: while a connection is
            # idle by the first three, while a statement is on its way by the last (milliseconds).
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            **given,
            "options": " ".join(session),
        }

    @contextmanager
    def statements(self) -> Iterator[Connection]:
        """A connection on which each statement is a transaction of its own.

        Raises:
            StoreUnavailable: the database cannot be reached, or refused for now; WrongTables where it lacks
                what the statement is about.
        """
        with self._passing(), _translated(self), self.engine.connect() as connection:
            yield connection

    def execute(self, text: str, parameters: Any, *, returns_rows: bool) -> tuple[Sequence[Any], int]:
        """Run one statement of the driver's, as a transaction of its own, past SQLAlchemy's connections.

        In a task of a millisecond they would cost more than the driver. Returns the rows, and how many were
        changed.

        Raises:
            StoreUnavailable: as ``statements``.
        """
        with self._passing(), _translated(self):
            engine = self.engine
            borrowed: PoolProxiedConnection | None = None
            try:
                borrowed = engine.raw_connection()
                cursor = borrowed.cursor()
                cursor.execute(text, parameters)
                rows: Sequence[Any] = cursor.fetchall() if returns_rows else ()
                return rows, cursor.rowcount
            except engine.dialect.loaded_dbapi.Error as error:
                raise _wrapped(error, text, engine, borrowed) from error
            finally:
                if borrowed is not None:
                    borrowed.close()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One short transaction: committed at the end, rolled back by an exception.

        Raises:
            StoreUnavailable: the database cannot be reached, or refused for now; WrongTables where it lacks
                what the statement is about.
        """
        with self._passing(), _translated(self), self.engine.connect() as connection:
            options = {_TRANSACTION: True} if self.is_sqlite else {"isolation_level": "READ COMMITTED"}
            with connection.execution_options(**options).begin():
                yield connection

    def _passing(self) -> AbstractContextManager[None]:
        return gate.passed() if self.is_sqlite else nullcontext()

    def dispose(self) -> None:
        """Close this process's connections."""
        engine = self._engines.get(os.getpid())
        if engine is not None:
            engine.dispose()


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    prepare(connection)


def _begin_immediate(connection: Connection) -> None:
    # Without an open transaction the driver commits each statement by itself.
    if connection.get_execution_options().get(_TRANSACTION):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _note_use(_connection: Any, record: Any) -> None:
    record.info[_USED_AT] = monotonic()


class _Ping:
    """Tries a connection that was idle, and has it replaced if it does not answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, connection: Any, record: Any, _proxy: Any) -> None:
        used_at = record.info.get(_USED_AT)
        if used_at is None or monotonic() - used_at < IDLE_TIME:
            return
        try:
            self._engine.dialect.do_ping(connection)
        except self._engine.dialect.loaded_dbapi.Error as error:
            # The pool drops its other connections too, and makes this one anew.
            raise exc.InvalidatePoolError from error


def _wrapped(error: Any, text: str, engine: Engine, borrowed: PoolProxiedConnection | None) -> BaseException:
    """An error of the driver's as SQLAlchemy shows it, after what SQLAlchemy does about it.

    Without a connection: none could be made.
    """
    dialect = engine.dialect
    is_lost = False
    if borrowed is not None and dialect.is_disconnect(error, borrowed.dbapi_connection, None):
        is_lost = True
        borrowed.invalidate(error)
        # The others were most likely lost with it.
        engine.dispose()
    wrapped: BaseException = exc.DBAPIError.instance(
        text,
        None,
        error,
        dialect.loaded_dbapi.Error,
        hide_parameters=True,
        connection_invalidated=is_lost,
        dialect=dialect,
    )
    return wrapped


@contextmanager
def _translated(database: Database) -> Iterator[None]:
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError) as error:
        reason = f"{database.url}: {_first_line(error)}"
        if _misses_something(error):
            raise WrongTables(reason) from error
        if _refuses_login(error):
            raise LoginRefused(reason) from error
        if isinstance(error, _AWAY) or error.connection_invalidated:
            raise StoreUnavailable(reason) from error
        raise


def _misses_something(error: exc.SQLAlchemyError) -> bool:
    """Whether the database is there, but not what a statement is about."""
    cause = getattr(error, "orig", None)
    if isinstance(cause, sqlite3.OperationalError):
        return any(words in str(cause) for words in _MISSING_WORDS)
    return getattr(cause, "sqlstate", None) in _MISSING


def _refuses_login(error: exc.SQLAlchemyError) -> bool:
    """Whether the server is there, but does not let this process in."""
    cause = getattr(error, "orig", None)
    return getattr(cause, "sqlstate", None) in _REFUSED or bool(_REFUSED_WORDS.search(str(cause)))


def _first_line(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().split("\n", 1)[0] or type(cause).__name__
