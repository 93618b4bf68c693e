"""What the durable side of a worker has its event loop do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous import Hub

from celery_durable.worker import side
from celery_durable.worker.side import WorkerSide
from tests.unit.fakes import eventually


class PreforkPool:
    """What a worker has as its pool class."""


PreforkPool.__module__ = "celery.concurrency.prefork"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the pool was asked for its dead."""
    monkeypatch.setattr(side, "CHILD_ROUND", 0.01)
    return []


@pytest.fixture
def consumer(looks: list[float]) -> Iterator[Any]:
    hub = Hub()
    yield SimpleNamespace(hub=hub, pool=SimpleNamespace(maintain_pool=lambda: looks.append(time.monotonic())))
    hub.close()


@pytest.fixture
def worker_side() -> Iterator[WorkerSide]:
    worker = SimpleNamespace(hostname="w@here", task_events=False, pool_cls=PreforkPool)
    worker_side = WorkerSide(SimpleNamespace(), worker)
    yield worker_side
    assert worker_side.pipe is not None
    worker_side.pipe.close()


def live_timers(hub: Any) -> int:
    return sum(not scheduled.entry.canceled for scheduled in hub.timer.queue)


def has_looked_again(hub: Any, looks: list[float]) -> bool:
    before = len(looks)
    hub.fire_timers()
    return len(looks) > before


class Waiting:
    """A delivery in the main process."""

    def __init__(self, task_id: str, *, waits_as_row: bool) -> None:
        self.id = task_id
        self.waits_as_row = waits_as_row


class TestWhatWaits:
    @pytest.mark.parametrize(("count", "prefetch"), [(8, 8), (0, sys.maxsize)])
    def test_the_prefetch_is_that_of_the_consumer(
        self, worker_side: WorkerSide, consumer: Any, count: int, prefetch: int
    ) -> None:
        consumer.initial_prefetch_count = count
        worker_side.read_claims(consumer)
        assert worker_side.prefetch == prefetch

    def test_what_was_adopted_is_due_again_when_celery_forgets_it(self, worker_side: WorkerSide) -> None:
        made_due: list[tuple[str, float]] = []
        leases = SimpleNamespace(make_due=lambda *arguments: made_due.append(arguments))
        worker_side.durable.store = SimpleNamespace(leases=leases)
        waiting = [Waiting(name, waits_as_row=name != "held") for name in ("one", "held", "two")]
        for request in waiting:
            worker_side.book.register(request)  # type: ignore[arg-type]
        worker_side.make_due(worker_side.adopted(), 2.0)
        worker_side.upkeep.start()
        eventually(lambda: made_due == [("one", 2.0), ("two", 2.0)])
        worker_side.upkeep.close()


class TestReconnecting:
    def test_dead_children_are_looked_for_by_one_timer_however_often_the_broker_was_away(
        self, worker_side: WorkerSide, consumer: Any, looks: list[float]
    ) -> None:
        for _ in range(3):
            worker_side.read_claims(consumer)
            assert live_timers(consumer.hub) == 1
            for _ in range(3):
                eventually(lambda: has_looked_again(consumer.hub, looks))
            # As Celery does when a connection is lost.
            consumer.hub.reset()

    @pytest.mark.parametrize("forget", ["clear", "cancel"])
    def test_it_is_set_again_where_celery_has_forgotten_it(
        self, worker_side: WorkerSide, consumer: Any, looks: list[float], forget: str
    ) -> None:
        """Celery 5.7 cancels what was set since it began to connect, earlier ones nothing or everything."""
        worker_side.read_claims(consumer)
        if forget == "clear":
            consumer.hub.timer.clear()
        for scheduled in consumer.hub.timer.queue:
            consumer.hub.timer.cancel(scheduled.entry)
        worker_side.read_claims(consumer)
        assert live_timers(consumer.hub) == 1
        eventually(lambda: has_looked_again(consumer.hub, looks))

    def test_the_pipe_is_read_again(self, worker_side: WorkerSide, consumer: Any) -> None:
        assert worker_side.pipe is not None
        worker_side.read_claims(consumer)
        consumer.hub.reset()
        assert worker_side.pipe.reader not in consumer.hub.readers
        worker_side.read_claims(consumer)
        assert worker_side.pipe.reader in consumer.hub.readers


class TestAcknowledging:
    def test_threads_that_come_together_acknowledge_once(self, worker_side: WorkerSide) -> None:
        acknowledged: list[str] = []

        def acknowledge(*_: Any) -> None:
            threading.Event().wait(0.01)  # the others are there by then
            acknowledged.append("once")

        request: Any = SimpleNamespace(acknowledged=False, _on_ack=acknowledge, _connection_errors=())
        threads = [threading.Thread(target=worker_side.acknowledge, args=(request,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert acknowledged == ["once"]
