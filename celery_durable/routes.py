"""Declaring queues before messages go to them, as Celery does whenever it publishes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kombu import Connection, Queue
from kombu.common import Broadcast

logger = logging.getLogger(__name__)


class Routes:
    """The routes of one connection: each is declared once, a broker may have lost it."""

    def __init__(self, amqp: Any, connection: Connection) -> None:
        self._amqp = amqp
        self._connection = connection
        self._declared: set[tuple[str, str]] = set()
        self._channel: Any = None

    def declare(self, exchange: str, routing_key: str) -> None:
        """Make sure that a route exists, as far as this app knows it.

        A broker that has it in another form keeps its own: the message may well get there.
        """
        route = (exchange, routing_key)
        if route in self._declared:
            return
        self._declared.add(route)
        for queue in self._queues(exchange, routing_key):
            try:
                self._declare(queue)
            except self._connection.channel_errors as error:
                # It has closed the channel, which is why no message goes through this one.
                self._channel = None
                logger.warning("Queue %r is not declared as configured here: %s", queue.name, error)

    def forget(self, exchange: str, routing_key: str) -> None:
        """Declare a route again before its next message."""
        self._declared.discard((exchange, routing_key))

    def _queues(self, exchange: str, routing_key: str) -> Iterable[Queue]:
        queues = self._amqp.queues
        if exchange:
            return [queue for queue in list(queues.values()) if _exchange_of(queue) == exchange]
        try:
            return [queues[routing_key]]
        except KeyError:
            return []

    def _declare(self, queue: Queue) -> None:
        if self._channel is None:
            self._channel = self._connection.channel()
        if isinstance(queue, Broadcast):
            # Each consumer has a queue of its own; who publishes needs the exchange.
            queue.exchange(self._channel).declare()
        else:
            queue(self._channel).declare()


def _exchange_of(queue: Queue) -> str:
    return queue.exchange.name if queue.exchange is not None else ""
