"""The book of deliveries: what is reported reaches the right request, and nothing else."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from celery_durable.claiming import Verdict
from celery_durable.records import LeaseKey
from celery_durable.worker.book import Book


class Request:
    """What a request hears."""

    name = "proj.task"

    def __init__(self, task_id: str = "id") -> None:
        self.id = task_id
        self.heard: list[Any] = []
        self.lease_key: LeaseKey | None = None
        self.is_over = False

    @property
    def holds_lease(self) -> bool:
        return self.lease_key is not None and not self.is_over

    def on_claimed(self, key: LeaseKey | None) -> None:
        self.lease_key = key
        self.heard.append("claimed")

    def on_declined(self) -> None:
        self.heard.append("declined")

    def on_put_back(self) -> None:
        self.heard.append("put back")

    def on_lost(self) -> None:
        self.heard.append("lost")

    def on_verdict(self, key: LeaseKey | None, *, is_expiry: bool) -> None:
        self.heard.append(("expired" if is_expiry else "cancelled", key))


@pytest.fixture
def book() -> Book:
    return Book()


def test_two_copies_of_one_message_are_two_deliveries(book: Book) -> None:
    first, second = Request("id"), Request("id")
    numbers = [book.register(first), book.register(second)]  # type: ignore[arg-type]
    book.report(numbers[1], Verdict.CLAIMED, "owner", 3)
    book.report(numbers[0], Verdict.DECLINED, "", 0)
    assert (first.heard, first.lease_key) == (["declined"], None)
    assert (second.heard, second.lease_key) == (["claimed"], LeaseKey("id", "owner", 3))


@pytest.mark.parametrize(
    ("verdict", "token", "heard"),
    [
        (Verdict.PUT_BACK, 0, "put back"),
        (Verdict.LOST, 0, "lost"),
        (Verdict.CANCELLED, 2, ("cancelled", LeaseKey("id", "owner", 2))),
        (Verdict.EXPIRED, 2, ("expired", LeaseKey("id", "owner", 2))),
    ],
)
def test_each_verdict_is_heard_as_what_it_is(book: Book, verdict: int, token: int, heard: object) -> None:
    request = Request()
    book.report(book.register(request), verdict, "owner", token)  # type: ignore[arg-type]
    assert request.heard == [heard]


def test_what_is_told_of_a_delivery_that_is_over_is_no_error(book: Book) -> None:
    number = book.register(Request())  # type: ignore[arg-type]
    gc.collect()
    book.report(number, Verdict.CLAIMED, "owner", 1)
    book.report(99, Verdict.DECLINED, "", 0)
    assert book.open_requests() == []


def test_a_request_that_fails_to_deal_with_it_does_not_keep_others_from_being_heard(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request()

    def fail() -> None:
        raise ConnectionError("the broker is away")

    request.on_declined = fail  # type: ignore[method-assign]
    book.report(book.register(request), Verdict.DECLINED, "", 0)  # type: ignore[arg-type]
    assert "proj.task[id] could not be dealt with" in caplog.text


def test_the_leases_of_a_worker_are_those_of_runs_that_are_on(book: Book) -> None:
    waiting, running, ended = Request("a"), Request("b"), Request("c")
    for request in (waiting, running, ended):
        book.register(request)  # type: ignore[arg-type]
    running.lease_key, ended.lease_key = LeaseKey("b", "owner", 1), LeaseKey("c", "owner", 1)
    ended.is_over = True
    assert book.leases() == [LeaseKey("b", "owner", 1)]
