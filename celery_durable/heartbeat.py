"""Heartbeats: one thread for each claimed task (a greenlet where threading is patched) renews its lease.

Whichever thread wakes first renews every lease of the process that will be due soon, in one statement;
the others find it done.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import StoreUnavailable
from celery_durable.lease import Lease
from celery_durable.records import LeaseKey, Outcome

logger = logging.getLogger(__name__)

#: Seconds that ``stop`` waits for the thread. A renewal that is still in flight after it cannot do harm:
#: it names owner and token, and its answer is not listened to any more.
STOP_TIMEOUT = 0.15


class RenewalStore(Protocol):
    """What heartbeats need of the store."""

    def renew(self, keys: list[LeaseKey], ttl: float) -> set[LeaseKey]: ...

    def lost_to(self, key: LeaseKey) -> Outcome | None: ...


class Heartbeat:
    """Keeps one lease alive until it is stopped or the lease is lost.

    ``on_lost(lease, outcome)`` is called once, in the heartbeat's thread, when the lease is lost;
    ``outcome`` is the one by which it was taken (a cancel), None otherwise.
    """

    def __init__(
        self, lease: Lease, beats: Heartbeats, on_lost: Callable[[Lease, Outcome | None], None]
    ) -> None:
        self.lease = lease
        self.on_lost = on_lost
        self.next_due = beats.first_due(lease)
        self._beats = beats
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"durable-heartbeat-{lease.task_id}", daemon=True
        )

    def start(self) -> None:
        self._beats.add(self)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._stopped.is_set()

    def stop(self) -> None:
        """End the renewals of this lease. Returns soon, whatever the database does."""
        self._beats.remove(self)
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT)

    def retire(self) -> None:
        """The lease is lost: there is nothing left to renew."""
        self._stopped.set()
        self._wake.set()

    def _run(self) -> None:
        clock = self._beats.clock
        while not self._stopped.is_set():
            now = clock.monotonic()
            if self.lease.lost:
                self._beats.lose(self, None)
                return
            until = min(self.next_due, self.lease.deadline)
            if until > now:
                clock.wait(self._wake, until - now)
                continue
            if not self._beats.renew_due():
                # Another thread is at it, and may hang in the database: watch the own deadline meanwhile.
                clock.wait(self._wake, min(0.05, max(self.lease.deadline - now, 0.0)))


class Heartbeats:
    """The heartbeats of one process."""

    def __init__(self, store: RenewalStore, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._store = store
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._beats: dict[LeaseKey, Heartbeat] = {}
        self._is_failing = False

    def first_due(self, lease: Lease) -> float:
        """The first renewal comes one interval after the claim; later ones a little early, not together."""
        return lease.sent_at + lease.interval

    def add(self, beat: Heartbeat) -> None:
        with self._lock:
            self._beats[beat.lease.key] = beat

    def remove(self, beat: Heartbeat) -> None:
        with self._lock:
            self._beats.pop(beat.lease.key, None)

    @property
    def keys(self) -> list[LeaseKey]:
        """The leases that are being renewed."""
        with self._lock:
            return list(self._beats)

    def renew_due(self) -> bool:
        """Renew what is due within half an interval. False: another thread is doing it."""
        if not self._renewing.acquire(blocking=False):
            return False
        try:
            for ttl, beats in self._due().items():
                self._renew(beats, ttl)
        finally:
            self._renewing.release()
        return True

    def _due(self) -> dict[float, list[Heartbeat]]:
        now = self.clock.monotonic()
        due: dict[float, list[Heartbeat]] = {}
        with self._lock:
            for beat in self._beats.values():
                lease = beat.lease
                if lease.is_closed or lease.lost:
                    beat.next_due = now + lease.interval
                elif beat.next_due - lease.interval / 2 <= now:
                    due.setdefault(lease.ttl, []).append(beat)
        return due

    def _renew(self, beats: list[Heartbeat], ttl: float) -> None:
        sent_at = self.clock.monotonic()
        for beat in beats:
            # A tick that was missed is made up for by the next one, never by a burst.
            beat.next_due = sent_at + beat.lease.interval * random.uniform(0.9, 1.0)
        watch = self._watch(beats, sent_at)
        try:
            renewed = self._store.renew([beat.lease.key for beat in beats], ttl)
        except StoreUnavailable as error:
            self._report_failure(error)
            for beat in beats:
                beat.next_due = self.clock.monotonic() + beat.lease.interval / 4
            return
        finally:
            watch.cancel()
        self._report_success()
        for beat in beats:
            if beat.lease.key in renewed:
                beat.lease.renewed(sent_at)
            elif not beat.lease.is_closed:
                self._find_out(beat)

    def _watch(self, beats: Iterable[Heartbeat], now: float) -> threading.Timer:
        """A statement may hang for as long as the server does; the deadlines do not wait for it."""
        first = min(beat.lease.deadline for beat in beats)
        timer = threading.Timer(max(first - now, 0.0), self._expire)
        timer.daemon = True
        timer.start()
        return timer

    def _expire(self) -> None:
        with self._lock:
            beats = list(self._beats.values())
        for beat in beats:
            if beat.lease.lost:
                self.lose(beat, None)

    def _find_out(self, beat: Heartbeat) -> None:
        """Zero rows: the lease is lost, and that is final. By whose hand is read once."""
        try:
            outcome = self._store.lost_to(beat.lease.key)
        except StoreUnavailable:
            outcome = None
        self.lose(beat, outcome, "another worker or an operator has taken the task")

    def lose(self, beat: Heartbeat, outcome: Outcome | None, reason: str | None = None) -> None:
        """Tell the run of its loss, once. ``reason`` None: the deadline has passed."""
        with self._lock:
            # Whoever takes it out of the table is the one that tells.
            if self._beats.pop(beat.lease.key, None) is None:
                return
        if reason is not None:
            beat.lease.mark_lost(reason)
        beat.retire()
        beat.on_lost(beat.lease, outcome)

    def _report_failure(self, error: StoreUnavailable) -> None:
        level = logging.DEBUG if self._is_failing else logging.WARNING
        self._is_failing = True
        logger.log(level, "Leases could not be renewed, will try again: %s", error)

    def _report_success(self) -> None:
        if self._is_failing:
            logger.info("Leases are being renewed again")
        self._is_failing = False
