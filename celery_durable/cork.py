"""RabbitMQ: many messages in one write.

py-amqp makes a system call for each message, and before it another one to see whether the broker has said
something. That is half of what a message costs, and wakes the broker up a hundred times for one batch. Here
the frames of a batch are kept back and go out together; the broker's answers are read when we wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amqp import spec
from amqp.method_framing import frame_writer
from kombu import Connection
from kombu.transport import pyamqp

#: Bytes after which what is kept back is sent all the same.
MOST_HELD = 1 << 18


class Cork:
    """What a connection writes through: py-amqp's option ``frame_writer``, for one connection."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._is_holding = False
        self._held: list[bytes] = []
        self._size = 0

    def __call__(self, connection: Any, transport: Any) -> Any:
        """Called by py-amqp whenever it has connected."""
        self._transport = transport
        return frame_writer(connection, self)

    def write(self, data: Any) -> None:
        """Called by py-amqp with whole frames, which lie in a buffer that it uses again for the next."""
        if self._is_holding:
            self._held.append(bytes(data))
            self._size += len(data)
        else:
            self._transport.write(data)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep back what is written in this block. What was not flushed at its end is dropped."""
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
            self._held, self._size = [], 0

    @property
    def is_full(self) -> bool:
        """Whether so much is kept back that it should be flushed."""
        return self._size >= MOST_HELD

    def flush(self, timeout: float) -> None:
        """Send what was kept back. The broker may take so many seconds to read it."""
        data = b"".join(self._held)
        self._held, self._size = [], 0
        if data:
            # Zero would mean not to wait at all.
            with self._transport.having_timeout(max(timeout, 0.001)):
                self._transport.write(data)

    def open_channel(self, connection: Connection) -> Any:
        """A new channel of this connection, for publishing."""
        channel = _Channel(connection.connection)
        channel.open()
        return channel


class _Channel(pyamqp.Channel):
    """A channel that does not stop at each message to listen to the broker."""

    def basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        argsig: str = "Bssbb",
    ) -> None:
        """As py-amqp's, but for its timeouts, which are the cork's business."""
        arguments = (0, exchange, routing_key, mandatory, immediate)
        self.send_method(spec.Basic.Publish, argsig, arguments, msg)
