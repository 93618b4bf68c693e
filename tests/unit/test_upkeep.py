"""What the worker's main process does in its thread: in order, until the database takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable.errors import StoreUnavailable
from celery_durable.records import LeaseKey
from celery_durable.worker import upkeep
from celery_durable.worker.book import Book
from celery_durable.worker.upkeep import Upkeep
from tests.unit.fakes import eventually

New = Callable[["Side"], Upkeep]


class Leases:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def hand_back_many(self, keys: list[LeaseKey]) -> int:
        self.written.append(("handed back", list(keys)))
        return len(keys)

    def mark_draining(self, keys: list[LeaseKey]) -> int:
        self.written.append(("draining", list(keys)))
        return len(keys)


class Schedule:
    seconds: float | None = None

    def seconds_since_tick(self) -> float | None:
        return self.seconds


class Request:
    """A delivery in the main process."""

    def __init__(self, arrived_at: float, *, is_waiting: bool = True, key: LeaseKey | None = None) -> None:
        self.arrived_at = arrived_at
        self.is_waiting = is_waiting
        self.lease_key = key
        self.holds_lease = key is not None
        self.adopted = 0
        self.waits_as_row = False

    def adopt(self) -> None:
        self.adopted += 1
        self.is_waiting = False
        self.waits_as_row = True


class Side:
    """As much of a worker's durable side as upkeep sees."""

    def __init__(self) -> None:
        self.book = Book()
        self.prefetch = 4
        self.drained = 0
        self.leases = Leases()
        self.schedule = Schedule()
        self.durable = SimpleNamespace(store=SimpleNamespace(leases=self.leases, schedule=self.schedule))

    def drain(self) -> None:
        self.drained += 1

    def add(self, request: Request) -> Request:
        self.book.register(request)  # type: ignore[arg-type]
        return request


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(upkeep, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "ROUND", 0.005)
    monkeypatch.setattr(upkeep, "STOPPING_ROUND", 0.005)


@pytest.fixture
def new() -> Iterator[New]:
    """Makes one that ends with the test."""
    made: list[Upkeep] = []

    def new(side: Side) -> Upkeep:
        made.append(Upkeep(side))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for keeper in made:
        keeper.close()


class TestJobs:
    def test_they_are_done_in_order_in_another_thread(self, side: Side, new: New) -> None:
        done: list[Any] = []
        keeper = new(side)
        for number in range(5):
            keeper.soon(lambda number=number: done.append((number, threading.current_thread().name)))
        keeper.start()
        eventually(lambda: len(done) == 5)
        assert done == [(number, "durable-upkeep") for number in range(5)]

    def test_one_that_finds_no_database_is_tried_again_before_those_behind_it(
        self, side: Side, new: New
    ) -> None:
        done: list[str] = []
        failures = [StoreUnavailable("away")] * 3

        def write() -> None:
            if failures:
                raise failures.pop()
            done.append("first")

        keeper = new(side)
        keeper.soon(write)
        keeper.soon(lambda: done.append("second"))
        keeper.start()
        eventually(lambda: len(done) == 2)
        assert done == ["first", "second"]

    def test_one_that_fails_otherwise_is_given_up(
        self, side: Side, new: New, caplog: pytest.LogCaptureFixture
    ) -> None:
        done: list[str] = []

        def fail() -> None:
            raise ValueError("no such thing")

        keeper = new(side)
        keeper.soon(fail)
        keeper.soon(lambda: done.append("after it"))
        keeper.start()
        eventually(lambda: done)
        assert "no such thing" in caplog.text

    def test_who_waits_for_one_waits_no_longer_than_it_takes_or_it_may(self, side: Side, new: New) -> None:
        done: list[str] = []
        keeper = new(side)
        keeper.start()
        keeper.wait_for(lambda: done.append("one"), timeout=5)
        assert done == ["one"]
        blocked = threading.Event()
        keeper.soon(lambda: blocked.wait(5))
        keeper.wait_for(lambda: done.append("two"), timeout=0.01)
        assert done == ["one"]
        blocked.set()
        eventually(lambda: done == ["one", "two"])

    @pytest.mark.timeout(10)
    def test_what_comes_during_the_last_round_is_done_before_the_worker_ends(
        self, side: Side, new: New
    ) -> None:
        is_in_round, goes_on, done = threading.Event(), threading.Event(), []

        def drain() -> None:
            is_in_round.set()
            goes_on.wait(5)

        side.drain = drain  # type: ignore[method-assign]
        keeper = new(side)
        keeper.start()
        assert is_in_round.wait(5)
        keeper.soon(lambda: done.append("the last one"))
        threading.Timer(0.01, goes_on.set).start()
        keeper.close()
        assert done == ["the last one"]


