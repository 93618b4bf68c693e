"""One claimed run in Celery's terms: what the body's end means for the row and for the tracer."""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from celery_durable.announcer import Announcer
from celery_durable.capture import Captured
from celery_durable.context import current_run
from celery_durable.errors import (
    LeaseInterrupt,
    LeaseLost,
    Park,
    TaskQuarantined,
    failure_of,
)
from celery_durable.execution import Execution
from celery_durable.followers import build_followers
from celery_durable.heartbeat import Heartbeat
from celery_durable.lease import Lease
from celery_durable.logs import about, current_fields
from celery_durable.points import Point, reached
from celery_durable.records import (
    Claim,
    Delivery,
    Due,
    Follower,
    JournalEntry,
    Outcome,
    OutcomeKind,
    Outgoing,
)
from celery_durable.runtime import Runtime
from celery_durable.settings import TaskSettings
from celery_durable.shield import Shield
from celery_durable.silence import Silence

logger = logging.getLogger(__name__)

#: What asyncio lets out of a body beside exceptions. A group may hold a sleep of ours, or an interrupt.
STRAY: tuple[type[BaseException], ...] = (
    asyncio.CancelledError,
    *filter(None, [getattr(builtins, "BaseExceptionGroup", None)]),
)

_claimed_run: ContextVar[TaskRun | None] = ContextVar("celery_durable_claimed", default=None)


