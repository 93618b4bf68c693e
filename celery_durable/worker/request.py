"""DurableRequest: a delivery in the worker's main process.

It hands the wire message along with the job, keeps the broker's message until the claim has committed, and
recovers the row when the pool child dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry
from celery.platforms import signals
from celery.worker.request import Request
from celery.worker.state import task_ready

from celery_durable.announcer import report_crash
from celery_durable.clock import monotonic
from celery_durable.control import REASON
from celery_durable.errors import StoreUnavailable, failure_of
from celery_durable.logs import about
from celery_durable.message import received
from celery_durable.points import Point, reached
from celery_durable.records import LeaseKey, Outcome, OutcomeKind, Status
from celery_durable.texts import flaw_of_message
from celery_durable.tracing import DELIVERY
from celery_durable.worker.headers import flaw_of_headers
from celery_durable.worker.limits import fails_at_limit
from celery_durable.worker.unread import announce_unread, keep_unread

logger = logging.getLogger(__name__)

_CONTROL = (Ignore, Reject, Retry)
_IN_THE_BODY = ("args", "kwargs")
#: What billiard reports of a child that is gone; ``Terminated`` where the worker itself has killed it.
_DEATHS = (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)
#: Seconds after which a child is dead that billiard kills when it has reported a hard limit: its claim must
#: not meet the next one's.
KILLED_AFTER = 1.0


class DurableRequest(Request):
    """The request class of durable tasks.

    Celery builds a subclass of this per task that overrides ``execute_using_pool`` and ``on_success``, so
    what the child must know goes into ``_request_dict`` here (seen in Celery 5.7).
    """

    # Celery's own, which its type stubs leave out.
    _already_revoked: bool
    _app: Any
    _apply_result: Any
    _decoded: bool
    _eta: Any
    _expires: Any
    _request_dict: dict[str, Any]
    _task: Any

    #: The lease under which the task runs, once its claim is known.
    lease_key: LeaseKey | None = None
    #: True when the run is over for the main process.
    is_over = False
    #: True when a row was made of its message, and nothing was heard of a claim since.
    is_adopted = False
    #: True when the lease is lost and the run is being stopped: if that takes its process, it is no crash.
    is_lost = False
    #: How to stop its run, if there will be one. Before that there is none: the claim at work may be that of
    #: the verdict, and its process killed between claim and report would leave the lease to run out.
    _stop_on_claim: tuple[Any, int] | None = None
    #: True when the broker's message may be acknowledged: a claim or a refusal has committed.
    _may_acknowledge = False
    _holds_its_tongue = False

    def __init__(self, message: Any, **options: Any) -> None:
        try:
            super().__init__(message, **options)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Left as it is, it would be the end of the worker.
            raise InvalidTaskError(f"its headers cannot be read: {error!r:.200}") from error
        if self._decoded:
            raise InvalidTaskError("durable tasks need task protocol 2 (task_protocol = 2)")
        flaw = flaw_of_message(self.id, self.name) or flaw_of_headers(self._request_dict)
        if flaw is not None:
            raise InvalidTaskError(flaw)
        try:
            delivery = received(message, self._request_dict, eta=self._eta, expires=self._expires)
        except ValueError as error:
            raise InvalidTaskError(str(error)) from error
        self._durable = self._app.durable
        self.number: int = self._durable.worker.book.register(self)
        # The claim decides both, in the database. Left to Celery, an eta would be held in this worker's
        # memory, and an expired id would enter the set of ids that every worker refuses.
        self._eta = self._expires = None
        self.delivery = delivery
        self.arrived_at = monotonic()
        self._request_dict[DELIVERY] = {"number": self.number, "delivery": delivery}

    @property
    def request_dict(self) -> dict[str, Any]:
        """What goes to the pool with the job.

        Without the arguments, which the child reads from the body: in here they would be unpickled with the
        job, and a child that cannot do that dies, and the next one with it.
        """
        return {name: value for name, value in self._request_dict.items() if name not in _IN_THE_BODY}

    # -- what became of the delivery ---------------------------------------------------------------

    def on_claimed(self, key: LeaseKey | None) -> None:
        """The claim has committed: ownership has passed from the broker to the lease."""
        self.lease_key = key
        reached(Point.CLAIM_HEARD)
        self._acknowledge_now()
        if self._stop_on_claim is not None:
            self._stop_run(*self._stop_on_claim)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        """As Celery's; the pool's word of the start may be read after that of the claim."""
        super().on_accepted(pid, time_accepted)
        if self._stop_on_claim is not None and self.holds_lease:
            self._stop_run(*self._stop_on_claim)

    @property
    def is_waiting(self) -> bool:
        """Whether its message still lies unacknowledged, with nothing known of a claim."""
        return not (self.acknowledged or self._may_acknowledge or self.is_over)

    @property
    def waits_as_row(self) -> bool:
        """Whether it waits for its turn here, while its row says that the wake is on its way."""
        return self.is_adopted and self.acknowledged and not self.is_over

    @property
    def holds_lease(self) -> bool:
        """Whether its run is on, as far as the main process knows."""
        return self.lease_key is not None and not self.is_over

    def adopt(self) -> None:
        """Make a row of a message that waits too long here, and acknowledge it.

        What a claim would do to the tables, without running anything. The job stays with the pool and
        claims the row when its turn comes; if this worker dies first, the scheduler sends it again.
        """
        # Before the row is there: its job may claim it at once, and be heard by another thread.
        self.is_adopted = True
        self._durable.store.claims.keep(self.delivery, self._durable.settings.resend_delay)
        reached(Point.MESSAGE_ADOPTED)
        self._acknowledge_now()

    def on_declined(self) -> None:
        """There was nothing to run."""
        if self.holds_lease:
            # A pool whose process dies before the word of its start is read gives the job to another one.
            # That has met the lease of the first one, of whose death nobody else will tell.
            self._on_child_lost(WorkerLostError("its process is gone"))
        self._acknowledge_now()

    def on_put_back(self) -> None:
        """The delivery was not claimed, and the worker stops or lost the process that had it."""
        if self.acknowledged:
            # It was adopted: its row waits for a claim that will not come.
            self._durable.worker.upkeep.soon(lambda: self._durable.store.leases.make_due(self.id))
        else:
            self._give_back()

    def _give_back(self) -> None:
        try:
            self.reject(requeue=True)
        except Exception as error:  # noqa: BLE001 - a channel that is closed fails in each transport's own way
            # With its connection the broker has got back what was not acknowledged.
            self._log(logging.WARNING, "is left to the broker: %r", error)

    def on_lost(self) -> None:
        """The run has lost its lease, and is being stopped."""
        self.is_lost = True

    def on_verdict(self, key: LeaseKey | None, *, is_expiry: bool) -> None:
        """The claim found a cancel or an expiry: tell of it as Celery does, then end the row."""
        self._may_acknowledge = True
        reason = "expired" if is_expiry else "revoked"
        self._announce_revoked(reason, False, None, is_expiry)
        reached(Point.VERDICT_TOLD)
        if key is not None:
            self._finish(key, Status.CANCELLED)

    def _acknowledge_now(self) -> None:
        self._may_acknowledge = True
        self._durable.worker.acknowledge(self)

    def acknowledge(self) -> None:
        """As Celery's, but not before the claim: Celery's own calls of it know nothing of leases."""
        if not self._may_acknowledge:
            # The result of a job may be read before the record of its claim.
            self._durable.worker.drain()
        if self._may_acknowledge:
            self._durable.worker.acknowledge(self)

    def reject(self, requeue: bool = False) -> None:
        """As Celery's, but one at a time with an acknowledgement from another thread."""
        with self._durable.worker.answering:
            super().reject(requeue=requeue)

    def _finish(self, key: LeaseKey, status: str) -> None:
        try:
            self._durable.runtime.store.runs.finish(key, status)
        except StoreUnavailable as error:
            self._log(logging.WARNING, "is not ended yet: %s", error)

    # -- revokes of others -------------------------------------------------------------------------

    def revoked(self) -> bool:
        """As Celery's, but what this worker would discard is cancelled in its row: the claim tells of it.

        Told here, the row would stay behind and be sent again.
        """
        if self._already_revoked:
            return True
        self._holds_its_tongue = True
        try:
            is_revoked = bool(super().revoked())
        finally:
            self._holds_its_tongue = False
        if not is_revoked or self._durable.cancel_discarded(self.id):
            return False
        # The database is away. If there is a row, another wake will meet the same revoke.
        self.is_over = self._may_acknowledge = True
        self._announce_revoked("revoked", False, None, False)
        return True

    def _announce_revoked(self, *args: Any) -> None:
        if not self._holds_its_tongue:
            super()._announce_revoked(*args)  # type: ignore[misc]

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Kill the child of a task that was cancelled. The claim of its verdict tells of the revoke."""
        verdicts = self._durable.store.verdicts
        # Before what its child's death will have written, and after that of a canceller who had the database.
        self._durable.worker.upkeep.soon(lambda: verdicts.cancel([self.id], REASON))
        self._durable.worker.drain()
        self._stop_on_claim = pool, signals.signum(signal or TERM_SIGNAME)
        if self.holds_lease:
            self._stop_run(*self._stop_on_claim)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Stop the run without a word: the worker stops, or lost its broker. It goes on elsewhere."""
        self._already_cancelled = True
        self._stop_run(pool, signals.signum(signal or TERM_SIGNAME))

    def _stop_run(self, pool: Any, number: int) -> None:
        if self._durable.worker.interrupt_delivery(self.number):
            return
        if self.time_start:
            pool.terminate_job(self.worker_pid, number)
        job = self._apply_result() if self._apply_result is not None else None
        if job is not None:
            job.terminate(number)

    # -- what the pool says ------------------------------------------------------------------------

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """As Celery's, but a dead child is no failure: its row is made due."""
        self._durable.worker.drain()
        error = exc_info.exception
        error = getattr(error, "exc", error)
        if isinstance(error, _DEATHS):
            self._on_child_lost(error)
            return None
        if isinstance(error, TimeLimitExceeded):
            # billiard reports a hard limit here first and calls ``on_timeout`` right after.
            return None
        self.is_over = True
        if not isinstance(error, _CONTROL):
            if not return_ok or self.lease_key is None:
                self._on_pool_failure(exc_info, error)
                return None
            # The tracer has told it: it tells of what has a lease.
            self._may_acknowledge = True
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def _on_pool_failure(self, exc_info: Any, error: Any) -> None:
        """The tracer was left by an error, or what it has answered could not be sent."""
        key = self.lease_key
        if key is None:
            self._keep_unread(exc_info, error)
        elif self.is_lost or self._durable.worker.is_stopping:
            # While its worker stops cold, Celery tells of no failure.
            task_ready(self)
            self._hand_back(key)
        else:
            failure = failure_of(error)
            exc_info.exception, exc_info.type = failure, type(failure)
            reason = f"{type(failure).__name__}: {failure}"[:500]
            self._fail_from_here(key, failure, reason, partial(super().on_failure, exc_info))

    def _keep_unread(self, exc_info: Any, error: Exception) -> None:
        """It failed before its claim, as with a body that the pool process cannot decode."""
        task_ready(self)
        try:
            has_failed = keep_unread(self._app, self.delivery, self.message, error)
        except StoreUnavailable as unavailable:
            self._log(logging.WARNING, "goes back: %s", unavailable)
            self.on_put_back()
            return
        self._acknowledge_now()
        if has_failed:
            announce_unread(self, self._task, exc_info, error)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """As Celery's; a hard limit ends the run in the database before it is told, or not at all."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        self._durable.worker.drain()
        self.is_over = True
        if self.lease_key is None:
            task_ready(self)
            self.on_put_back()
        elif fails_at_limit(self._task):
            self._fail_at_limit(self.lease_key, timeout)
        else:
            task_ready(self)
            logger.error(
                "Hard time limit (%ss) exceeded for %s[%s]: it runs again",
                timeout,
                self.name,
                self.id,
                extra=about(self.name, self.id),
            )
            self._hand_back(self.lease_key, KILLED_AFTER)

    def _fail_at_limit(self, key: LeaseKey, timeout: float) -> None:
        error, reason = TimeLimitExceeded(timeout), f"hard time limit ({timeout:g} s)"
        tell = partial(super().on_timeout, False, timeout)
        self._fail_from_here(key, error, reason, tell, KILLED_AFTER)

    def _fail_from_here(
        self, key: LeaseKey, error: Exception, reason: str, tell: Callable[[], Any], delay: float = 0.0
    ) -> None:
        """End in failure a run whose process cannot do so: the row first, then who is to be told.

        ``delay``: the least pause before its next claim, where it cannot.
        """
        reached(Point.LIMIT_HIT)
        taken = self._end_from_here(key, error, reason)
        if taken is None:
            task_ready(self)
            self._log(logging.WARNING, "is left to its row, which says what becomes of it: %r", error)
            # Still held, with an outcome that its process died of telling, as it were; else nothing is done.
            self._durable.worker.upkeep.soon(lambda: self._recover(key, error, delay))
            return
        reached(Point.LIMIT_WRITTEN)
        tell()
        reached(Point.LIMIT_TOLD)
        self._finish(taken, Status.FAILED)

    def _end_from_here(self, key: LeaseKey, error: Exception, reason: str) -> LeaseKey | None:
        """Write a failure into the row. Returns the lease to tell it under; None: it is not to be told."""
        runtime = self._durable.runtime
        payload, _ = runtime.outcome_codec.encode_exception(error)
        encoding = payload.content_type, payload.content_encoding
        outcome = Outcome(OutcomeKind.EXCEPTION, reason, payload.data, *encoding)
        ttl = self._durable.limits(self._task).lease_ttl
        try:
            taken: LeaseKey | None = runtime.store.leases.take_from_child(key, runtime.owner, ttl, outcome)
        except StoreUnavailable as unavailable:
            self._log(logging.WARNING, "waits for its lease to run out: %s", unavailable)
            return None
        return taken

    def _log(self, level: int, text: str, *values: Any) -> None:
        text = "%s[%s] " + text
        logger.log(level, text, self.name, self.id, *values, extra=about(self.name, self.id))

    def _hand_back(self, key: LeaseKey, delay: float = 0.0) -> None:
        leases = self._durable.runtime.store.leases
        self._durable.worker.upkeep.soon(lambda: leases.hand_back(key, delay))

    def _on_child_lost(self, error: BaseException) -> None:
        task_ready(self)
        self.is_over = True
        key = self.lease_key
        if key is None:
            # Whether it was claimed is not known. A duplicate does no harm, a loss does.
            self.on_put_back()
        elif self.is_lost or self._durable.worker.is_stopping:
            # We have killed it, or whoever stops the worker has killed its children with it.
            self._hand_back(key)
        else:
            self._durable.worker.upkeep.soon(lambda: self._recover(key, error))

    def _recover(self, key: LeaseKey, error: BaseException, delay: float = 0.0) -> None:
        limits = self._durable.limits(self._task)
        reached(Point.CHILD_LOST)
        answer = self._durable.runtime.store.leases.recover(key, limits.max_crashes, delay)
        reached(Point.CHILD_RECOVERED)
        report_crash(self._task, key, answer, error)
