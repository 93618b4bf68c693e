"""What becomes of a durable message that this worker can make nothing of.

A deploy may take a task's name, a serializer or a class in a pickle away from under what sleeps. Celery
would store a failure for such a message; here its row stays, is sent again with a growing pause, and fails
at a stated limit. What has its outcome already, such as a cancel, is told at once.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.app.task import Context
from celery.signals import task_failure

from celery_durable.errors import TaskQuarantined
from celery_durable.logs import about
from celery_durable.message import wakes_of
from celery_durable.points import Point, reached
from celery_durable.records import Claim, Delivery, Outcome, OutcomeKind, Status

logger = logging.getLogger(__name__)

#: Sends of one wake after which a message that no worker understands is a failure. With the default
#: ``durable_resend_delay`` that is about half a day.
UNREAD_LIMIT = 16


def keep_unread(app: Any, delivery: Delivery, message: Any, error: Exception) -> bool:
    """Keep a message that cannot be run here as a row; at the limit, end the row with ``error``.

    Called in the worker's main process; afterwards the broker's message can be acknowledged. Returns
    whether the task has failed with ``error`` just now, and that was told.

    Raises:
        StoreUnavailable: the database is away. Nothing has been decided.
    """
    durable = app.durable
    if wakes_of(message.headers) >= UNREAD_LIMIT or _has_outcome(durable, delivery):
        return _end(app, delivery, message, error)
    logger.warning(
        "%s[%s] is not understood by this worker and will be sent again: %r",
        delivery.task_name,
        delivery.task_id,
        error,
        extra=about(delivery.task_name, delivery.task_id),
    )
    durable.store.claims.keep(delivery, durable.settings.resend_delay)
    reached(Point.MESSAGE_KEPT)
    return False


def announce_unread(request: Any, task: Any, exc_info: Any, error: Exception) -> None:
    """Send what Celery would of a task that has failed: its signal and its event."""
    task_failure.send(
        sender=task,
        task_id=request.id,
        exception=error,
        args=request.args,
        kwargs=request.kwargs,
        traceback=exc_info.traceback,
        einfo=exc_info,
    )
    request.send_event("task-failed", exception=repr(error), traceback=str(exc_info.traceback))


def _has_outcome(durable: Any, delivery: Delivery) -> bool:
    """Whether the task was cancelled, or died in its end: to tell of that, its code is not needed."""
    if not delivery.is_wake:
        return False
    found = durable.store.queries.get(delivery.task_id)
    return found is not None and found.outcome is not None


def _end(app: Any, delivery: Delivery, message: Any, error: Exception) -> bool:
    """End the row, with a failure that names the cause where it has no outcome yet."""
    runtime, ttl = app.durable.runtime, app.durable.settings.lease_ttl
    claim = runtime.store.claims.claim(delivery, runtime.owner, ttl, None)
    if not isinstance(claim, Claim):
        return False
    outcome = claim.outcome
    if outcome is None:
        payload, _ = runtime.outcome_codec.encode_exception(error)
        encoding = payload.content_type, payload.content_encoding
        outcome = Outcome(OutcomeKind.EXCEPTION, repr(error), payload.data, *encoding)
        if runtime.store.runs.end(claim.key, outcome, ttl) is None:
            return False
        logger.error(
            "%s[%s] fails: %r",
            delivery.task_name,
            delivery.task_id,
            error,
            extra=about(delivery.task_name, delivery.task_id),
        )
        reached(Point.UNKNOWN_FAILED)
    try:
        status = _tell(app, Context({**message.headers, **_embedded(message)}), outcome)
    except Exception as untold:  # noqa: BLE001 - each result store has errors of its own
        # Its lease runs out, and the next wake finds the outcome.
        logger.warning(
            "%s[%s] has ended, nobody is told yet: %r",
            delivery.task_name,
            delivery.task_id,
            untold,
            extra=about(delivery.task_name, delivery.task_id),
        )
        return False
    reached(Point.UNKNOWN_TOLD)
    runtime.store.runs.finish(claim.key, status)
    return outcome is not claim.outcome


def _tell(app: Any, request: Any, outcome: Outcome) -> str:
    """Tell result store, chord and errbacks, as far as the message can be read. Returns the row's end."""
    backend, codec = app.backend, app.durable.runtime.outcome_codec
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
