"""What becomes of a delivery that was not claimed, or whose process is gone."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable.records import LeaseKey
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


class Claimed(DurableRequest):
    """A request that a pool process has claimed; it dies, and the pool gives the job to another one."""

    id = "id"
    name = "proj.tasks.t"
    lease_key = LeaseKey("id", "worker@host:1:dead", 1)
    acknowledged = True

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.recovered: list[LeaseKey] = []
        upkeep = SimpleNamespace(soon=self.jobs.append)
        self._durable = SimpleNamespace(
            worker=SimpleNamespace(upkeep=upkeep, is_stopping=False, acknowledge=lambda request: None)
        )

    def _recover(self, key: LeaseKey, error: BaseException) -> None:
        self.recovered.append(key)


def test_a_second_process_that_is_refused_tells_that_the_first_one_is_gone() -> None:
    request = Claimed()

    request.on_declined()
    request.on_declined()

    for job in request.jobs:
        job()
    assert request.recovered == [Claimed.lease_key]
    assert not request.holds_lease


def test_a_refusal_of_what_was_not_claimed_here_is_nothing_more() -> None:
    request = Claimed()
    request.lease_key = None

    request.on_declined()

    assert request.jobs == []
