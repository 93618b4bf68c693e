"""Hints that something is due sooner than a scheduler believes.

They are hints and nothing else: the truth is in the rows, and a scheduler polls them all the same. A hint
that is lost makes a wake late by a poll interval at most.

PostgreSQL has ``NOTIFY``. It takes a lock on the whole database when it commits, so it is sent after the
transaction that it tells of, only for what is due before the next poll, and once for a burst of them.
A SQLite file shows by its own change that somebody has written.
"""

from __future__ import annotations

import hashlib
import os
import selectors
from typing import Any, Protocol

import psycopg
from sqlalchemy import exc, func, literal, select

from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import StoreUnavailable
from celery_durable.records import Due
from celery_durable.store.dialect import UtcDateTime, now_plus
from celery_durable.store.engine import Database
from celery_durable.store.schema import Schema

#: Seconds for which one notification of a process stands for those after it.
COALESCED = 0.02
#: Seconds after which a scheduler that was notified looks once more, for what was coalesced.
ECHO = 0.05
#: Seconds between two answers to a stream of notifications: each costs a poll.
SPACING = 0.02
#: Seconds between two looks at a SQLite file.
FILE_INTERVAL = 0.05
#: Seconds before a connection that could not be made, or broke, is made again.
RECONNECT = 5.0


def channel_name(schema: Schema, namespace: str) -> str:
    """The channel of one namespace: an identifier of at most 63 bytes, whatever the namespace is."""
    name = f"{schema.executions.fullname}/{namespace}"
    return f"durable_{hashlib.sha256(name.encode()).hexdigest()[:24]}"


class Notifier:
    """The side that writes.

    ``within``: seconds; what is due later than that is seen by the next poll.
    """

    def __init__(
        self, database: Database, channel: str, within: float, *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._channel = channel
        self._within = within
        self._clock = clock or SystemClock()
        self._sent_at: float | None = None

    def nearer(self, due: Due) -> None:
        """Tell that a row with this due time was committed."""
        if self._database.is_sqlite or due.seconds > self._within:
            return
        now = self._clock.monotonic()
        if self._sent_at is not None and now - self._sent_at < COALESCED:
            return
        sent_at = now if self._send(due) else None
        # An instant is compared in the database, by its clock: nothing may have been sent.
        self._sent_at = sent_at if due.at is None else None

    def _send(self, due: Due) -> bool:
        statement = select(func.pg_notify(self._channel, ""))
        if due.at is not None:
            statement = statement.where(literal(due.at, UtcDateTime()) <= now_plus(literal(self._within)))
        try:
            with self._database.statements() as connection:
                connection.execute(statement)
        except (StoreUnavailable, exc.SQLAlchemyError):
            # What it tells of is committed: the next poll finds it.
            return False
        return True


class Hints(Protocol):
    """The side that waits."""

    def arm(self) -> None:
        """Called before each poll: what changes from here on is to end the next wait."""

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until there may be something nearer. True: there may be."""
        ...

    def close(self) -> None:
        """Let go of what the waiting needed."""


def hints_for(database: Database, channel: str, *, notify: bool, clock: Clock | None = None) -> Hints:
    """The best way to wait that this database has."""
    clock = clock or SystemClock()
    if not notify or database.is_in_memory:
        return Silence(clock)
    if database.is_sqlite:
        return FileWatch(database.file, clock)
    return Listener(database, channel, clock)


class Silence:
    """No hints: the time passes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def arm(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        self._clock.pause(seconds)
        return False

    def close(self) -> None:
        pass


class FileWatch:
    """Looks at a SQLite file for changes, without opening it."""

    def __init__(self, file: str, clock: Clock) -> None:
        self._files = (f"{file}-wal", file)
        self._clock = clock
        self._seen: list[tuple[int, int] | None] = []

    def arm(self) -> None:
        self._seen = self._look()

    def wait(self, seconds: float) -> bool:
        until = self._clock.monotonic() + seconds
        while (remaining := until - self._clock.monotonic()) > 0:
            # A look comes after a pause, or a busy file would have its reader poll without one.
            self._clock.pause(min(remaining, FILE_INTERVAL))
            if self._look() != self._seen:
                return True
        return False

    def close(self) -> None:
        pass

    def _look(self) -> list[tuple[int, int] | None]:
        return [_stamp(file) for file in self._files]


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)  # noqa: PTH116 - twenty times a second
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Listener:
    """``LISTEN`` on a connection of its own, outside the pool and outside any transaction."""

    def __init__(self, database: Database, channel: str, clock: Clock) -> None:
        self._database = database
        self._channel = channel
        self._clock = clock
        self._connection: Any = None
        self._connect_at = clock.monotonic()
        self._echo_at: float | None = None
        self._heard_at = 0.0

    def arm(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        if self._connection is None:
            not_yet = self._connect_at - self._clock.monotonic()
            if not_yet > 0:
                self._clock.pause(min(seconds, not_yet))
                return False
            # Between the last poll and LISTEN anything may have happened.
            return self._connect()
        echo = self._echo_at is not None
        if self._echo_at is not None:
            seconds = min(seconds, self._echo_at - self._clock.monotonic())
            self._echo_at = None
        heard = self._heard(seconds)
        if heard:
            self._space()
            self._echo_at = self._clock.monotonic() + ECHO
        return heard or echo

    def _space(self) -> None:
        since = self._clock.monotonic() - self._heard_at
        if since < SPACING:
            self._clock.pause(SPACING - since)
        self._heard_at = self._clock.monotonic()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> bool:
        self._connect_at = self._clock.monotonic() + RECONNECT
        try:
            pooled = self._database.engine.raw_connection()
            pooled.detach()
            connection = pooled.dbapi_connection
            assert connection is not None
            connection.autocommit = True
            connection.cursor().execute(f'LISTEN "{self._channel}"')
        except (exc.SQLAlchemyError, psycopg.Error):
            return False
        self._connection = connection
        return True

    def _heard(self, seconds: float) -> bool:
        """Whether something came in within so many seconds: a notification, or the end of the connection."""
        until = self._clock.monotonic() + seconds
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection.fileno(), selectors.EVENT_READ)
                while selector.select(max(until - self._clock.monotonic(), 0.0)):
                    # The server may have said something else, its farewell for instance.
                    if self._drain():
                        return True
            return False
        except (psycopg.Error, OSError):
            self.close()
            return True

    def _drain(self) -> bool:
        # Not ``notifies()``: before psycopg 3.2 it cannot be told to stop.
        link = self._connection.pgconn
        link.consume_input()
        heard = False
        while link.notifies() is not None:
            heard = True
        return heard
