"""The ways to hand a batch to a broker: what is in flight together, and what counts as accepted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from amqp.exceptions import FrameSyntaxError
from kombu import Connection

from celery_durable.clock import Clock
from celery_durable.cork import Cork
from celery_durable.records import Outgoing

#: Raised while a message is put into bytes: it is the message's fault, the broker was not asked.
BROKEN_MESSAGE = (
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    struct.error,
    FrameSyntaxError,
)

#: The option of py-amqp under which a connection has its cork.
CORK = "frame_writer"
#: The most commands that kombu keeps back before it sends them.
_PIPELINE = 1000


@dataclass(eq=False, slots=True)
class Item:
    """One message of a batch, and how it is published."""

    outgoing: Outgoing
    arguments: dict[str, Any]

    @property
    def exchange(self) -> str:
        return self.outgoing.message.exchange

    @property
    def routing_key(self) -> str:
        return self.outgoing.message.routing_key


@dataclass(slots=True)
class Attempt:
    """One try at a batch, and what is known of it; what is in none of the answers may have been sent."""

    items: Sequence[Item]
    clock: Clock
    seconds: float
    is_stopping: Callable[[], bool]
    sent: set[Item] = field(default_factory=set)
    #: It cannot be put into bytes.
    broken: dict[Item, str] = field(default_factory=dict)
    #: The broker does not want it.
    refused: dict[Item, str] = field(default_factory=dict)
    #: The broker took it, and had no queue to put it into.
    returned: dict[Item, str] = field(default_factory=dict)
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = self.clock.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return max(self._until - self.clock.monotonic(), 0.0)

    @property
    def may_begin(self) -> bool:
        """Whether another message may be begun."""
        return self.remaining > 0 and not self.is_stopping()


class Way(Protocol):
    """How batches go to one broker."""

    def send(self, attempt: Attempt) -> None:
        """Send the items in order, noting in the attempt what became of each.

        Raises whatever the transport does when the broker cannot be reached.
        """


def way_of(connection: Connection, producer_class: Any) -> Way:
    """The fastest way that a transport has. Opens a channel."""
    if connection.transport.driver_name == "py-amqp":
        return Confirmed(connection, producer_class, (connection.transport_options or {})[CORK])
    producer = producer_class(connection, auto_declare=False)
    # kombu learns from the channel whether its settings allow it; before 5.7 it has no batches.
    producer.channel  # noqa: B018
    if getattr(producer, "supports_batch_publish", False):
        return Pipelined(producer)
    return OneByOne(producer)


class OneByOne:
    """A transport whose publish returns when the broker has the message."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def send(self, attempt: Attempt) -> None:
        for item in attempt.items:
            if not attempt.may_begin:
                return
            try:
                self._producer.publish(**item.arguments, retry=False, timeout=attempt.remaining)
            except BROKEN_MESSAGE as error:
                attempt.broken[item] = repr(error)
            else:
                attempt.sent.add(item)


class Pipelined:
    """A transport that keeps messages back and sends them together (Redis, from kombu 5.7 on)."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def send(self, attempt: Attempt) -> None:
        kept = []
        with self._producer.batch(max_size=_PIPELINE):
            for item in attempt.items:
                if not attempt.may_begin:
                    break
                try:
                    self._producer.publish(**item.arguments, retry=False)
                except BROKEN_MESSAGE as error:
                    attempt.broken[item] = repr(error)
                else:
                    kept.append(item)
        # The end of the block has sent them and read every answer.
        attempt.sent.update(kept)


class Confirmed:
    """RabbitMQ: all messages at once, then all of its confirms."""

    def __init__(self, connection: Connection, producer_class: Any, cork: Cork) -> None:
        self._connection = connection
        self._producer_class = producer_class
        self._cork = cork
        self._producer: Any = None
        self._attempt: Attempt | None = None
        self._tag = 0
        self._waiting: dict[int, Item] = {}
        self._open()

    def send(self, attempt: Attempt) -> None:
        self._attempt = attempt
        try:
            self._send(attempt, attempt.items)
        except self._connection.channel_errors:
            # Somebody's message has closed the channel, and took those in flight with it.
            self._send_singly(attempt)

    def _send_singly(self, attempt: Attempt) -> None:
        self._open()
        for item in attempt.items:
            if item in attempt.sent or item in attempt.broken or item in attempt.returned:
                continue
            if not attempt.may_begin:
                return
            try:
                self._send(attempt, [item])
            except self._connection.channel_errors as error:
                attempt.refused[item] = str(error)
                self._open()

    def _send(self, attempt: Attempt, items: Sequence[Item]) -> None:
        with self._cork.holding():
            for item in items:
                if not attempt.may_begin:
                    break
                try:
                    self._producer.publish(**item.arguments, mandatory=True, retry=False)
                except BROKEN_MESSAGE as error:
                    attempt.broken[item] = repr(error)
                else:
                    self._tag += 1
                    self._waiting[self._tag] = item
                if self._cork.is_full:
                    self._cork.flush(attempt.remaining)
                    self._listen()
            self._cork.flush(attempt.remaining)
        while self._waiting:
            if not attempt.remaining:
                raise TimeoutError(f"{len(self._waiting)} messages were not confirmed in time")
            self._connection.drain_events(timeout=attempt.remaining)

    def _listen(self) -> None:
        """Take what the broker has said already: it may not read on before we do."""
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=0)

    def _open(self) -> None:
        """A new channel, whose confirms count from one."""
        channel = self._cork.open_channel(self._connection)
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)
        self._producer = self._producer_class(channel, auto_declare=False)
        self._tag = 0
        self._waiting = {}

    def _on_ack(self, tag: int, multiple: bool) -> None:
        assert self._attempt is not None
        for item in self._answered(tag, multiple):
            if item not in self._attempt.returned:
                self._attempt.sent.add(item)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        self._answered(tag, multiple)

    def _answered(self, tag: int, multiple: bool) -> list[Item]:
        tags = [waiting for waiting in self._waiting if waiting <= tag] if multiple else [tag]
        return [self._waiting.pop(number) for number in tags if number in self._waiting]

    def _on_return(self, error: Any, _exchange: str, _routing_key: str, message: Any) -> None:
        # A return names no tag, but comes before the confirm. Messages of one task take one route.
        assert self._attempt is not None
        returned = message.properties.get("correlation_id")
        for item in self._waiting.values():
            if item.arguments.get("correlation_id") == returned:
                self._attempt.returned[item] = str(error)