class TestStopping:
    def test_leases_are_marked_once_also_those_that_come_later(self, side: Side, new: New) -> None:
        first, later = LeaseKey("a", "owner", 1), LeaseKey("b", "owner", 1)
        kept = [side.add(Request(0, key=first))]
        keeper = new(side)
        keeper.start()
        keeper.announce_stop()
        eventually(lambda: side.leases.written == [("draining", [first])])
        kept.append(side.add(Request(0, key=later)))
        eventually(lambda: side.leases.written == [("draining", [first]), ("draining", [later])])

    def test_all_leases_are_handed_back_in_one_statement(self, side: Side, new: New) -> None:
        keys = [LeaseKey(task_id, "owner", 1) for task_id in "ab"]
        kept = [side.add(Request(0, key=key)) for key in keys]
        keeper = new(side)
        keeper.start()
        keeper.hand_back(wait=True)
        assert side.leases.written == [("handed back", keys)]
        assert kept

    def test_where_there_is_no_lease_nothing_is_written(self, side: Side, new: New) -> None:
        keeper = new(side)
        keeper.start()
        keeper.hand_back(wait=True)
        assert side.leases.written == []


class TestRounds:
    @pytest.mark.report("second-copy")
    def test_a_message_that_waits_too_long_is_adopted_once(
        self, side: Side, new: New, clock: SimpleNamespace
    ) -> None:
        waits = side.add(Request(clock.now))
        runs = side.add(Request(clock.now, is_waiting=False))
        keeper = new(side)
        keeper.start()
        eventually(lambda: side.drained > 2)
        assert waits.adopted == 0
        clock.now += upkeep.ADOPT_AFTER
        eventually(lambda: waits.adopted == 1)
        side.drained = 0
        eventually(lambda: side.drained > 2)
        assert (waits.adopted, runs.adopted) == (1, 0)

    def test_one_prefetch_of_messages_is_adopted_and_the_others_when_those_have_had_their_turn(
        self, side: Side, new: New, clock: SimpleNamespace
    ) -> None:
        waiting = [side.add(Request(clock.now)) for _ in range(6)]
        keeper = new(side)
        keeper.start()
        clock.now += upkeep.ADOPT_AFTER
        eventually(lambda: [request.adopted for request in waiting] == [1, 1, 1, 1, 0, 0])
        side.drained = 0
        eventually(lambda: side.drained > 2)
        assert sum(request.adopted for request in waiting) == 4
        waiting[1].waits_as_row = False
        eventually(lambda: [request.adopted for request in waiting] == [1, 1, 1, 1, 1, 0])
        clock.now += upkeep.ADOPT_AT_LAST
        eventually(lambda: all(request.adopted for request in waiting))

    @pytest.mark.parametrize("seconds", [None, 61.0])
    def test_without_a_scheduler_for_a_minute_it_warns_once(
        self,
        side: Side,
        new: New,
        clock: SimpleNamespace,
        seconds: float | None,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        side.schedule.seconds = seconds
        keeper = new(side)
        keeper.start()
        eventually(lambda: side.drained > 2)
        assert "No scheduler" not in caplog.text
        for _ in range(3):
            clock.now += upkeep.SCHEDULER_PATIENCE
            side.drained = 0
            eventually(lambda: side.drained > 2)
        assert caplog.text.count("No scheduler has been seen for a minute") == 1
        side.schedule.seconds = 1.0
        clock.now += upkeep.SCHEDULER_PATIENCE
        side.drained = 0
        eventually(lambda: side.drained > 2)
        side.schedule.seconds = seconds
        clock.now += upkeep.SCHEDULER_PATIENCE
        eventually(lambda: caplog.text.count("No scheduler has been seen for a minute") == 2)

    def test_with_a_scheduler_it_says_nothing(
        self, side: Side, new: New, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
    ) -> None:
        side.schedule.seconds = 59.0
        keeper = new(side)
        keeper.start()
        clock.now += upkeep.SCHEDULER_PATIENCE
        eventually(lambda: side.drained > 3)
        assert "No scheduler" not in caplog.text

    def test_a_round_that_fails_is_not_the_last(
        self, side: Side, new: New, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            side.drained += 1
            raise RuntimeError("odd")

        side.drain = fail  # type: ignore[method-assign]
        keeper = new(side)
        keeper.start()
        eventually(lambda: side.drained > 2)
        assert "odd" in caplog.text
