"""The one try of a worker to send the followers that it has written."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from celery_durable import sender
from celery_durable.publisher import Published
from celery_durable.sender import Sender


class FakePublisher:
    """Publishes after `wait`, or raises."""

    made = 0

    def __init__(self, app):
        type(self).made += 1
        self.app = app

    def publish(self, outgoing):
        self.app.wait()
        return Published(sent=list(outgoing))


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(sender, "Publisher", FakePublisher)

    def make(wait):
        noted = []
        due = SimpleNamespace(confirm=lambda sent, delay: noted.extend(sent))
        return Sender(SimpleNamespace(wait=wait), SimpleNamespace(due=due), lambda: 120.0), noted

    return make


def test_what_the_broker_has_is_noted(make):
    sends, noted = make(lambda: None)

    sends.send(["one", "two"])

    assert noted == ["one", "two"]


def test_an_error_is_the_scheduler_s_business_and_not_the_task_s(make, caplog):
    def fails():
        raise RuntimeError("odd transport")

    sends, noted = make(fails)
    sends.send(["one"])
    sends.send(["two"])

    assert noted == []
    assert caplog.text.count("Followers are left to the scheduler") == 2


def test_threads_that_come_first_together_share_one_connection(make):
    together = threading.Barrier(8)
    sends, noted = make(lambda: None)
    threads = [
        threading.Thread(target=lambda name=name: (together.wait(), sends.send([name]))) for name in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(noted) == list(range(8))
