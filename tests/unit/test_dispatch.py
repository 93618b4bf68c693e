"""Dispatch: what is taken is sent or given back, and a note that could not be made is owed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from celery_durable import metrics, signals
from celery_durable.dispatch import PASS_SECONDS, Dispatcher
from celery_durable.errors import StoreUnavailable
from celery_durable.publisher import REFUSALS, Published, Publisher
from celery_durable.records import Outgoing
from celery_durable.store import Store
from tests.store.messages import columns, delivery, due_in, edit, put_into_outbox, schedule
from tests.unit.fakes import StillClock
from tests.unit.schedulers import World


class FakePublisher:
    """Stands in for the broker: what becomes of each batch is played from ``answers``."""

    def __init__(self) -> None:
        self.is_there = True
        self.batches: list[list[str]] = []
        self.answers: list[Any] = []

    def connect(self) -> bool:
        return self.is_there

    def publish(self, batch: Sequence[Outgoing]) -> Published:
        self.batches.append([item.key for item in batch])
        answer = self.answers.pop(0) if self.answers else (lambda items: Published(sent=list(items)))
        published: Published = answer(batch)
        return published

    def close(self) -> None:
        self.is_there = False


@pytest.fixture
def world() -> Iterator[World]:
    world = World(durable_batch_size=2)
    yield world
    world.store.dispose()


@pytest.fixture
def store(world: World) -> Store:
    return world.store


@pytest.fixture
def publisher() -> FakePublisher:
    return FakePublisher()


@pytest.fixture
def dispatcher(world: World, publisher: FakePublisher) -> Dispatcher:
    return dispatcher_of(world, publisher)


def dispatcher_of(world: World, publisher: FakePublisher, **options: Any) -> Dispatcher:
    limits = options.pop("limits", world.durable.crash_limits)
    fake: Any = publisher
    return Dispatcher(world.app, world.durable.runtime, limits, publisher=fake, clock=world.clock, **options)


class TestOneBatch:
    def test_what_is_due_is_sent_and_noted(
        self, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        schedule(store, "a")
        assert dispatcher.run_once() == 1
        assert publisher.batches == [["a"]]
        assert 110 < due_in(store, "a") <= 120

    def test_nothing_due_is_nothing_sent(self, publisher: FakePublisher, dispatcher: Dispatcher) -> None:
        assert dispatcher.run_once() == 0
        assert publisher.batches == []

    def test_what_was_not_sent_comes_again_soon(
        self, world: World, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        schedule(store, "a")
        put_into_outbox(store, "b")
        publisher.answers = [lambda items: Published(unsent=list(items))]
        dispatcher.run_once()
        assert due_in(store, "a") <= 0.5
        world.travel(0.6)
        assert dispatcher.run_once() == 2
        assert len(publisher.batches[1]) == 2

    def test_what_cannot_be_sent_is_set_aside(
        self, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        schedule(store, "good", "broken")
        publisher.answers = [
            lambda items: Published(
                sent=[i for i in items if i.key == "good"], broken=[i for i in items if i.key == "broken"]
            )
        ]
        dispatcher.run_once()
        assert due_in(store, "broken") > 3500
        assert due_in(store, "good") < 130

    def test_without_a_broker_nothing_is_taken(
        self, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        schedule(store, "a")
        publisher.is_there = False
        assert dispatcher.run_once() == 0
        row = columns(store, "a")
        assert row.sends == 0
        assert due_in(store, "a") <= 0


class TestMetrics:
    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
        told: list[tuple[int, int, float]] = []
        monkeypatch.setattr(metrics, "dispatched", lambda *numbers: told.append(numbers))
        return told

    def test_a_batch_tells_what_was_confirmed_what_of_it_again_and_how_long_it_took(
        self,
        world: World,
        store: Store,
        publisher: FakePublisher,
        dispatcher: Dispatcher,
        told: list[tuple[int, int, float]],
    ) -> None:
        def in_half_a_second(items: Sequence[Outgoing]) -> Published:
            world.clock.now += 0.5
            return Published(sent=[items[0]], unsent=list(items[1:]))

        schedule(store, "a", due_in=-2)
        schedule(store, "b", due_in=-1)
        publisher.answers = [in_half_a_second, in_half_a_second]
        dispatcher.run_once()
        assert told == [(1, 0, 0.5)]
        world.travel(200)
        edit(store, "b", wake_at=store.now())
        dispatcher.run_once()
        assert told[1:] == [(1, 1, 0.5)]

    def test_a_look_that_finds_nothing_is_no_batch(
        self, dispatcher: Dispatcher, told: list[tuple[int, int, float]]
    ) -> None:
        dispatcher.run_once()
        assert told == []


class TestPass:
    @pytest.mark.report("backlog")
    def test_it_goes_on_until_nothing_is_due(
        self, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        for age in range(5):
            schedule(store, f"{age}", due_in=age - 10)
        assert dispatcher.run() == 5
        assert publisher.batches == [["0", "1"], ["2", "3"], ["4"]]

    def test_it_lets_others_have_their_turn_after_a_second(
        self, world: World, store: Store, publisher: FakePublisher, dispatcher: Dispatcher
    ) -> None:
        schedule(store, *"abcdefgh")

        def slowly(items: Sequence[Outgoing]) -> Published:
            world.clock.pause(PASS_SECONDS * 0.6)
            return Published(sent=list(items))

        publisher.answers = [slowly] * 4
        assert dispatcher.run() == 4
        assert dispatcher.run() == 4


class TestDatabaseTrouble:
    def test_a_note_that_failed_is_made_before_anything_else_is_taken(
        self,
        store: Store,
        publisher: FakePublisher,
        dispatcher: Dispatcher,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        schedule(store, "a")
        put_into_outbox(store, "plain")
        with monkeypatch.context() as broken:
            broken.setattr(store.due, "confirm", away)
            with pytest.raises(StoreUnavailable):
                dispatcher.run_once()
            with pytest.raises(StoreUnavailable):
                dispatcher.run_once()
        assert len(publisher.batches) == 1, "what is owed comes first"
        # The outage took longer than the ten seconds for which the batch was ours.
        store.time_offset[0] += 60
        assert dispatcher.run_once() == 0
        assert len(publisher.batches) == 1, "nothing is sent twice"
        assert 110 < due_in(store, "a") <= 120

    def test_the_time_from_the_take_to_the_note_is_not_disturbed(
        self, world: World, store: Store, publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []

        @contextmanager
        def block(name: str) -> Iterator[None]:
            told.append(name)
            yield
            told.append(f"end of {name}")

        dispatcher = dispatcher_of(
            world, publisher, taking=partial(block, "taking"), sending=partial(block, "sending")
        )
        take, confirm = store.due.take, store.due.confirm
        monkeypatch.setattr(store.due, "take", lambda *a: (told.append("take"), take(*a))[1])
        monkeypatch.setattr(store.due, "confirm", lambda *a: (told.append("note"), confirm(*a)))

        def publish(items: Sequence[Outgoing]) -> Published:
            told.append("publish")
            return Published(sent=list(items))

        publisher.answers = [publish]
        schedule(store, "a")
        dispatcher.run_once()
        assert told == [
            "taking", "take", "sending", "publish", "note", "end of sending", "end of taking",
        ]  # fmt: skip


class TestReports:
    def test_a_lease_that_ran_out_is_said(
        self, world: World, store: Store, dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.claims.claim(delivery("a"), "worker", 60.0, 3)
        dispatcher.run_once()
        world.travel(61)
        dispatcher.run_once()
        assert "The lease of proj.tasks.onboard[a] ran out: its worker is gone (crash 1)" in caplog.text

    def test_a_quarantine_is_said_and_signalled(
        self, world: World, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[dict[str, Any]] = []

        def receive(**told: Any) -> None:
            seen.append(told)

        signals.task_quarantined.connect(receive)
        single = dispatcher_of(world, FakePublisher(), limits=lambda _name: (1, 60.0))
        store.claims.claim(delivery("a"), "worker", 60.0, 1)
        world.travel(61)
        single.run_once()
        assert [(told["sender"], told["task_id"]) for told in seen] == [("proj.tasks.onboard", "a")]
        assert "proj.tasks.onboard[a] is quarantined: its worker died once" in caplog.text

    def test_an_unreadable_row_is_said(
        self, store: Store, dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture
    ) -> None:
        schedule(store, "a")
        edit(store, "a", body=None)
        dispatcher.run_once()
        (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert line == "Row a cannot be read and is set aside for an hour"


class TestPublisher:
    """With kombu's own in-memory transport."""

    def publisher(self, world: World, clock: StillClock) -> Publisher:
        return Publisher(world.app, clock=clock)

    def take(self, store: Store) -> tuple[Outgoing, ...]:
        return store.due.take(100, lambda _name: (3, 60.0)).outgoing

    def test_a_message_arrives_as_first_sent_and_a_wake_says_so(self, world: World, store: Store) -> None:
        schedule(store, "a")
        put_into_outbox(store, "b")
        published = self.publisher(world, world.clock).publish(self.take(store))
        assert len(published.sent) == 2
        with world.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(world.app.amqp.queues["celery"])
            arrived = [queue.get_nowait() for _ in range(2)]
        by_id = {message.headers["id"]: message for message in arrived}
        assert by_id["a"].headers["durable"] == {"send_id": "send-a", "version": 0, "wake": 1}
        assert "durable" not in by_id["b"].headers
        assert by_id["a"].properties["correlation_id"] == "a"
        assert by_id["a"].payload[:2] == [[], {}]

    def test_a_row_that_cannot_be_read_is_broken_and_holds_up_nobody(
        self, world: World, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        schedule(store, "good", "bad")
        edit(store, "bad", headers="[")
        published = self.publisher(world, world.clock).publish(self.take(store))
        assert [item.key for item in published.sent] == ["good"]
        assert [item.key for item in published.broken] == ["bad"]
        assert "Row bad cannot be sent" in caplog.text

    def test_a_broker_that_is_away_is_tried_after_growing_pauses_only(
        self, world: World, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        tries: list[float] = []

        def refuse(**_: Any) -> Any:
            tries.append(world.clock.now)
            raise ConnectionRefusedError("nobody there")

        publisher = self.publisher(world, world.clock)
        monkeypatch.setattr(world.app, "connection_for_write", refuse)
        for _ in range(100):
            assert not publisher.connect()
            world.clock.now += 0.1
        assert 3 <= len(tries) <= 8
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        monkeypatch.undo()
        world.clock.now += 10
        schedule(store, "a")
        assert [item.key for item in publisher.publish(self.take(store)).sent] == ["a"]
        assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]

    def test_what_the_broker_lost_in_mid_batch_is_unsent(
        self, world: World, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publisher = self.publisher(world, world.clock)
        assert publisher.connect()
        schedule(store, "a", "b")

        class Dying:
            def send(self, attempt: Any) -> None:
                attempt.sent.add(attempt.items[0])
                raise BrokenPipeError

        publisher._way = Dying()
        published = publisher.publish(self.take(store))
        assert ([i.key for i in published.sent], [i.key for i in published.unsent]) == (["a"], ["b"])
        assert publisher.broker.is_away

    def test_what_the_broker_refuses_is_tried_some_times_more_whatever_failed_while_it_was_away(
        self, world: World, store: Store
    ) -> None:
        publisher = self.publisher(world, world.clock)
        publisher.connect()
        schedule(store, "a")
        edit(store, "a", failures=100)

        class Refusing:
            def send(self, attempt: Any) -> None:
                attempt.refused[attempt.items[0]] = "no such exchange"

        publisher._way = Refusing()
        batch = self.take(store)
        answers = [publisher.publish(batch) for _ in range(REFUSALS)]
        assert [bool(answer.broken) for answer in answers] == [False] * (REFUSALS - 1) + [True]

        publisher.close()
        publisher.connect()
        publisher._way = Refusing()
        assert [item.key for item in publisher.publish(batch).unsent] == ["a"]

    def test_a_plain_message_to_an_exchange_without_queues_has_arrived(
        self, world: World, store: Store
    ) -> None:
        publisher = self.publisher(world, world.clock)
        publisher.connect()
        schedule(store, "durable")
        put_into_outbox(store, "plain")
        executions = store.context.schema.executions
        with store.database.statements() as connection:
            connection.execute(executions.update().values(exchange="broadcast"))

        class Returning:
            def send(self, attempt: Any) -> None:
                attempt.returned.update(dict.fromkeys(attempt.items, "NO_ROUTE"))

        publisher._way = Returning()
        published = publisher.publish(self.take(store))
        assert [i.status for i in published.sent] == ["outbox"]
        assert [i.key for i in published.unsent] == ["durable"]


def away(*_: Any) -> Any:
    raise StoreUnavailable("the database is away")
