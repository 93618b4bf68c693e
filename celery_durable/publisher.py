"""Publishing rows: to the broker as first sent, and only what it confirmed counts as sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kombu import Connection

from celery_durable.clock import Clock, SystemClock
from celery_durable.message import publish_arguments
from celery_durable.records import Outgoing

logger = logging.getLogger(__name__)

#: Seconds that one batch may take at the broker.
PUBLISH_TIMEOUT = 5.0


class Publisher:
    """Sends batches over one connection of its own, made when it is first needed."""

    def __init__(self, app: Any, clock: Clock | None = None) -> None:
        self._app = app
        self._clock = clock or SystemClock()
        self._connection: Connection | None = None
        self._producer: Any = None
        self._is_away = False

    def publish(self, batch: Sequence[Outgoing]) -> tuple[list[Outgoing], list[Outgoing]]:
        """Publish a batch, in order. Returns what was confirmed, and what was not.

        A row that cannot be read is logged and counts as not sent; the others are not held up.
        """
        deadline = self._clock.monotonic() + PUBLISH_TIMEOUT
        sent: list[Outgoing] = []
        unsent: list[Outgoing] = []
        for position, outgoing in enumerate(batch):
            if self._clock.monotonic() >= deadline:
                unsent.extend(batch[position:])
                break
            try:
                self._publish_one(outgoing)
            except _BROKEN_ROW as error:
                logger.error("Row %s cannot be sent: %r", outgoing.key, error)
                unsent.append(outgoing)
            except Exception as error:  # noqa: BLE001 - whatever a transport raises, the broker is away
                self._report_away(error)
                self.close()
                unsent.extend(batch[position:])
                break
            else:
                sent.append(outgoing)
        if sent and not unsent:
            self._report_back()
        return sent, unsent

    def _publish_one(self, outgoing: Outgoing) -> None:
        arguments = publish_arguments(outgoing)
        self._open().publish(
            **arguments,
            declare=self._queue_of(outgoing),
            retry=False,
            timeout=PUBLISH_TIMEOUT,
            confirm_timeout=PUBLISH_TIMEOUT,
        )

    def _queue_of(self, outgoing: Outgoing) -> list[Any]:
        """The queue to declare before, as Celery does: a broker may have lost it."""
        message = outgoing.message
        if message.exchange:
            return []
        try:
            return [self._app.amqp.queues[message.routing_key]]
        except KeyError:
            return []

    def _open(self) -> Any:
        if self._producer is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=PUBLISH_TIMEOUT,
                transport_options={
                    **self._app.conf.broker_transport_options,
                    "confirm_publish": True,
                },
            )
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer

    def close(self) -> None:
        """Drop the connection; the next publish makes another."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is None:
            return
        try:
            connection.collect(socket_timeout=0.1)
        except Exception as error:  # noqa: BLE001 - it is being thrown away because it is broken
            logger.debug("Closing the broker connection: %r", error)

    def _report_away(self, error: Exception) -> None:
        if not self._is_away:
            logger.error("The broker cannot be reached, wakes wait in the database: %r", error)
        self._is_away = True

    def _report_back(self) -> None:
        if self._is_away:
            logger.info("The broker is back")
        self._is_away = False


_BROKEN_ROW = (ValueError, KeyError, TypeError, UnicodeError)
