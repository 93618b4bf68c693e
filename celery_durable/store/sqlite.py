"""SQLite: how a connection is set up, and how writers take turns.

SQLite has one writer at a time. Whoever finds another one at work waits by SQLite's own rule ("busy
timeout"): a millisecond first, and longer each time, up to a tenth of a second. Our transactions last a
quarter of a millisecond, so two pool processes would spend most of their time waiting for nobody.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from celery_durable.clock import monotonic

#: Seconds before a writer that found another one at work tries again: the first time, and at most. Who has
#: less patience asks more often, up to a hundred times in all.
FIRST_PAUSE = 0.0001
LONGEST_PAUSE = 0.01
#: A heartbeat must not be the one that is always too late: whoever asks most often has the next turn.
HEARTBEAT_PAUSE = 0.001
#: SQLite's words for this; before Python 3.11 its errors bear no code.
_BUSY = "database is locked"

Answer = TypeVar("Answer")


def prepare(connection: sqlite3.Connection) -> None:
    """Set up a connection for our statements."""
    # The driver's own transactions begin too late: a read before the write would lie outside, and
    # two read-then-write transactions would lose an update. So we begin them ourselves.
    connection.isolation_level = None
    # Readers and the one writer do not wait for each other. The file remembers it. SQLite does not wait
    # for this change as it does for a lock, and several processes may be the first ones at a file.
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    # FULL: what was committed survives a power cut; the default of WAL builds (NORMAL) may lose the last.
    connection.execute("PRAGMA synchronous=FULL")
    if mode == "wal" and isinstance(connection, TurnTaker):
        # Without it (a network's file system) a commit may have to wait too, and SQLite knows how.
        connection.execute("PRAGMA busy_timeout=0")


class TurnCursor(sqlite3.Cursor):
    """A cursor of a connection that takes turns.

    ``executemany`` takes none: outside of a transaction the rows before the one that has to wait are written
    already, and inside of one it never waits.
    """

    connection: TurnTaker

    def execute(self, *arguments: Any) -> Any:
        return self.connection.in_turn(lambda: super(TurnCursor, self).execute(*arguments))


class TurnTaker(sqlite3.Connection):
    """A connection that waits for its turn to write, for ``timeout`` seconds.

    Every statement of ours either begins its transaction or runs inside one that has begun as a writer, so
    one that was told to wait has done nothing and may be tried again.
    """

    longest_pause = LONGEST_PAUSE

    def __init__(self, database: Any, timeout: float, **options: Any) -> None:
        super().__init__(database, timeout=timeout, **options)
        self._patience = timeout

    def cursor(self, factory: Any = TurnCursor) -> Any:
        return super().cursor(factory)

    def execute(self, *arguments: Any) -> Any:
        # The driver's own goes past ``cursor``.
        return self.cursor().execute(*arguments)

    def in_turn(self, statement: Callable[[], Answer]) -> Answer:
        """Run a statement when no other writer is at work.

        Raises sqlite3.OperationalError ("database is locked") after the timeout.
        """
        until, pause = monotonic() + self._patience, FIRST_PAUSE
        longest = min(self.longest_pause, self._patience / 100)
        while True:
            try:
                return statement()
            except sqlite3.OperationalError as error:
                if str(error) != _BUSY or monotonic() >= until:
                    raise
            time.sleep(pause)  # noqa: TID251 - another process holds the file, and cannot tell us when it is done
            pause = min(pause * 1.5, longest)


class HeartbeatTurns(TurnTaker):
    """The connection that renews leases."""

    longest_pause = HEARTBEAT_PAUSE
