"""One run of a durable task: its durable calls, held against the journal and written under the lease."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

from celery.exceptions import Ignore, Reject, Retry

from celery_durable.clock import Clock, HeardTime, SystemClock
from celery_durable.codec import Codec
from celery_durable.django import open_transactions
from celery_durable.errors import (
    LeaseLost,
    NotDurable,
    Park,
    ReplayDivergence,
    StepLimitExceeded,
    StoreUnavailable,
)
from celery_durable.lease import Lease
from celery_durable.points import Point, reached
from celery_durable.records import Claim, Due, JournalEntry, Kind, LeaseKey
from celery_durable.replay import Journal, describe, fits, timer_id
from celery_durable.shield import Shield

logger = logging.getLogger(__name__)

#: A sleep shorter than this (seconds) is slept in place, under the lease: parking would take longer.
SHORT_SLEEP = 1.0
#: For so many seconds the database's time is reckoned from the last time it was heard.
TIME_TRUST = 5.0
#: A time that took longer to be heard (seconds) is asked for again before a sleep is measured by it.
TIME_BLUR = 0.25

Answer = TypeVar("Answer")


class RunStore(Protocol):
    """What a run needs of the store's statements on runs."""

    def record(self, key: LeaseKey, entries: list[JournalEntry]) -> bool: ...

    def record_sleep(self, key: LeaseKey, entries: list[JournalEntry], due: Due) -> datetime | None: ...

    def park(self, key: LeaseKey, due: Due, *, entries: list[JournalEntry]) -> datetime | None: ...


class Announcer(Protocol):
    """Tells the world outside of a sleep. Nothing that it does may stop the sleep."""

    def going_to_sleep(self, due_at: datetime, name: str, timer: str) -> None: ...

    def parked(self, due_at: datetime, name: str, now: datetime) -> None: ...

    def refused(self) -> None: ...


