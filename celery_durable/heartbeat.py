"""Heartbeats: what renews the leases of one process, and tells a run when its lease is lost.

Two threads for the whole process (greenlets where threading is patched), started by the first claim. One
renews: when a lease is due it renews every lease that will be due soon, in one statement. The other watches
the deadlines, because a statement may hang for as long as the server does, and a deadline does not wait.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import LeaseRenewalTimedOut, StoreUnavailable
from celery_durable.lease import Lease
from celery_durable.logs import about
from celery_durable.records import LeaseKey, Outcome

logger = logging.getLogger(__name__)

TAKEN = "another worker or an operator has taken the task"
NEVER = float("inf")
#: Seconds between two looks at a lease that is being given up.
CLOSED_PAUSE = 1.0


class RenewalStore(Protocol):
    """What heartbeats need of the store."""

    def renew(self, keys: list[LeaseKey], ttl: float) -> set[LeaseKey]: ...

    def still_held(self, keys: list[LeaseKey]) -> set[LeaseKey]: ...

    def lost_to(self, key: LeaseKey) -> Outcome | None: ...


class Heartbeat:
    """Keeps one lease alive from ``start`` until ``stop``, or until the lease is lost.

    ``on_lost(lease, outcome)`` is called once, in a thread of its own, when the lease is lost; ``outcome`` is
    the one by which it was taken (a cancel), None otherwise.
    """

    def __init__(
        self, lease: Lease, beats: Heartbeats, on_lost: Callable[[Lease, Outcome | None], None]
    ) -> None:
        self.lease = lease
        self.on_lost = on_lost
        #: The first renewal comes one interval after the claim; later ones a little early, not together.
        self.next_due = lease.sent_at + lease.pace
        self._beats = beats

    def start(self) -> None:
        """Begin. Where no thread can be had, ``is_running`` stays False."""
        self._beats.add(self)

    @property
    def is_running(self) -> bool:
        """Whether somebody renews this lease."""
        return self._beats.keeps(self)

    def stop(self) -> None:
        """End the renewals at once, whatever the database does.

        A renewal that is in flight does no harm: it names owner and token, and nobody listens to its answer.
        """
        self._beats.remove(self)


class Heartbeats:
    """The heartbeats of one process.

    ``on_renewed`` hears of each statement that renewed something: what was left of each lease, in seconds.
    """

    def __init__(
        self,
        store: RenewalStore,
        clock: Clock | None = None,
        *,
        on_renewed: Callable[[Sequence[float]], None] = lambda margins: None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._store = store
        self._on_renewed = on_renewed
        self._lock = threading.Lock()
        self._beats: dict[LeaseKey, Heartbeat] = {}
        self._is_failing = False
        self._renewer = Loop("durable-heartbeat", self.renew_due, self._clock)
        self._watcher = Loop("durable-deadlines", self.watch_deadlines, self._clock)

    def add(self, beat: Heartbeat) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._beats[beat.lease.key] = beat
        try:
            self._renewer.look_at(beat.next_due)
            self._watcher.look_at(beat.lease.deadline)
        except RuntimeError as error:
            self.remove(beat)
            logger.error("No heartbeat for task %s: %s", beat.lease.task_id, error, extra=_about(beat.lease))

    def remove(self, beat: Heartbeat) -> None:
        """Renew this lease no more."""
        with self._lock:
            if self._beats.get(beat.lease.key) is beat:
                del self._beats[beat.lease.key]

    def keeps(self, beat: Heartbeat) -> bool:
        """Whether this lease is being renewed."""
        return self._beats.get(beat.lease.key) is beat

    def close(self) -> None:
        """Renew nothing more. Does not wait for a renewal that is in flight."""
        with self._lock:
            self._beats.clear()
        self._renewer.close()
        self._watcher.close()

    def _kept(self) -> list[Heartbeat]:
        with self._lock:
            return list(self._beats.values())

    # -- renewing -------------------------------------------------------------------------------

    def renew_due(self) -> float:
        """Renew what is due within half an interval, if anything is due now.

        Returns the instant of the next pass.
        """
        self._tell_lost()
        now = self._clock.monotonic()
        beats = self._kept()
        if any(beat.next_due <= now for beat in beats):
            soon = [beat for beat in beats if beat.next_due - beat.lease.pace / 2 <= now]
            for ttl, batch in _by_ttl(soon).items():
                self._renew(batch, ttl)
        return min((beat.next_due for beat in self._kept()), default=NEVER)

    def _renew(self, batch: Sequence[Heartbeat], ttl: float) -> None:
        sent_at = self._clock.monotonic()
        for beat in batch:
            # A tick that was missed is made up for by the next one, never by a burst.
            beat.next_due = sent_at + beat.lease.pace * random.uniform(0.9, 1.0)
        try:
            renewed = self._store.renew([beat.lease.key for beat in batch], ttl)
        except Exception as error:  # noqa: BLE001 - whatever it is: the leases live on until their deadlines
            self._report_failure(error)
            self._try_again(batch)
            return
        margins = [beat.lease.sent_at + ttl - sent_at for beat in batch if beat.lease.key in renewed]
        for beat in batch:
            if beat.lease.key in renewed:
                self._note_renewed(beat, sent_at)
        self._on_renewed(margins)
        if self._judge([beat for beat in batch if beat.lease.key not in renewed]):
            self._report_success()

    def _judge(self, missing: Sequence[Heartbeat]) -> bool:
        """Of leases that were not renewed: lost are those that their rows do not name any more.

        The row of another is locked by somebody for now. False: the database did not say.
        """
        if not missing:
            return True
        try:
            held = self._store.still_held([beat.lease.key for beat in missing])
        except Exception as error:  # noqa: BLE001 - as above
            self._report_failure(error)
            self._try_again(missing)
            return False
        self._try_again([beat for beat in missing if beat.lease.key in held])
        for beat in missing:
            if beat.lease.key not in held:
                self._note_refused(beat)
        return True

    def _try_again(self, batch: Sequence[Heartbeat]) -> None:
        for beat in batch:
            beat.next_due = self._clock.monotonic() + beat.lease.pace / 4

    def _note_renewed(self, beat: Heartbeat, sent_at: float) -> None:
        with self._lock:
            if self.keeps(beat):
                beat.lease.renewed(sent_at)

    def _note_refused(self, beat: Heartbeat) -> None:
        """Zero rows: the lease is lost, and that is final, unless the run is giving it up itself."""
        with self._lock:
            if self.keeps(beat) and beat.lease.mark_lost(TAKEN):
                self._tell(beat)

    # -- losing ---------------------------------------------------------------------------------

    def watch_deadlines(self) -> float:
        """Tell the runs whose deadline has passed. Returns the instant of the next pass."""
        self._tell_lost()
        # A run that is giving its lease up cannot lose it; it may still find that it holds it as before.
        later = self._clock.monotonic() + CLOSED_PAUSE
        return min(
            (later if beat.lease.is_closed else beat.lease.deadline for beat in self._kept()), default=NEVER
        )

    def _tell_lost(self) -> None:
        for beat in self._kept():
            if beat.lease.lost:
                with self._lock:
                    if self.keeps(beat):
                        self._tell(beat)

    def _tell(self, beat: Heartbeat) -> None:
        """Tell a run of its loss, once, under the lock. In a thread of its own: interrupting a run takes
        time, in which the other leases have to be renewed and their deadlines watched."""
        name = f"durable-loss-{beat.lease.task_id}"
        threading.Thread(target=self._tell_now, args=(beat,), name=name, daemon=True).start()
        del self._beats[beat.lease.key]

    def _tell_now(self, beat: Heartbeat) -> None:
        lease = beat.lease
        outcome: Outcome | None = None
        if not isinstance(lease.loss, LeaseRenewalTimedOut):
            try:
                outcome = self._store.lost_to(lease.key)
            except Exception as error:  # noqa: BLE001 - the run has to be told all the same
                logger.warning(
                    "Who took task %s cannot be read: %s", lease.task_id, error, extra=_about(lease)
                )
        beat.on_lost(lease, outcome)

    def _report_failure(self, error: Exception) -> None:
        if not self._is_failing:
            unexpected = None if isinstance(error, StoreUnavailable) else error
            logger.warning("Leases could not be renewed, will try again: %s", error, exc_info=unexpected)
        self._is_failing = True

    def _report_success(self) -> None:
        if self._is_failing:
            logger.info("Leases are being renewed again")
        self._is_failing = False


class Loop:
    """A daemon thread that makes a pass whenever one is due; each pass says when the next one is.

    It starts when the first pass is asked for.
    """

    def __init__(self, name: str, make_pass: Callable[[], float], clock: Clock) -> None:
        self._name = name
        self._make_pass = make_pass
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._next_at = NEVER
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def look_at(self, instant: float) -> None:
        """Make a pass at this instant at the latest.

        Raises RuntimeError when no thread can be started.
        """
        if self._thread is None and self._start():
            return
        # Most tasks end long before their first renewal: the thread is not woken for each of them.
        if instant < self._next_at:
            self._wake.set()

    def _start(self) -> bool:
        """Start the thread, which begins with a pass. False: somebody else has."""
        with self._lock:
            if self._thread is not None:
                return False
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
            return True

    def close(self) -> None:
        """End the thread after the pass that it makes now, if any."""
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            # Whoever adds something while the pass is under way wakes us again.
            self._next_at = NEVER
            try:
                self._next_at = self._make_pass()
            except Exception:
                logger.exception("%s failed, and goes on", self._name)
                self._next_at = self._clock.monotonic() + 1.0
            self._clock.wait(self._wake, self._next_at - self._clock.monotonic())


def _about(lease: Lease) -> dict[str, Any]:
    return about(None, lease.task_id, lease.token)


def _by_ttl(beats: Iterable[Heartbeat]) -> dict[float, list[Heartbeat]]:
    groups: dict[float, list[Heartbeat]] = {}
    for beat in beats:
        groups.setdefault(beat.lease.ttl, []).append(beat)
    return groups
