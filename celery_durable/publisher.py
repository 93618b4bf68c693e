"""Publishing rows: to the broker as first sent, and only what it confirmed counts as sent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu import Connection

from celery_durable.addresses import why_unreachable
from celery_durable.clock import Clock, SystemClock
from celery_durable.cork import Cork
from celery_durable.message import publish_arguments
from celery_durable.reach import Reach
from celery_durable.records import Outgoing, Status
from celery_durable.routes import Routes
from celery_durable.ways import BROKEN_MESSAGE, CORK, Attempt, Item, Way, way_of

logger = logging.getLogger(__name__)

#: Seconds that one batch may take at the broker, and that connecting to it may take.
PUBLISH_TIMEOUT = 5.0
CONNECT_TIMEOUT = 4.0
#: Refusals by one connected broker after which a row is set aside.
REFUSALS = 10


@dataclass(slots=True)
class Published:
    """What became of a batch.

    ``sent``: the broker has it. ``unsent``: it may or may not have it, and is to get it again.
    ``broken``: it cannot be sent as it is.
    """

    sent: list[Outgoing] = field(default_factory=list)
    unsent: list[Outgoing] = field(default_factory=list)
    broken: list[Outgoing] = field(default_factory=list)


class Publisher:
    """Sends batches over one connection of its own, made when it is first needed.

    ``is_stopping``: true once no further message is to be begun.
    """

    def __init__(
        self, app: Any, *, is_stopping: Callable[[], bool] | None = None, clock: Clock | None = None
    ) -> None:
        self._app = app
        self._is_stopping = is_stopping or _never
        self._clock = clock or SystemClock()
        self._connection: Connection | None = None
        self._way: Way | None = None
        self._routes: Routes | None = None
        # By row, since we are connected: what failed while the broker was away says nothing of a row.
        self._refusals: Counter[str] = Counter()
        self.broker = Reach("The broker", logger, self._clock)

    def connect(self) -> bool:
        """Whether the broker can be reached. While it cannot, it is tried after growing pauses only."""
        if self._way is not None:
            return True
        if self.broker.retry_in > 0:
            return False
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - a transport raises what it likes: the broker is away
            self._lose(error)
            return False
        return True

    def publish(self, batch: Sequence[Outgoing]) -> Published:
        """Publish a batch, in order, within five seconds. A row that cannot be sent holds nothing up."""
        published = Published()
        items = self._items(batch, published)
        if not self.connect():
            published.unsent.extend(item.outgoing for item in items)
            return published
        assert self._way is not None
        assert self._routes is not None
        attempt = Attempt(items, self._clock, PUBLISH_TIMEOUT, self._is_stopping)
        try:
            for item in items:
                self._routes.declare(item.exchange, item.routing_key)
            self._way.send(attempt)
        except Exception as error:  # noqa: BLE001 - a transport raises what it likes: the broker is away
            self._lose(error)
        else:
            self.broker.back()
        self._report(attempt)
        self._refusals.update(item.outgoing.key for item in attempt.refused)
        for item in items:
            if item in attempt.sent or _is_nobodys(item, attempt):
                published.sent.append(item.outgoing)
            elif item in attempt.broken or self._is_hopeless(item, attempt):
                published.broken.append(item.outgoing)
            else:
                published.unsent.append(item.outgoing)
        return published

    def _is_hopeless(self, item: Item, attempt: Attempt) -> bool:
        # Each refusal closes a channel under the others. An exchange that was lost is back by then.
        return item in attempt.refused and self._refusals[item.outgoing.key] >= REFUSALS

    def close(self) -> None:
        """Drop the connection; the next publish makes another."""
        self._refusals.clear()
        connection, self._connection, self._way, self._routes = self._connection, None, None, None
        if connection is None:
            return
        try:
            connection.collect(socket_timeout=0.1)
        except Exception as error:  # noqa: BLE001 - it is thrown away, perhaps because it is broken
            logger.debug("Closing the broker connection: %r", error)

    def _items(self, batch: Sequence[Outgoing], published: Published) -> list[Item]:
        items = []
        for outgoing in batch:
            try:
                items.append(Item(outgoing, publish_arguments(outgoing)))
            except BROKEN_MESSAGE as error:
                logger.error("Row %s cannot be sent: %r", outgoing.key, error)
                published.broken.append(outgoing)
        return items

    def _open(self) -> None:
        connection = self._app.connection_for_write(connect_timeout=CONNECT_TIMEOUT)
        self._connection = connection
        connection.transport_options.update(_limits(connection))
        # Once around all addresses, without the pauses of kombu's default.
        connection.ensure_connection(max_retries=len(connection.alt or ()), interval_start=0, interval_step=0)
        self._way = way_of(connection, self._app.amqp.Producer)
        self._routes = Routes(self._app.amqp, connection)

    def _lose(self, error: Exception) -> None:
        cause = error.__cause__ or error
        self.broker.lost(why_unreachable(self._app.conf.broker_write_url, cause))
        self.close()

    def _report(self, attempt: Attempt) -> None:
        for item, reason in attempt.broken.items():
            logger.error("Row %s cannot be sent: %s", item.outgoing.key, reason)
        for item, reason in attempt.refused.items():
            logger.error("The broker refuses row %s: %s", item.outgoing.key, reason)
        for item, reason in attempt.returned.items():
            logger.warning("Row %s reaches no queue: %s", item.outgoing.key, reason)
            if self._routes is not None:
                self._routes.forget(item.exchange, item.routing_key)


def _limits(connection: Connection) -> dict[str, Any]:
    """Options by which a broker that hangs cannot hold us up for long.

    What a driver would send a second time by itself is not sent so: it is sent again from its row.
    """
    transport = connection.transport
    driver = transport.driver_type
    if driver == "amqp":
        # We ask for the confirms, and wait for those of a batch together.
        corked = {CORK: Cork()} if transport.driver_name == "py-amqp" else {}
        return {"confirm_publish": False, **corked}
    if driver != "redis":
        return {}
    limits: dict[str, Any] = {"retry_on_timeout": False, "retry_on_error": None, "retry": None}
    for name in ("socket_timeout", "socket_connect_timeout"):
        given = (connection.transport_options or {}).get(name)
        limits[name] = min(given or CONNECT_TIMEOUT, CONNECT_TIMEOUT)
    return limits


def _is_nobodys(item: Item, attempt: Attempt) -> bool:
    # A plain message to an exchange that no queue is bound to: it did get where it was sent.
    return item in attempt.returned and item.outgoing.status == Status.OUTBOX and bool(item.exchange)


def _never() -> bool:
    return False
