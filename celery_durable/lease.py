"""A lease as its holder sees it: until when to believe in it, and whether it is lost.

Two clocks, two jobs: the database says when a lease ends; the holder's monotonic clock may only end it
sooner. So the holder always stops before the store gives the lease away.
"""

from __future__ import annotations

import threading

from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import LeaseLost, LeaseRenewalTimedOut
from celery_durable.records import LeaseKey


class Lease:
    """What ``current_lease()`` returns.

    Once lost a lease stays lost: neither a late answer nor a clock brings it back.
    """

    def __init__(
        self,
        key: LeaseKey,
        ttl: float,
        interval: float,
        *,
        sent_at: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.key = key
        self.ttl = ttl
        self.interval = interval
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._loss: LeaseLost | None = None
        self._is_closed = False
        #: Set when the lease is lost: what waits under the lease waits on this.
        self.lost_event = threading.Event()
        self.sent_at = self._clock.monotonic() if sent_at is None else sent_at

    @property
    def task_id(self) -> str:
        return self.key.task_id

    @property
    def token(self) -> int:
        """The fencing token. It grows with every claim of the task; hand it to systems that can compare."""
        return self.key.token

    @property
    def owner(self) -> str:
        """The process that holds the lease: node name, process id and a fresh id per process."""
        return self.key.owner

    @property
    def trust(self) -> float:
        """Seconds for which a renewal is believed in: all of the ttl but an interval, or but a sixth.

        What is left is the time to stop the task before somebody else may start it.
        """
        return self.ttl - min(self.interval, self.ttl / 6)

    @property
    def pace(self) -> float:
        """Seconds between renewals: the interval, and less where that is more than a sixth of the ttl.

        So the database may be away for two thirds of the ttl, whenever it goes, and no lease is lost.
        """
        return self.interval if self.interval <= self.ttl / 6 else self.ttl / 12

    @property
    def deadline(self) -> float:
        """The monotonic instant from which on the holder does not believe in the lease any more.

        It counts from the moment at which the last successful renewal was *sent*: the store set the
        expiry after that moment, whatever the answer took.
        """
        return self.sent_at + self.trust

    @property
    def remaining(self) -> float:
        """Seconds until the lease has to be renewed at the latest; 0 when it is lost."""
        if self.lost:
            return 0.0
        return max(0.0, self.deadline - self._clock.monotonic())

    @property
    def lost(self) -> bool:
        """Whether the task belongs to somebody else by now, or may."""
        if self._loss is None and not self._is_closed and self._clock.monotonic() >= self.deadline:
            self.mark_timed_out()
        return self._loss is not None

    @property
    def loss(self) -> LeaseLost | None:
        """How the lease was lost."""
        return self._loss

    def check(self) -> None:
        """Raise LeaseLost if this run does not own its task any more."""
        if self.lost:
            assert self._loss is not None
            raise self._loss

    def renewed(self, sent_at: float) -> None:
        """Note that a renewal sent at ``sent_at`` succeeded.

        A lost lease stays lost, and one whose deadline has passed while the answer was on its way is lost.
        """
        if self.lost:
            return
        with self._lock:
            self.sent_at = max(self.sent_at, sent_at)

    def mark_lost(self, reason: str) -> bool:
        """Note that the store refused us. True the first time."""
        return self._mark(LeaseLost(self.key.task_id, self.key.token, reason))

    def mark_timed_out(self) -> bool:
        """Note that the lease could not be renewed in time. True the first time."""
        return self._mark(
            LeaseRenewalTimedOut(
                self.key.task_id,
                self.key.token,
                f"no renewal succeeded within {self.trust:g} s",
            )
        )

    def _mark(self, loss: LeaseLost) -> bool:
        with self._lock:
            if self._loss is not None or self._is_closed:
                return False
            self._loss = loss
        self.lost_event.set()
        return True

    def close(self) -> None:
        """The run gives the lease up itself: what a renewal hears from now on says nothing."""
        with self._lock:
            self._is_closed = True

    def reopen(self) -> None:
        """Giving up did not work (the database was away): the lease is held as before."""
        with self._lock:
            self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class EternalLease(Lease):
    """The lease of a task that runs eagerly: token 0, never lost."""

    def __init__(self, task_id: str) -> None:
        super().__init__(LeaseKey(task_id, "eager", 0), float("inf"), 0.0)

    @property
    def remaining(self) -> float:
        return float("inf")

    @property
    def lost(self) -> bool:
        return False
