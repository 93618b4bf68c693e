"""The consumer, for durable messages whose task or content type this worker does not know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.exceptions import NotRegistered
from celery.worker.consumer import Consumer

from celery_durable.errors import StoreUnavailable
from celery_durable.logs import about
from celery_durable.message import instant_of_header, mark_of, received
from celery_durable.records import Delivery
from celery_durable.texts import flaw_of_message
from celery_durable.worker.unread import keep_unread

logger = logging.getLogger(__name__)

#: Seconds after which a consumer that was cancelled is given nothing any more. kombu on Redis has a question
#: on its way for a second (``brpop_timeout``), and whatever answers it is lost.
LAST_POLL = 2.0


class DurableConsumer(Consumer):
    """Celery's consumer; what is not durable goes the usual way."""

    app: Any
    connection_errors: tuple[type[BaseException], ...]

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """As Celery's, but a task's name that is no text is refused. Celery looks for it as it comes."""
        handle: Callable[[Any], None] = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> None:
            headers = message.headers
            if isinstance(headers, Mapping) and not isinstance(headers.get("task", ""), str):
                self.on_unknown_message(None, message)
            else:
                handle(message)

        return on_task_received

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """As Celery's, which then drops what waits for its turn."""
        super().on_connection_error_after_connected(exc)
        side = self.app.durable.worker
        side.make_due(side.adopted())

    def stop(self) -> None:
        """As Celery's, which drops what waits for its turn."""
        side = self.app.durable.worker
        waiting = side.adopted()
        super().stop()
        side.make_due(waiting, LAST_POLL)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        headers = message.headers
        if self._keep_unread(message, NotRegistered(headers.get("task"))):
            return
        if "task" in headers and flaw_of_message(headers.get("id"), headers["task"]) is not None:
            # Celery would store a failure under that id, and the worker end with what the result store says.
            # Where there is none, it would look for one in the body, as protocol 1 has it.
            super().on_unknown_message(body, message)
            return
        super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        if not self._keep_unread(message, exc):
            super().on_invalid_task(body, message, exc)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        if not self._keep_unread(message, exc):
            super().on_decode_error(message, exc)

    def _keep_unread(self, message: Any, error: Exception) -> bool:
        """Keep a durable message as a row. False: it is none of ours."""
        headers = message.headers or {}
        if not mark_of(headers) or "id" not in headers or "task" not in headers:
            return False
        try:
            delivery = self._delivery(message, headers)
        except ValueError as flaw:
            # No row can be made of it, and no result store is likely to have a place for it.
            logger.error("A durable message is refused: %s", flaw)
            message.reject_log_error(logger, self.connection_errors)
            return True
        try:
            keep_unread(self.app, delivery, message, error)
        except StoreUnavailable as unavailable:
            logger.warning(
                "%s[%s] goes back: %s",
                delivery.task_name,
                delivery.task_id,
                unavailable,
                extra=about(delivery.task_name, delivery.task_id),
            )
            message.reject_log_error(logger, self.connection_errors, requeue=True)
        else:
            message.ack_log_error(logger, self.connection_errors)
        return True

    def _delivery(self, message: Any, headers: Any) -> Delivery:
        """The message as a row can hold it. Raises ValueError where none can."""
        flaw = flaw_of_message(headers["id"], headers["task"])
        if flaw is not None:
            raise ValueError(flaw)
        try:
            eta, expires = (instant_of_header(self.app, headers.get(name)) for name in ("eta", "expires"))
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"its eta or expires cannot be read: {error!r:.200}") from error
        return received(message, headers, eta=eta, expires=expires)
