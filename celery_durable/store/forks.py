"""Forks and SQLite.

SQLite keeps its locks on a file in tables of the process. A child that is forked while another thread is in
a transaction inherits the lock as one that is held, by a connection that nobody in the child will ever
close: each write of its own is then answered "database is locked", for ever. A worker that replaces a dead
pool process is just such a parent. So a fork waits for the transactions of its process, which are short.

An idle connection does harm too: it has a shared lock, which says that the file is in use. A connection of
the child's own would share it by those tables, while to the system the child has none. Whoever closes the
file next, be it the parent, then takes itself for the last one and deletes the log in which the child goes
on to commit. So nothing stays open over a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from celery_durable.clock import monotonic

#: Seconds after which a fork waits no longer: a thread that hangs in the database must not hold it up.
PATIENCE = 15.0


class Closable(Protocol):
    """What has connections to a file."""

    def dispose(self) -> None: ...


class ForkGate:
    """Lets threads into transactions, and a fork only when none is in one and no connection is open."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._closables: WeakSet[Closable] = WeakSet()
        self._is_closed = False
        self._inside = 0
        self._own = threading.local()

    @property
    def is_closed(self) -> bool:
        """Whether a fork is waiting, or under way."""
        return self._is_closed

    def closes(self, closable: Closable) -> None:
        """Have the connections of this one closed before each fork."""
        with self._condition:
            self._closables.add(closable)

    @contextmanager
    def passed(self) -> Iterator[None]:
        """The stretch of a transaction. It begins when no fork is under way."""
        if getattr(self._own, "depth", 0):
            # Held up here, a thread would wait for the fork that waits for it.
            yield
            return
        with self._condition:
            while self._is_closed:
                self._condition.wait()
            self._inside += 1
        self._own.depth = 1
        try:
            yield
        finally:
            self._own.depth = 0
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Wait until nobody is in a transaction. Nobody gets into one before the gate is opened."""
        until = monotonic() + PATIENCE
        own = getattr(self._own, "depth", 0)
        with self._condition:
            self._is_closed = True
            while self._inside > own and (left := until - monotonic()) > 0:
                self._condition.wait(left)
            # Closed while it is in use, or hangs, one would be neither here nor there.
            idle = list(self._closables) if self._inside == 0 else []
        for closable in idle:
            closable.dispose()

    def open(self) -> None:
        """The fork is done, in its parent."""
        with self._condition:
            self._is_closed = False
            self._condition.notify_all()

    def renew(self) -> None:
        """The fork is done, in its child: the other threads are not there any more."""
        self._condition = threading.Condition()
        self._is_closed = False
        self._inside = 0
        self._own = threading.local()


#: The gate of this process.
gate = ForkGate()
if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.renew)
