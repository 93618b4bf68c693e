"""The consumer, for durable messages that this worker can make nothing of.

A deploy may take a task's name or a serializer away from under what sleeps. Celery would store a failure
for such a message; here its row stays, is sent again with a growing pause, and fails at a stated limit.
What has its outcome already, such as a cancel, is told at once.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.worker.consumer import Consumer

from celery_durable.errors import StoreUnavailable, TaskQuarantined
from celery_durable.message import capture, delivery_of, instant_of_header, mark_of
from celery_durable.points import Point, reached
from celery_durable.records import Claim, Delivery, Outcome, OutcomeKind, Status

logger = logging.getLogger(__name__)

#: Sends of one wake after which a message that no worker understands is a failure. With the default
#: ``durable_resend_delay`` that is about half a day.
UNKNOWN_LIMIT = 16


class DurableConsumer(Consumer):
    """Celery's consumer; what is not durable goes the usual way."""

    app: Any
    connection_errors: tuple[type[BaseException], ...]

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        if not self._set_aside(message, NotRegistered(message.headers.get("task"))):
            super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        if not self._set_aside(message, exc):
            super().on_invalid_task(body, message, exc)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        if not self._set_aside(message, exc):
            super().on_decode_error(message, exc)

    def _set_aside(self, message: Any, error: Exception) -> bool:
        """Keep a durable message as a row. False: it is none, or the database is away."""
        headers = message.headers or {}
        mark = mark_of(headers)
        if not mark or "id" not in headers or "task" not in headers:
            return False
        delivery = delivery_of(
            headers,
            capture(message),
            eta=instant_of_header(self.app, headers.get("eta")),
            expires=instant_of_header(self.app, headers.get("expires")),
        )
        try:
            if int(mark.get("wake") or 0) >= UNKNOWN_LIMIT or self._has_outcome(delivery):
                self._end(delivery, message, error)
            else:
                self._keep(delivery, error)
        except StoreUnavailable as unavailable:
            logger.warning("%s[%s] goes back: %s", delivery.task_name, delivery.task_id, unavailable)
            message.reject_log_error(logger, self.connection_errors, requeue=True)
        else:
            message.ack_log_error(logger, self.connection_errors)
        return True

    def _keep(self, delivery: Delivery, error: Exception) -> None:
        logger.warning(
            "%s[%s] is not understood by this worker and will be sent again: %r",
            delivery.task_name,
            delivery.task_id,
            error,
        )
        durable = self.app.durable
        durable.store.claims.keep(delivery, durable.settings.resend_delay)
        reached(Point.MESSAGE_KEPT)

    def _has_outcome(self, delivery: Delivery) -> bool:
        """Whether the task was cancelled, or died in its end: to tell of that, its code is not needed."""
        if not delivery.is_wake:
            return False
        found = self.app.durable.store.queries.get(delivery.task_id)
        return found is not None and found.outcome is not None

    def _end(self, delivery: Delivery, message: Any, error: Exception) -> None:
        """End the row, with a failure that names the cause where it has no outcome yet."""
        durable = self.app.durable
        runtime, ttl = durable.runtime, durable.settings.lease_ttl
        claim = runtime.store.claims.claim(delivery, runtime.owner, ttl, None)
        if not isinstance(claim, Claim):
            return
        outcome = claim.outcome
        if outcome is None:
            payload, _ = runtime.outcome_codec.encode_exception(error)
            encoding = payload.content_type, payload.content_encoding
            outcome = Outcome(OutcomeKind.EXCEPTION, repr(error), payload.data, *encoding)
            if runtime.store.runs.end(claim.key, outcome, ttl) is None:
                return
            logger.error("%s[%s] fails: %r", delivery.task_name, delivery.task_id, error)
            reached(Point.UNKNOWN_FAILED)
        try:
            status = self._tell(Context({**message.headers, **_embedded(message)}), outcome)
        except Exception as untold:  # noqa: BLE001 - each result store has errors of its own
            # Its lease runs out, and the next wake finds the outcome.
            logger.warning(
                "%s[%s] has ended, nobody is told yet: %r", delivery.task_name, delivery.task_id, untold
            )
            return
        reached(Point.UNKNOWN_TOLD)
        runtime.store.runs.finish(claim.key, status)

    def _tell(self, request: Any, outcome: Outcome) -> str:
        """Tell result store, chord and errbacks, as far as the message can be read. Returns the row's end."""
        backend, codec = self.app.backend, self.app.durable.runtime.outcome_codec
        stored = (outcome.payload, outcome.content_type, outcome.content_encoding)
        how = {"request": request, "store_result": not request.ignore_result}
        if outcome.kind == OutcomeKind.VALUE:
            backend.mark_as_done(request.id, codec.decode(*stored), **how)
            return Status.SUCCEEDED
        if outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.EXPIRED):
            reason = "expired" if outcome.kind == OutcomeKind.EXPIRED else "revoked"
            backend.mark_as_revoked(request.id, reason, **how)
            return Status.CANCELLED
        if outcome.kind == OutcomeKind.QUARANTINED:
            backend.mark_as_failure(request.id, TaskQuarantined(request.id, outcome.reason or ""), **how)
            return Status.QUARANTINED
        if outcome.kind == OutcomeKind.EXCEPTION:
            backend.mark_as_failure(request.id, codec.decode_exception(*stored), **how)
            return Status.FAILED
        return Status.SUCCEEDED


def _embedded(message: Any) -> dict[str, Any]:
    """Chord and errbacks, which stand in the message's body; nothing where it cannot be read."""
    try:
        _, _, embedded = message.payload
    except Exception:  # noqa: BLE001 - the very case may be that it cannot be decoded
        return {}
    return {name: embedded.get(name) for name in ("chord", "errbacks", "chain")}
