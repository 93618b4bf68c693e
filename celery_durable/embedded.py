"""The embedded default: a broker and a result store in local files, with no server.

For one machine (Linux or macOS) and a local disk. The broker is kombu's ``filesystem`` transport,
with its storage replaced by one that neither shows half a message nor loses what a killed worker
had not acknowledged. Priorities and the expiry of messages are not supported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

# First of all: it says what is missing where this cannot work.
from celery_durable.spool import Spool  # isort: skip

from kombu.transport import filesystem, virtual
from kombu.utils.json import dumps, loads

from celery_durable.local import BROKER_FOLDER

POLL_INTERVAL = 0.1  # seconds
DELIVERIES_PER_TURN = 100  # the pool's results and the timers get their share
_TRANSIENT = 1  # AMQP's delivery mode of what need not survive a power cut

Payload = dict[str, Any]
logger = logging.getLogger(__name__)


class QoS(virtual.QoS):
    """Removes a message from the disk when it is acknowledged, and not before."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        self.channel.spool.settle(delivery_tag)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not requeue:
            self.channel.spool.settle(delivery_tag)
        super().reject(delivery_tag, requeue=requeue)


class Channel(filesystem.Channel):
    """kombu's channel on a :class:`Spool`; a delivery tag is the spool's tag."""

    QoS = QoS

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._folder = connection.folder
        self._transient: set[str] = set()
        self.spool.sweep()

    @property
    def spool(self) -> Spool:
        """The spool of the process that runs this, which may be a child of the one that
        opened the channel."""
        return Spool.of_this_process(self._folder)

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[..., Any] | None,
        consumer_tag: str | None,
        **kwargs: Any,
    ) -> str:
        if queue in self._transient:
            self.spool.tie(queue)
        if no_ack and callback is not None:
            callback = self._settled_before(callback)
        return super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message: Any = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and no_ack:
            self.spool.settle(message.delivery_tag)
        return message

    def get_table(  # type: ignore[override]
        self, exchange: str
    ) -> list[filesystem.exchange_queue_t]:
        return [filesystem.exchange_queue_t(*row) for row in self.spool.bindings(exchange)]

    def _settled_before(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def settle_and_call(message: Any) -> Any:
            self.spool.settle(message.delivery_tag)
            return callback(message)

        return settle_and_call

    def _new_queue(
        self, queue: str, *, auto_delete: bool = False, exclusive: bool = False, **kwargs: Any
    ) -> None:
        if auto_delete or exclusive:
            self._transient.add(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        self.spool.bind(exchange, [routing_key or "", pattern or "", queue])

    def _put(  # type: ignore[override]
        self, queue: str, payload: Payload, **kwargs: Any
    ) -> None:
        durable = payload["properties"].get("delivery_mode") != _TRANSIENT
        self.spool.put(queue, dumps(payload).encode(), durable=durable)

    def _get(self, queue: str, timeout: float | None = None) -> Payload:
        self.spool.sweep()
        while (taken := self.spool.take(queue)) is not None:
            tag, data = taken
            try:
                payload: Payload = loads(data)
            except ValueError:
                logger.error("Unreadable message moved to %s", self.spool.set_aside(tag))
                continue
            payload["properties"]["delivery_tag"] = tag
            return payload
        raise Empty

    def _restore(self, message: Any) -> None:
        self.spool.give_back(message.delivery_tag)

    def _size(self, queue: str) -> int:
        return self.spool.size(queue)

    def _purge(self, queue: str) -> int:
        return self.spool.purge(queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self.spool.delete(queue)


class Transport(filesystem.Transport):
    """Named by ``broker_transport``, with a ``filesystem://`` URL."""

    Channel = Channel
    polling_interval = POLL_INTERVAL
    can_parse_url = True
    # With an event loop the worker answers remote control while all of its pool is busy; without
    # one it waits for a free pool process whenever it has received one task too many.
    implements = filesystem.Transport.implements.extend(asynchronous=True)
    # A full disk is worth another try, as a broker that is away would be.
    connection_errors = (*filesystem.Transport.connection_errors, OSError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.folder = str(client.transport_options.get("folder", BROKER_FOLDER))
        # kombu shares what is declared between all connections of a process: queues of one
        # folder would then never be bound in another, nor in the same one once removed.
        self.state = virtual.BrokerState()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        loop.on_tick.add(self._deliver_waiting)
        # No file descriptor says that a message has come, so no turn may last longer than this.
        loop.call_repeatedly(self.polling_interval, _take_a_turn)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """What the worker's banner and the log show."""
        return f"filesystem://{self.folder}"

    def _deliver_waiting(self) -> None:
        cycle: Any = self.cycle
        with suppress(Empty):
            for _ in range(DELIVERIES_PER_TURN):
                cycle.get(self._deliver)


def _take_a_turn() -> None:
    """For the event loop's timer: that it turned is all that is needed."""
