"""The cork keeps the frames of a batch back, and lets them out in one write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import Channel, Message, spec

from celery_durable.cork import MOST_HELD, Cork


class Transport:
    """Notes what is written, and how long each write may take."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.timeouts: list[float] = []

    @contextmanager
    def having_timeout(self, timeout: float) -> Iterator[None]:
        self.timeouts.append(timeout)
        yield

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def cork(transport: Transport) -> Cork:
    cork = Cork()
    cork(SimpleNamespace(frame_max=131072), transport)
    return cork


def test_outside_a_batch_everything_goes_out_at_once(cork: Cork, transport: Transport) -> None:
    cork.write(b"declare")
    assert transport.written == [b"declare"]


def test_a_batch_is_one_write(cork: Cork, transport: Transport) -> None:
    with cork.holding():
        cork.write(memoryview(b"first, "))
        cork.write(memoryview(b"second"))
        assert transport.written == []
        cork.flush(3.0)
    assert transport.written == [b"first, second"]
    assert transport.timeouts == [3.0]


def test_the_buffer_that_a_frame_lies_in_may_be_used_again(cork: Cork, transport: Transport) -> None:
    buffer = bytearray(b"first")
    with cork.holding():
        cork.write(memoryview(buffer))
        buffer[:] = b"other"
        cork.flush(1.0)
    assert transport.written == [b"first"]


def test_it_says_when_it_is_full(cork: Cork) -> None:
    with cork.holding():
        cork.write(b"x" * (MOST_HELD - 1))
        assert not cork.is_full
        cork.write(b"x")
        assert cork.is_full
        cork.flush(1.0)
        assert not cork.is_full


def test_with_no_time_left_a_write_still_does_not_give_up_at_once(cork: Cork, transport: Transport) -> None:
    with cork.holding():
        cork.write(b"frame")
        cork.flush(0.0)
    assert transport.timeouts[0] > 0


def test_what_an_error_left_behind_is_dropped(cork: Cork, transport: Transport) -> None:
    def fail() -> None:
        with cork.holding():
            cork.write(b"lost")
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        fail()
    with cork.holding():
        cork.flush(1.0)
    assert transport.written == []
    cork.write(b"next")
    assert transport.written == [b"next"]


def test_nothing_kept_back_is_no_write(cork: Cork, transport: Transport) -> None:
    with cork.holding():
        cork.flush(1.0)
    assert transport.written == []


def test_a_message_is_the_same_frame_as_py_amqps_own(transport: Transport) -> None:
    cork = Cork()
    connection = Broker(cork(SimpleNamespace(frame_max=131072, bytes_sent=0), transport), transport)
    frames = []
    for channel in (Channel(connection, 1), cork.open_channel(SimpleNamespace(connection=connection))):
        transport.written.clear()
        message = Message(b"[]", application_headers={"id": "7"}, correlation_id="7", delivery_mode=2)
        channel.basic_publish(message, exchange="", routing_key="celery", mandatory=True, timeout=5)
        frames.append(b"".join(transport.written))
    assert frames[0] == frames[1]
    assert b"celery" in frames[0]
    assert connection.listened == 1, "py-amqp's own channel listens at each message"


class Broker:
    """What a channel of py-amqp needs of its connection, here one that opens at once."""

    confirm_publish = False
    client_properties: Any = {"capabilities": {"connection.blocked": True}}  # noqa: RUF012

    def __init__(self, frame_writer: Any, transport: Transport) -> None:
        self.frame_writer = frame_writer
        self.transport = transport
        self.channels: dict[int, Any] = {}
        self.listened = 0

    def _claim_channel_id(self, _number: int) -> None:
        pass

    def _get_free_channel_id(self) -> int:
        return 1

    def drain_events(self, timeout: float | None = None) -> None:
        if timeout == 0:
            self.listened += 1
            raise TimeoutError
        # The answer to what the channel has just asked for.
        self.channels[1].dispatch_method(spec.Channel.OpenOk, b"\0\0\0\0", None)