class Execution:
    """The durable calls of one run.

    Arguments:
        claim: what the claim handed over.
        asked_at: the monotonic instant before the claim was sent.
        now: asks the database for its time.
        stop_heartbeat: ends the renewals; called before a write that gives the lease up.
    """

    def __init__(  # noqa: PLR0913 - its partners, each named
        self,
        task_name: str,
        claim: Claim,
        lease: Lease,
        *,
        runs: RunStore,
        codec: Codec,
        announcer: Announcer,
        step_limit: int,
        asked_at: float,
        now: Callable[[], datetime],
        stop_heartbeat: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.task_name = task_name
        self.claim = claim
        self.lease = lease
        self.journal = Journal(claim.journal)
        self.shield = Shield()
        self.is_parked = False
        self.divergence: ReplayDivergence | None = None
        self._runs = runs
        self._codec = codec
        self._announcer = announcer
        self._step_limit = step_limit
        self._clock = clock or SystemClock()
        self._now = now
        self._heard = HeardTime(claim.claimed_at, asked_at, self._clock.monotonic())
        self._stop_heartbeat = stop_heartbeat
        self._in_step = False
        self._thread = threading.get_ident()
        # A test of Django's runs in one, and so does a task that it runs.
        self._transactions_around = open_transactions()
        # Steps that raised since the last write: journaled when the body turns out to have handled them.
        self.unwritten: list[JournalEntry] = []

    @property
    def key(self) -> LeaseKey:
        return self.claim.key

    # -- the durable calls ----------------------------------------------------------------------

    def step(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn`` once per task. See ``celery_durable.step``."""
        name = step_name(fn)
        recorded = self._next_call("step()", Kind.STEP, name)
        if recorded is not None:
            return self._replayed(recorded)
        position = self.journal.position
        value = self._run_step(position, name, fn, args, kwargs)
        try:
            payload = self._codec.encode(value)
        except Exception as error:  # noqa: BLE001 - whatever a serializer raises is the step's failure
            raise self._failed(position, name, error) from None
        entry = JournalEntry(
            position,
            Kind.STEP,
            name,
            payload=payload.data,
            content_type=payload.content_type,
            content_encoding=payload.content_encoding,
        )
        reached(Point.STEP_RAN)
        with self.shield.closed():
            entries = [*self.unwritten, entry]
            if not self.persevere(lambda: self._runs.record(self.key, entries)):
                self.refuse()
            self.unwritten = []
        reached(Point.STEP_JOURNALED)
        return self._codec.decode(payload.data, payload.content_type, payload.content_encoding)

    def sleep(self, seconds: float, name: str | None) -> None:
        """Sleep for some seconds. See ``celery_durable.sleep``."""
        recorded = self._next_call("sleep()", Kind.SLEEP, name or "")
        if recorded is not None:
            self._sleep_on(recorded)
            return
        with self.shield.closed():
            heard, now = self._database_time(), self._clock.monotonic()
            due_at = heard.at_most(now) + timedelta(seconds=seconds) if seconds > 0 else heard.at_least(now)
        self._fall_asleep(due_at, name or "")

    def sleep_until(self, when: datetime, name: str | None) -> None:
        """Sleep until an instant (aware, UTC). See ``celery_durable.sleep_until``."""
        recorded = self._next_call("sleep_until()", Kind.SLEEP, name or "")
        if recorded is not None:
            self._sleep_on(recorded)
        else:
            self._fall_asleep(when, name or "")

    # -- positions and replay -------------------------------------------------------------------

    def _next_call(self, call: str, kind: str, name: str) -> JournalEntry | None:
        """Take the next position. What was journaled there, if anything; it fits the call."""
        if threading.get_ident() != self._thread:
            raise NotDurable(call, "in another thread")
        if self._in_step:
            raise NotDurable(call, "inside a step")
        self.go_on()
        if kind == Kind.SLEEP and open_transactions() > self._transactions_around:
            raise NotDurable(call, "inside an open database transaction")
        if self.journal.position >= self._step_limit:
            raise StepLimitExceeded(self._step_limit)
        position = self.journal.advance()
        recorded = self.journal.recorded()
        if recorded is not None and not fits(recorded, kind, name):
            self.divergence = ReplayDivergence(
                self.task_name,
                self.key.task_id,
                position,
                describe(recorded.kind, recorded.name),
                describe(kind, name),
            )
            raise self.divergence
        return recorded

    def go_on(self) -> None:
        """Raise what should have ended the body already: a swallowed sleep or divergence, a lost lease."""
        if self.is_parked:
            raise Park
        if self.divergence is not None:
            raise self.divergence
        self.lease.check()

    def _replayed(self, recorded: JournalEntry) -> Any:
        stored = (recorded.payload, recorded.content_type, recorded.content_encoding)
        if recorded.kind == Kind.ERROR:
            raise self._codec.decode_exception(*stored)
        return self._codec.decode(*stored)

    def _run_step(
        self,
        position: int,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._in_step = True
        try:
            return fn(*args, **kwargs)
        except (Ignore, Reject, Retry, LeaseLost):
            # Celery's and our own control flow is no result of a step.
            raise
        except Exception as error:
            failure = self._failed(position, name, error)
            if failure is error:
                raise
            raise failure from error
        finally:
            self._in_step = False

    def _failed(self, position: int, name: str, error: Exception) -> BaseException:
        """Keep the exception of a step until it shows whether the body handles it."""
        payload, replayed = self._codec.encode_exception(error)
        self.unwritten.append(
            JournalEntry(
                position,
                Kind.ERROR,
                name,
                payload=payload.data,
                content_type=payload.content_type,
                content_encoding=payload.content_encoding,
            )
        )
        return replayed

    # -- sleeping -------------------------------------------------------------------------------

    def _fall_asleep(self, due_at: datetime, name: str) -> None:
        entries = [*self.unwritten, JournalEntry(self.journal.position, Kind.SLEEP, name)]
        with self.shield.closed():
            remaining = self._seconds_until(due_at)
        if remaining >= SHORT_SLEEP:
            self._park(due_at, name, entries)
        with self.shield.closed():
            due = Due(at=due_at)
            if self.persevere(lambda: self._runs.record_sleep(self.key, entries, due)) is None:
                self.refuse()
            self.unwritten = []
        reached(Point.SHORT_SLEEP_JOURNALED)
        self._wait_in_place(due_at)

    def _sleep_on(self, recorded: JournalEntry) -> None:
        """A sleep that was journaled: over, or to be slept to its end. Its first due time holds."""
        if recorded.is_over or recorded.due_at is None:
            return
        with self.shield.closed():
            remaining = self._seconds_until(recorded.due_at)
        if remaining >= SHORT_SLEEP:
            self._park(recorded.due_at, recorded.name, [])
        self._wait_in_place(recorded.due_at)

    def _wait_in_place(self, due_at: datetime) -> None:
        """A short sleep: it ends at once when the lease is lost."""
        while True:
            with self.shield.closed():
                remaining = self._seconds_until(due_at)
            if remaining <= 0:
                break
            if self._clock.wait(self.lease.lost_event, min(remaining, max(self.lease.remaining, 0.01))):
                break
            self.lease.check()
        self.lease.check()

    def _park(self, due_at: datetime, name: str, entries: list[JournalEntry]) -> None:
        """Write the sleep, give the lease up, leave the body."""
        with self.shield.closed():
            # Before the park commits: written after it, this state could land on top of what the woken
            # run has stored (result stores do not guard every state against that).
            timer = timer_id(self.key.task_id, self.journal.position)
            self._announcer.going_to_sleep(due_at, name, timer)
            reached(Point.SLEEPING_STORED)
            self.lease.check()
            self.lease.close()
            due = Due(at=due_at)
            parked = self.persevere(lambda: self._runs.park(self.key, due, entries=entries))
            if parked is None:
                self.lease.reopen()
                self.refuse()
            self.is_parked = True
            self.unwritten = []
            self._stop_heartbeat()
            reached(Point.SLEEP_PARKED)
            self._announcer.parked(due_at, name, self._heard.at_least(self._clock.monotonic()))
        raise Park

    def refuse(self) -> None:
        """The store says that this run does not own its task: it ends here, as lost."""
        self.lease.mark_lost("another worker or an operator has taken the task")
        self._announcer.refused()
        self.lease.check()

    # -- the database: its time, and its absence ------------------------------------------------

    def _database_time(self) -> HeardTime:
        """The database's time, as heard some seconds ago at most."""
        heard = self._heard
        if heard.blur > TIME_BLUR or heard.age(self._clock.monotonic()) > TIME_TRUST:
            asked_at = self._clock.monotonic()
            instant = self.persevere(self._now)
            heard = self._heard = HeardTime(instant, asked_at, self._clock.monotonic())
        return heard

    def _seconds_until(self, instant: datetime) -> float:
        """Seconds after which the instant has passed for certain."""
        return (instant - self._database_time().at_least(self._clock.monotonic())).total_seconds()

    def persevere(self, statement: Callable[[], Answer]) -> Answer:
        """Run a statement, and while the database is away try it again for as long as the lease lasts.

        Raises LeaseLost when it does not come back in time.
        """
        pause = 0.1
        waits_since: float | None = None
        while True:
            try:
                answer = statement()
            except StoreUnavailable as error:
                if self._clock.monotonic() + pause >= self.lease.deadline:
                    self.lease.reopen()
                    self.lease.mark_timed_out()
                    self.lease.check()
                # Once, and then a word when it is over.
                level = logging.WARNING if waits_since is None else logging.DEBUG
                logger.log(level, "%s[%s] waits: %s", self.task_name, self.key.task_id, error)
                waits_since = waits_since or self._clock.monotonic()
                if self._clock.wait(self.lease.lost_event, pause):
                    self.lease.check()
                pause = min(pause * 2, 2.0)
            else:
                if waits_since is not None:
                    seconds = self._clock.monotonic() - waits_since
                    logger.info("%s[%s] goes on after %.1f s", self.task_name, self.key.task_id, seconds)
                return answer


def step_name(fn: Any) -> str:
    """The name under which a step is journaled: a Celery task's own, else the function's."""
    # Not by its attributes: a mock has them all, and each has them again.
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "name", None)
    if isinstance(name, str) and hasattr(fn, "apply_async"):
        return name
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


class EagerExecution:
    """An eager run (``.apply()``, ``task_always_eager``): sleeps return at once, steps run, no row."""

    def __init__(self, lease: Lease, codec: Codec, step_limit: int) -> None:
        self.lease = lease
        self._codec = codec
        self._step_limit = step_limit
        self._count = 0
        self._in_step = False

    def step(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._next_call("step()")
        self._in_step = True
        try:
            value = fn(*args, **kwargs)
        finally:
            self._in_step = False
        payload = self._codec.encode(value)
        return self._codec.decode(payload.data, payload.content_type, payload.content_encoding)

    def sleep(self, seconds: float, name: str | None) -> None:
        self._next_call("sleep()")

    def sleep_until(self, when: datetime, name: str | None) -> None:
        self._next_call("sleep_until()")

    def _next_call(self, call: str) -> None:
        if self._in_step:
            raise NotDurable(call, "inside a step")
        if self._count >= self._step_limit:
            raise StepLimitExceeded(self._step_limit)
        self._count += 1
