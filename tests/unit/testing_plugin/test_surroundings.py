"""What a user's test brings along: mocks, and the open transaction of a test of Django's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from celery_durable import DurableTask, NotDurable, sleep, step


def test_a_mock_can_be_a_step(durable_app, durable_clock):
    charge = MagicMock(return_value={"paid": 5})

    @durable_app.task(base=DurableTask, name="pay")
    def pay():
        paid = step(charge, 5)
        sleep(days=1)
        return paid

    assert durable_clock.finish(pay.delay()) == {"paid": 5}
    charge.assert_called_once_with(5)


class TestDjango:
    @pytest.fixture
    def connection(self, monkeypatch):
        """A connection of Django's, in the transaction of a test."""
        connection = SimpleNamespace(atomic_blocks=["the test"], in_atomic_block=True)
        connections = SimpleNamespace(all=lambda initialized_only: [connection])
        monkeypatch.setitem(sys.modules, "django.db", SimpleNamespace(connections=connections))
        return connection

    @pytest.fixture
    def transaction(self, connection):
        @contextmanager
        def atomic():
            connection.atomic_blocks.append("the task")
            yield
            connection.atomic_blocks.pop()

        return atomic

    def test_a_task_sleeps_within_the_transaction_of_its_test(self, durable_app, durable_clock, transaction):
        @durable_app.task(base=DurableTask, name="nap")
        def nap():
            with transaction():
                pass
            sleep(days=1)
            return "rested"

        assert durable_clock.finish(nap.delay()) == "rested"

    def test_but_not_within_one_of_its_own(self, durable_app, durable_clock, transaction):
        @durable_app.task(base=DurableTask, name="nap")
        def nap():
            with transaction():
                sleep(days=1)

        with pytest.raises(NotDurable, match="open database transaction"):
            durable_clock.finish(nap.delay())
