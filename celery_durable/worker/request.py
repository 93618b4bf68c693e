"""DurableRequest: a delivery in the worker's main process.

It hands the wire message along with the job, keeps the broker's message until the claim has committed, and
recovers the row when the pool child dies.
"""

from __future__ import annotations

import logging
from typing import Any

from billiard.exceptions import WorkerLostError
from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry
from celery.worker.request import Request
from celery.worker.state import task_ready

from celery_durable.errors import StoreUnavailable
from celery_durable.message import capture, delivery_of
from celery_durable.records import LeaseKey, Outcome, Status
from celery_durable.tracing import DELIVERY

logger = logging.getLogger(__name__)

_CONTROL = (Ignore, Reject, Retry)


class DurableRequest(Request):
    """The request class of durable tasks.

    Celery builds a subclass of this per task that overrides ``execute_using_pool`` and ``on_success``, so
    what the child must know goes into ``_request_dict`` here (seen in Celery 5.7).
    """

    #: The lease under which the task runs, once its claim is known.
    lease_key: LeaseKey | None = None
    #: True when the run is over for the main process.
    is_over = False
    #: True when the broker's message may be acknowledged: a claim or a refusal has committed.
    _may_acknowledge = False

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        if self._decoded:
            raise InvalidTaskError("durable tasks need task protocol 2 (task_protocol = 2)")
        self._durable = self._app.durable
        self.number: int = self._durable.worker.book.register(self)
        delivery = delivery_of(self._request_dict, capture(message), eta=self._eta, expires=self._expires)
        # The claim decides both, in the database. Left to Celery, an eta would be held in this worker's
        # memory, and an expired id would enter the set of ids that every worker refuses.
        self._eta = self._expires = None
        self._request_dict[DELIVERY] = {"number": self.number, "delivery": delivery}

    # -- what became of the delivery ---------------------------------------------------------------

    def on_claimed(self, key: LeaseKey | None) -> None:
        """The claim has committed: ownership has passed from the broker to the lease."""
        self.lease_key = key
        self._acknowledge_now()
        self._durable.worker.on_lease_taken(self)

    def on_declined(self) -> None:
        """There was nothing to run."""
        self._acknowledge_now()

    def on_put_back(self) -> None:
        """The delivery could not be claimed and the worker stops."""
        self.reject(requeue=True)

    def on_verdict(self, key: LeaseKey | None, *, is_expiry: bool) -> None:
        """The claim found a cancel or an expiry: tell of it as Celery does, then end the row."""
        self._may_acknowledge = True
        reason = "expired" if is_expiry else "revoked"
        self._announce_revoked(reason, False, None, is_expiry)
        if key is not None:
            self._finish(key, Status.CANCELLED)

    def _acknowledge_now(self) -> None:
        self._may_acknowledge = True
        self._durable.worker.acknowledge(self)

    def acknowledge(self) -> None:
        """As Celery's, but not before the claim: Celery's own calls of it know nothing of leases."""
        if self._may_acknowledge:
            super().acknowledge()

    def _finish(self, key: LeaseKey, status: str) -> None:
        try:
            self._durable.runtime.store.runs.finish(key, status)
        except StoreUnavailable as error:
            logger.warning("%s[%s] is not ended yet: %s", self.name, self.id, error)

    # -- what the pool says ------------------------------------------------------------------------

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """As Celery's, but a dead child is no failure: its row is made due."""
        self._durable.worker.drain()
        error = exc_info.exception
        error = getattr(error, "exc", error)
        if isinstance(error, (WorkerLostError, SystemExit, KeyboardInterrupt)):
            self._on_child_lost(error)
            return None
        self.is_over = True
        if not isinstance(error, _CONTROL):
            # It failed before its claim (a body that cannot be decoded), or the tracer has told it.
            self._may_acknowledge = True
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def _on_child_lost(self, error: BaseException) -> None:
        task_ready(self)
        self.is_over = True
        if self.lease_key is None:
            # Whether it was claimed is not known. A duplicate does no harm, a loss does.
            self.reject(requeue=True)
            return
        try:
            limits = self._durable.limits(self._task)
            answer = self._durable.runtime.store.leases.recover(self.lease_key, limits.max_crashes)
        except StoreUnavailable as unavailable:
            logger.warning(
                "%s[%s] lost its process and waits for its lease to run out: %s",
                self.name,
                self.id,
                unavailable,
            )
            return
        if isinstance(answer, Outcome):
            logger.error("%s[%s] is quarantined: %s", self.name, self.id, answer.reason)
            self._durable.announce_quarantine(self._task, self.lease_key, answer)
        elif answer:
            logger.warning("%s[%s] lost its process (%s) and goes on elsewhere", self.name, self.id, error)
