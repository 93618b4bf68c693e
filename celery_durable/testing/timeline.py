"""Durable time in a test: it stands still, for the database and for this process, until it is moved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from celery_durable.clock import MachineClock, Waitable

_MILLISECOND = timedelta(milliseconds=1)


class Timeline:
    """The clock that stands in for that of the process; ``stopped_at`` is the store's.

    Instants are whole milliseconds, which is what SQLite keeps.
    """

    def __init__(self, now: datetime) -> None:
        self.now = self._began = _ceiling(now)
        #: Where the store of the test looks for its time.
        self.stopped_at: list[datetime] = []
        #: Called when time has moved: whoever holds a lease has to renew it now.
        self.on_moved: Callable[[], object] = lambda: None
        self._thread = threading.get_ident()
        self._machine = MachineClock()

    def attach(self, stopped_at: list[datetime]) -> None:
        """Stop the clock of a store."""
        self.stopped_at = stopped_at
        stopped_at[:] = [self.now]

    def move_to(self, instant: datetime) -> None:
        """Move time to an instant; it never goes back."""
        self.now = max(self.now, _ceiling(instant))
        self.stopped_at[:] = [self.now]
        self.on_moved()

    # -- as the clock of the process -------------------------------------------------------------

    def monotonic(self) -> float:
        return (self.now - self._began).total_seconds()

    def wait(self, event: Waitable, seconds: float) -> bool:
        if threading.get_ident() != self._thread:
            # A thread in the background does not move the time of the test.
            return self._machine.wait(event, seconds)
        if event.wait(0):
            return True
        self.pause(seconds)
        return event.wait(0)

    def pause(self, seconds: float) -> None:
        if seconds > 0:
            self.move_to(self.now + timedelta(seconds=seconds))


def beginning() -> datetime:
    """Where the time of a test begins: the time of day, rounded up by a second or two.

    So what a task reckons from the wall clock is never later than what is reckoned from here.
    """
    now = datetime.now(timezone.utc)  # noqa: TID251 - the one look at the wall clock
    return now.replace(microsecond=0) + timedelta(seconds=2)


def _ceiling(instant: datetime) -> datetime:
    utc = instant.astimezone(timezone.utc)
    return utc + (-timedelta(microseconds=utc.microsecond)) % _MILLISECOND