class TaskRun:
    """A run from its claim to the moment when it is settled.

    The tracer calls ``call_body`` in the middle of its work; after it the run is settled (``settling``).

    Arguments:
        asked_at: the monotonic instant before the claim was sent.
        delivery: what was claimed: the message, and which send of the task it is of.
        send: publishes followers that have just been written.
    """

    def __init__(
        self,
        task: Any,
        claim: Claim,
        runtime: Runtime,
        limits: TaskSettings,
        *,
        asked_at: float,
        delivery: Delivery,
        send: Callable[[Sequence[Outgoing]], None],
    ) -> None:
        self.task = task
        self.claim = claim
        self.runtime = runtime
        self.limits = limits
        self.delivery = delivery
        self.lease = Lease(claim.key, limits.lease_ttl, limits.heartbeat_interval, sent_at=asked_at)
        self.heartbeat = Heartbeat(self.lease, runtime.heartbeats, self._on_lost)
        self.announcer = Announcer(task, self.lease, runtime)
        self.execution = Execution(
            task.name,
            claim,
            self.lease,
            runs=runtime.store.runs,
            codec=runtime.codec,
            announcer=self.announcer,
            step_limit=runtime.settings.step_limit,
            asked_at=asked_at,
            now=runtime.store.now,
            stop_heartbeat=self.heartbeat.stop,
        )
        self.outcome = claim.outcome
        #: True when result store, chord and errbacks are known to have heard of the outcome.
        self.told = False
        #: True when the row has ended together with the body, because nobody is to be told.
        self.is_closed = False
        #: The message and time of a retry that Celery has built, to be parked when it has told of it;
        #: True: its arguments are new, so the journal starts anew.
        self.retry: tuple[Captured, Due, bool] | None = None
        #: Why the message of a retry could not be built. Celery makes a silent Reject of it.
        self.retry_failure: Exception | None = None
        #: True when the task has handed its id over to another (``replace``).
        self.replaced = False
        self.entered = False
        #: True when a hook before the body wants the task to come back (``Reject(requeue=True)``).
        self.asks_again = False
        #: Set when nothing of the run is left to do.
        self.over = threading.Event()
        #: The greenlet of the run, where the pool has greenlets.
        self.greenlet: Any = None
        #: Set by the worker: interrupts the body when the lease is lost.
        self.interrupt: Callable[[TaskRun, Outcome | None], None] | None = None
        #: Set by the worker: what is on while the body is.
        self.around_body: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Set by the worker: tells its main process that the lease is lost.
        self.report_loss: Callable[[], None] | None = None
        self._send = send

    @property
    def request(self) -> Any:
        """Celery's request of the run; it is off the task's stack when the run is settled."""
        return self.announcer.request

    @property
    def shield(self) -> Shield:
        return self.execution.shield

    def log_fields(self) -> dict[str, Any]:
        """What a log record that is made in this run is about."""
        fields = about(self.task.name, self.lease.task_id, self.lease.token)
        return {**fields, "position": self.execution.journal.position}

    # -- the body --------------------------------------------------------------------------------

    def call_body(self, body: Callable[[], Any]) -> Any:
        """Run the body, or what stands in its place when the outcome is there already.

        Returns and raises what the tracer is to tell.
        """
        self.entered = True
        self.announcer.request = self.task.request
        if self.claim.outcome is not None:
            return self._retell(self.claim.outcome)
        if self.lease.lost:
            raise Silence(str(self.lease.loss))
        if not self.heartbeat.is_running:
            # Celery swallows what a signal receiver raises, so the heartbeat is looked for here.
            raise Silence("it has no heartbeat")
        reached(Point.BODY_ENTERED)
        try:
            value = self._run_body(body)
        except Park:
            raise Silence("it sleeps") from None
        except LeaseInterrupt:
            raise Silence("its lease is lost") from None
        except (Ignore, Reject) as control:
            if self.retry_failure is not None:
                self._end_with_exception(self.retry_failure)
                raise self.retry_failure from None
            self._end_quietly(control)
            raise
        except Retry:
            self._raise_if_over("a retry")
            raise
        except Exception as error:
            self._end_with_exception(error)
            raise
        return self._end_with_value(value)

    def _run_body(self, body: Callable[[], Any]) -> Any:
        """The stretch in which durable calls belong to this run, and in which it may be interrupted."""
        token = current_run.set(self.execution)
        try:
            with self.around_body():
                return self.shield.run(body)
        except Exception:
            # Also a group of exceptions only, which is both.
            raise
        except STRAY as error:
            raise failure_of(error) from error
        finally:
            current_run.reset(token)
            # Celery's ``task_postrun`` is next.
            self.announcer.let_speak()

    def _retell(self, outcome: Outcome) -> Any:
        """The run's own end was journaled by an earlier process, which died before it was told."""
        if outcome.kind == OutcomeKind.QUARANTINED:
            raise TaskQuarantined(self.lease.task_id, outcome.reason or "")
        stored = (outcome.payload, outcome.content_type, outcome.content_encoding)
        if outcome.kind == OutcomeKind.EXCEPTION:
            raise self.runtime.outcome_codec.decode_exception(*stored)
        # Not before a failure: Celery's result store fails the rest of the chain by what stands there.
        self._forget_followers()
        return self.runtime.outcome_codec.decode(*stored)

    # -- the end ---------------------------------------------------------------------------------

    def _end_with_value(self, value: Any) -> Any:
        self._raise_if_over(f"the value {value!r:.100}")
        if self.retry is not None:
            # retry(throw=False), and the body went on to its return: the retry is what will happen.
            raise Retry("Task can be retried", None)
        try:
            outcome = self._encoded(value)
            followers = self._followers(value)
        except Exception as error:
            self._end_with_exception(error)
            raise
        entries = self.execution.unwritten
        outgoing = self._write(outcome, followers, entries, closes=not self.announcer.has_audience)
        self._forget_followers()
        if outgoing:
            self._send(outgoing)
        return value

    def _end_with_exception(self, error: Exception) -> None:
        """An exception that leaves the body: the run's end, unless the run is none any more."""
        self._raise_if_over(f"the exception {error!r:.100}")
        if isinstance(error, LeaseLost):
            raise Silence(str(error))
        if self.retry is not None:
            # After retry(throw=False): it runs again, so this is not its end.
            raise Retry("Task can be retried", error)
        payload, _ = self.runtime.outcome_codec.encode_exception(error)
        outcome = Outcome(
            OutcomeKind.EXCEPTION,
            f"{type(error).__name__}: {error}"[:500],
            payload.data,
            payload.content_type,
            payload.content_encoding,
        )
        # Steps that raised are not journaled with it: a retry is to run them again.
        self._write(outcome)

    def _end_quietly(self, control: BaseException) -> None:
        """``Ignore`` and ``Reject`` of the body itself: the row ends, nobody is told."""
        self._raise_if_over(repr(control))
        if self.replaced or getattr(control, "requeue", False):
            return
        self._write(Outcome(OutcomeKind.IGNORED, type(control).__name__), (), closes=True)

    def _raise_if_over(self, what: str) -> None:
        """Stop here if the body had no business to go on: it slept, diverged or lost its lease."""
        execution = self.execution
        if execution.is_parked:
            logger.warning(
                "%s[%s] is asleep; %s, which left its body after the sleep, is dropped",
                self.task.name,
                self.lease.task_id,
                what,
            )
            raise Silence("it sleeps")
        if execution.divergence is not None:
            self._set_aside()
            raise Silence(str(execution.divergence))
        if self.lease.lost:
            raise Silence(str(self.lease.loss))

    def _encoded(self, value: Any) -> Outcome:
        if not (self.announcer.stores_result or self.request.chord):
            return Outcome(OutcomeKind.VALUE)
        prepared = self.task.backend.prepare_value(value)
        payload = self.runtime.outcome_codec.encode(prepared)
        return Outcome(OutcomeKind.VALUE, None, payload.data, payload.content_type, payload.content_encoding)

    def _followers(self, value: Any) -> list[Follower]:
        if not self.request.callbacks and not self.request.chain:
            return []
        return build_followers(self.task.app, self.request, value)

    def _forget_followers(self) -> None:
        # The tracer publishes what it finds here; ours are rows already.
        self.request.callbacks = None
        self.request.chain = None

    def _write(
        self,
        outcome: Outcome,
        followers: Sequence[Follower] = (),
        entries: Sequence[JournalEntry] = (),
        *,
        closes: bool = False,
    ) -> Sequence[Outgoing]:
        """Journal the outcome with its followers. Returns those that can be sent now.

        ``closes``: the row ends with it.
        """
        execution, runs = self.execution, self.runtime.store.runs
        reached(Point.BODY_LEFT)
        if closes:
            self.lease.close()
        try:
            ended = execution.persevere(
                lambda: (
                    runs.close(self.claim.key, outcome, entries=entries, followers=followers)
                    if closes
                    else runs.end(
                        self.claim.key, outcome, self.limits.lease_ttl, entries=entries, followers=followers
                    )
                )
            )
            if ended is None:
                self.lease.reopen()
                execution.refuse()
        except LeaseLost as lost:
            raise Silence(str(lost)) from None
        assert ended is not None
        reached(Point.END_WRITTEN)
        self.outcome, self.is_closed = outcome, closes
        for follower, refusal in ended.refused:
            logger.warning(
                "%s[%s] could not start %s[%s]: %s",
                self.task.name,
                self.lease.task_id,
                follower.delivery.task_name,
                follower.delivery.task_id,
                refusal.reason,
            )
        return ended.outgoing

    def _set_aside(self) -> None:
        divergence = self.execution.divergence
        assert divergence is not None
        self.announcer.going_aside(divergence)
        reached(Point.QUARANTINED_STORED)
        self.lease.close()
        if self.persevered(lambda: self.runtime.store.runs.set_aside(self.claim.key)):
            reached(Point.SET_ASIDE)
            self.announcer.set_aside(divergence)
        self.heartbeat.stop()

    def persevered(self, statement: Callable[[], bool]) -> bool:
        """Try a statement for as long as the lease lasts. False: refused, or the database stayed away."""
        try:
            return self.execution.persevere(statement)
        except LeaseLost:
            return False

    # -- losing the lease ------------------------------------------------------------------------

    def tell_stopped(self) -> None:
        """Tell, once, of a run that is taken from its worker because its lease is lost."""
        if self.report_loss is not None:
            # Before anything that waits for a server: its process may be about to be killed.
            report, self.report_loss = self.report_loss, None
            report()
        self.announcer.lost()
        self.announcer.let_speak()
        self.announcer.stopped()

    def dispose(self) -> None:
        """Nothing of the run is left to do."""
        self.heartbeat.stop()
        self.over.set()
        # The two hold one another, until the collector comes: in a worker, after thousands of runs.
        self.heartbeat.on_lost = _nobody

    def _on_lost(self, lease: Lease, outcome: Outcome | None) -> None:
        """Called in a thread of its own."""
        self.announcer.taker = outcome
        if self.interrupt is None:
            self.announcer.lost()
            return
        self.announcer.lost_meanwhile()
        self.interrupt(self, outcome)


def _nobody(lease: Lease, outcome: Outcome | None) -> None:
    """Who hears of the loss of a lease after the end of its run."""


@contextmanager
def claimed(run: TaskRun) -> Iterator[None]:
    """The stretch in which Celery's tracer works on a claimed run."""
    token = _claimed_run.set(run)
    fields_token = current_fields.set(run.log_fields)
    try:
        yield
    finally:
        current_fields.reset(fields_token)
        _claimed_run.reset(token)


def claimed_run() -> TaskRun | None:
    """The run that Celery's tracer is working on in this thread or greenlet."""
    return _claimed_run.get()
