"""What a claim that the database does not answer says in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable.claiming import Claiming
from celery_durable.errors import StoreUnavailable
from celery_durable.records import Refusal
from tests.store.messages import delivery


class Outage:
    """A database that answers the claim after so many others."""

    def __init__(self) -> None:
        self.failures = 0
        self.seconds = 1000.0
        self.is_stopping = False
        self.health = SimpleNamespace(watch=self.answer, outage=None)

    def answer(self, _statement: Any) -> Refusal:
        if self.failures > 0:
            self.failures -= 1
            raise StoreUnavailable("connection refused")
        return Refusal("a duplicate")

    def monotonic(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "celery_durable")
    outage: Any = Outage()
    claiming = Claiming(lambda: outage, outage, outage)
    limits: Any = None
    for failures, lines in ((10, 2), (0, 0), (1, 2)):
        caplog.clear()
        outage.failures = failures
        assert claiming.claim(delivery("a"), limits) == Refusal("a duplicate")
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"][:lines]
        if lines:
            held, back = caplog.messages
            assert "a] is held: The durable database is not available: connection refused" in held
            assert back.startswith("The durable database is back after ")


def test_a_second_delivery_in_the_same_outage_is_told_in_short(caplog: pytest.LogCaptureFixture) -> None:
    outage: Any = Outage()
    claiming = Claiming(lambda: outage, outage, outage)
    limits: Any = None
    outage.failures = 1000
    claiming.claim(delivery("a", is_wake=True), limits)
    claiming.claim(delivery("b", is_wake=True), limits)
    assert len(caplog.records) == 2
    assert caplog.messages[1].endswith("b] is held: the durable database is still away")
