"""The claims pipe: what children write is what the main process reads, whole and in order."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator

import pytest

from celery_durable.claiming import Verdict
from celery_durable.records import LeaseKey
from celery_durable.runtime import owner_name
from celery_durable.worker.pipe import ClaimsPipe

INSTANCE = uuid.UUID(int=7)


class Book:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, str, int]] = []

    def report(self, number: int, verdict: int, owner: str, token: int) -> None:
        self.reports.append((number, verdict, owner, token))


@pytest.fixture
def pipe() -> Iterator[ClaimsPipe]:
    pipe = ClaimsPipe("celery@host")
    yield pipe
    pipe.close()


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_claim_arrives_with_the_very_owner_that_the_child_has_signed_with(
    pipe: ClaimsPipe, book: Book
) -> None:
    owner = owner_name("celery@host", 4711, INSTANCE)
    pipe.reporter(lambda: (4711, INSTANCE)).report(5, Verdict.CLAIMED, LeaseKey("id", owner, 1 << 40))
    pipe.drain(book)  # type: ignore[arg-type]
    assert book.reports == [(5, Verdict.CLAIMED, owner, 1 << 40)]


def test_without_a_lease_there_is_no_token(pipe: ClaimsPipe, book: Book) -> None:
    pipe.reporter(lambda: (1, INSTANCE)).report(5, Verdict.DECLINED, None)
    pipe.drain(book)  # type: ignore[arg-type]
    ((number, verdict, _, token),) = book.reports
    assert (number, verdict, token) == (5, Verdict.DECLINED, 0)


def test_an_empty_pipe_does_not_block(pipe: ClaimsPipe, book: Book) -> None:
    pipe.drain(book)  # type: ignore[arg-type]
    assert book.reports == []


def test_records_of_many_writers_never_mix(pipe: ClaimsPipe, book: Book) -> None:
    writers = [threading.Thread(target=write_many, args=(pipe, n * 1000, 300), daemon=True) for n in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        pipe.drain(book)  # type: ignore[arg-type]
    pipe.drain(book)  # type: ignore[arg-type]
    numbers = [report[0] for report in book.reports]
    assert sorted(numbers) == [writer * 1000 + n for writer in range(4) for n in range(300)]
    for writer in range(4):
        own = [number for number in numbers if number // 1000 == writer]
        assert own == sorted(own), "in order"


def write_many(pipe: ClaimsPipe, first: int, count: int) -> None:
    reporter = pipe.reporter(lambda: (os.getpid(), INSTANCE))
    for number in range(first, first + count):
        reporter.report(number, Verdict.CLAIMED, LeaseKey("id", "owner", number))


def test_a_child_process_can_write_and_hears_of_the_stop(pipe: ClaimsPipe, book: Book) -> None:
    heard_read, heard_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        reporter = pipe.reporter(lambda: (4711, INSTANCE))
        reporter.report(1, Verdict.CLAIMED, LeaseKey("id", "owner", 1))
        os.read(heard_read, 1)
        os._exit(0 if reporter.is_stopping else 1)
    pipe.announce_stop()
    os.write(heard_write, b"x")
    _, status = os.waitpid(pid, 0)
    pipe.drain(book)  # type: ignore[arg-type]
    assert os.waitstatus_to_exitcode(status) == 0
    assert [report[0] for report in book.reports] == [1]
    os.close(heard_read)
    os.close(heard_write)
