"""A delivery that was not claimed goes back to the broker."""

from __future__ import annotations

import logging

import pytest

from celery_durable.worker.request import DurableRequest


class Unclaimed(DurableRequest):
    """A request whose message lies unacknowledged in a channel that is closed."""

    id = "id"
    name = "proj.tasks.t"
    acknowledged = False

    def __init__(self) -> None:
        self.tried: list[bool] = []

    def reject(self, requeue: bool = False) -> None:
        self.tried.append(requeue)
        # What kombu's Redis transport says once its connection is closed.
        raise AttributeError("'NoneType' object has no attribute 'hostname'")


def test_a_message_whose_channel_is_closed_is_left_to_the_broker_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Unclaimed()

    with caplog.at_level(logging.WARNING):
        request.on_put_back()

    assert request.tried == [True]
    (record,) = caplog.records
    assert "proj.tasks.t[id] is left to the broker" in record.getMessage()
    assert record.exc_info is None
