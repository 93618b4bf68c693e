"""What a request does about a terminate, by what is known of its claim."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable.claiming import Verdict
from celery_durable.records import LeaseKey
from celery_durable.worker.book import Book
from celery_durable.worker.request import DurableRequest

KEY = LeaseKey("id", "w@here:1", 1)


class Terminated(DurableRequest):
    """A request without a message, whose run is only said to be stopped."""

    id = "id"

    def __init__(self, heard: LeaseKey | None = None) -> None:
        self._stopped: list[int] = []
        upkeep = SimpleNamespace(soon=lambda job: None)
        worker = SimpleNamespace(drain=lambda: heard and self.on_claimed(heard), upkeep=upkeep)
        worker.acknowledge = lambda request: None
        self._durable: Any = SimpleNamespace(worker=worker, store=SimpleNamespace(verdicts=None))

    def _stop_run(self, pool: Any, number: int) -> None:
        self._stopped.append(number)


def test_what_runs_is_stopped_at_once():
    request = Terminated()
    request.on_claimed(KEY)
    request.terminate(None, "KILL")
    assert request._stopped == [signal.SIGKILL]


@pytest.mark.parametrize("signal_name", [None, "TERM"])
def test_a_claim_that_has_not_been_heard_is_waited_for(signal_name):
    """It may be that of the verdict, which has no body to stop, but would be told late."""
    request = Terminated()
    request.terminate(None, signal_name)
    assert request._stopped == []
    request.on_claimed(KEY)
    assert request._stopped == [signal.SIGTERM]


def test_a_claim_that_was_reported_and_not_read_yet_is_read_first():
    request = Terminated(heard=KEY)
    request.terminate(None)
    assert request._stopped == [signal.SIGTERM]


class Adopted(DurableRequest):
    """A request that waits behind others."""

    id = "id"
    acknowledged = False

    def __init__(self, book: Book) -> None:
        self.number = book.register(self)
        self.delivery = None
        claims = SimpleNamespace(keep=lambda delivery, delay: None)
        worker = SimpleNamespace(acknowledge=lambda request: setattr(request, "acknowledged", True))
        self._durable: Any = SimpleNamespace(
            worker=worker, store=SimpleNamespace(claims=claims), settings=SimpleNamespace(resend_delay=120.0)
        )


def test_what_is_adopted_waits_as_a_row_until_its_claim_is_heard():
    book = Book()
    request = Adopted(book)
    assert (request.is_waiting, request.waits_as_row) == (True, False)
    request.adopt()
    assert (request.is_waiting, request.waits_as_row) == (False, True)
    book.report(request.number, Verdict.CLAIMED, KEY.owner, KEY.token)
    assert (request.holds_lease, request.waits_as_row) == (True, False)
