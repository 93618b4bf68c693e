"""The broker of one test: kombu's transport in memory, with queues of its own and one order of arrival."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from queue import Queue
from typing import Any
from weakref import WeakValueDictionary

from kombu.transport import memory, virtual

TRANSPORT = "celery_durable.testing.broker:Transport"
#: The transport option that says which broker a connection is to.
OPTION = "durable_broker"

_brokers: WeakValueDictionary[int, Broker] = WeakValueDictionary()
_numbers = itertools.count(1)


class Broker:
    """The queues of one test. ``may_write()`` raises where the process that would write is dead."""

    def __init__(self, may_write: Callable[[], None]) -> None:
        self.number = next(_numbers)
        self.may_write = may_write
        self.state = virtual.BrokerState()
        self.queues: dict[str, Queue[Any]] = {}
        #: The queue of each message, in the order in which they came.
        self.arrivals: deque[str] = deque()
        _brokers[self.number] = self

    def settings(self) -> dict[str, Any]:
        """The Celery settings by which an app has this broker."""
        return {
            "broker_url": "memory://",
            "broker_read_url": None,
            "broker_write_url": None,
            "broker_transport": TRANSPORT,
            "broker_transport_options": {OPTION: self.number},
            "broker_use_ssl": False,
        }


class Channel(memory.Channel):
    """kombu's channel on the queues of one broker."""

    # What is sent to nobody is dropped, as a broker does.
    deadletter_queue: Any = None

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self._broker: Broker = connection.broker
        self.queues = self._broker.queues

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        self._broker.may_write()
        super()._put(queue, message, **options)
        self._broker.arrivals.append(queue)


class Transport(memory.Transport):
    """Named by ``broker_transport``."""

    Channel = Channel
    can_parse_url = True

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.broker = _brokers[client.transport_options[OPTION]]
        self.state = self.broker.state


class Mailbox:
    """Takes the messages of a broker, the first one first."""

    def __init__(self, broker: Broker, connection: Any) -> None:
        self._broker = broker
        self._channel = connection.default_channel

    def take(self) -> Any:
        """The next message (a kombu Message), to be acknowledged; None: there is none."""
        while self._broker.arrivals:
            message = self._channel.basic_get(self._broker.arrivals.popleft())
            if message is not None:
                return message
        return None
