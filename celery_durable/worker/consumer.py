"""The consumer, for durable messages that this worker can make nothing of.

A deploy may take a task's name or a serializer away from under what sleeps. Celery would store a failure
for such a message; here its row stays, is sent again with a growing pause, and fails at a stated limit.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import states
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.worker.consumer import Consumer

from celery_durable.errors import StoreUnavailable
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
            if int(mark.get("wake") or 0) >= UNKNOWN_LIMIT:
                self._fail(delivery, message, error)
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

    def _fail(self, delivery: Delivery, message: Any, error: Exception) -> None:
        """End the row with a failure that names the cause; chord and errbacks are told where readable."""
        durable = self.app.durable
        runtime, settings = durable.runtime, durable.settings
        claim = runtime.store.claims.claim(delivery, runtime.owner, settings.lease_ttl, None)
        if not isinstance(claim, Claim):
            return
        payload, _ = runtime.outcome_codec.encode_exception(error)
        outcome = Outcome(
            OutcomeKind.EXCEPTION, repr(error), payload.data, payload.content_type, payload.content_encoding
        )
        if claim.outcome is None and runtime.store.runs.end(claim.key, outcome, settings.lease_ttl) is None:
            return
        logger.error("%s[%s] fails: %r", delivery.task_name, delivery.task_id, error)
        reached(Point.UNKNOWN_FAILED)
        request = Context({**message.headers, **_embedded(message)})
        self.app.backend.mark_as_failure(
            delivery.task_id,
            error,
            request=request,
            store_result=not request.ignore_result,
            state=states.FAILURE,
        )
        reached(Point.UNKNOWN_TOLD)
        runtime.store.runs.finish(claim.key, Status.FAILED)


def _embedded(message: Any) -> dict[str, Any]:
    """Chord and errbacks, which stand in the message's body; nothing where it cannot be read."""
    try:
        _, _, embedded = message.payload
    except Exception:  # noqa: BLE001 - the very case may be that it cannot be decoded
        return {}
    return {name: embedded.get(name) for name in ("chord", "errbacks", "chain")}
