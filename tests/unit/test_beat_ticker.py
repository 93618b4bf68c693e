"""One round of a scheduler: what it does, how long it rests, and what it says when something is away."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from celery_durable.errors import ConfigurationError, StoreUnavailable, WrongTables
from celery_durable.reach import Reach
from celery_durable.scheduler.state import HealthFile
from celery_durable.scheduler.ticker import LONGEST_WAIT, PRUNE_BATCH, Ticker
from celery_durable.store import Store
from tests.store.messages import columns, edit, schedule
from tests.unit.fakes import StillClock
from tests.unit.schedulers import World

POLL = 2.0


class FakeDispatcher:
    """Counts passes; finds what it is told to."""

    def __init__(self, clock: StillClock) -> None:
        self.broker = Reach("The broker", logging.getLogger("tests"), clock)
        self.passes = 0
        self.found: list[int] = []
        self.closed = 0

    def run(self) -> int:
        self.passes += 1
        return self.found.pop(0) if self.found else 0

    def close(self) -> None:
        self.closed += 1


class FakePlan:
    def __init__(self) -> None:
        self.messages = 0
        self.next: float | None = None
        self.kept = 0

    def run_due(self, _now: Any) -> int:
        return self.messages

    def due_in(self) -> float | None:
        return self.next

    def keep(self) -> None:
        self.kept += 1


@pytest.fixture
def world() -> Iterator[World]:
    world = World(durable_poll_interval=POLL)
    yield world
    world.store.dispose()


@pytest.fixture
def store(world: World) -> Store:
    return world.store


@pytest.fixture
def dispatcher(world: World) -> FakeDispatcher:
    return FakeDispatcher(world.clock)


def ticker_of(world: World, dispatcher: FakeDispatcher, **options: Any) -> Ticker:
    fake: Any = dispatcher
    return Ticker(world.durable, fake, clock=world.clock, **options)


@pytest.fixture
def ticker(world: World, dispatcher: FakeDispatcher) -> Ticker:
    return ticker_of(world, dispatcher)


class TestRest:
    def test_with_nothing_to_do_it_rests_until_the_next_poll(
        self, ticker: Ticker, dispatcher: FakeDispatcher
    ) -> None:
        assert ticker.run_once() == POLL
        assert dispatcher.passes == 0

    def test_it_rests_no_longer_than_until_the_next_row_is_due(self, ticker: Ticker, store: Store) -> None:
        schedule(store, "far", due_in=600)
        assert ticker.run_once() == POLL
        schedule(store, "near", due_in=0.7)
        assert ticker.run_once() == pytest.approx(0.7, abs=0.2)

    def test_it_rests_no_longer_than_until_the_next_entry(
        self, world: World, dispatcher: FakeDispatcher
    ) -> None:
        plan = FakePlan()
        ticker = ticker_of(world, dispatcher, plan=plan)
        plan.next = 0.3
        assert ticker.run_once() == 0.3
        plan.next = -5.0
        assert ticker.run_once() == 0

    def test_a_long_poll_interval_is_cut_for_those_who_watch_whether_it_ticks(
        self, dispatcher: FakeDispatcher
    ) -> None:
        world = World(durable_poll_interval=3600)
        assert ticker_of(world, dispatcher).run_once() == LONGEST_WAIT

    @pytest.mark.report("first-poll")
    def test_what_is_due_is_dispatched_and_the_next_round_comes_at_once(
        self, ticker: Ticker, store: Store, dispatcher: FakeDispatcher
    ) -> None:
        schedule(store, "a")
        dispatcher.found = [1]
        assert ticker.run_once() == 0
        assert dispatcher.passes == 1

    def test_entries_that_ran_are_dispatched_in_the_same_round(
        self, world: World, dispatcher: FakeDispatcher
    ) -> None:
        plan = FakePlan()
        plan.messages = 1
        dispatcher.found = [1]
        assert ticker_of(world, dispatcher, plan=plan).run_once() == 0
        assert dispatcher.passes == 1

    def test_due_rows_that_somebody_else_holds_are_not_asked_for_without_a_pause(
        self, ticker: Ticker, store: Store
    ) -> None:
        schedule(store, "a")
        rests = [ticker.run_once() for _ in range(12)]
        assert 0 < rests[0] < 0.1
        assert rests == sorted(rests)
        assert rests[-1] == POLL


class TestIdle:
    def test_a_minute_of_rest_costs_forty_statements(
        self, world: World, store: Store, dispatcher: FakeDispatcher
    ) -> None:
        ticker = ticker_of(world, dispatcher, plan=FakePlan())
        # A first minute, with the tables looked at and everything done that is done seldom.
        self.run_for_a_minute(world, ticker)
        statements: Counter[str] = Counter()
        engine = store.database.engine

        def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            statements[statement] += 1

        event.listen(engine, "before_cursor_execute", count)
        self.run_for_a_minute(world, ticker)
        commits = statements["BEGIN IMMEDIATE"]
        assert statements.total() + commits <= 40

    def run_for_a_minute(self, world: World, ticker: Ticker) -> None:
        until = world.clock.now + 60
        while world.clock.now < until:
            world.travel(ticker.run_once())


class TestOutages:
    @pytest.mark.report("database-restart")
    def test_a_database_that_is_away_is_said_once_and_tried_again(
        self,
        world: World,
        store: Store,
        dispatcher: FakeDispatcher,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        ticker = ticker_of(world, dispatcher)
        ticker.run_once()
        schedule(store, "a")
        with monkeypatch.context() as broken:
            broken.setattr(store.due, "poll", away)
            rests = []
            for _ in range(10):
                rests.append(ticker.run_once())
                world.travel(rests[-1])
            assert ticker.state == "database away"
        assert all(0 < rest <= 5 for rest in rests)
        assert max(rests) > 2
        assert dispatcher.passes == 0
        dispatcher.found = [1]
        assert ticker.run_once() == 0
        assert ticker.state == "ok"
        assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
        assert caplog.messages[0] == ("The database cannot be reached: the database is away. Trying again")

    def test_a_connection_that_is_merely_stale_is_not_said(
        self, ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ticker.run_once()
        poll, failures = store.due.poll, [1]

        def fail_once() -> Any:
            if failures:
                failures.pop()
                raise StoreUnavailable("server closed the connection")
            return poll()

        monkeypatch.setattr(store.due, "poll", fail_once)
        assert ticker.run_once() == POLL
        assert not caplog.records

    def test_a_broker_that_is_away_is_no_reason_to_be_busy(
        self, ticker: Ticker, store: Store, dispatcher: FakeDispatcher
    ) -> None:
        schedule(store, "a")
        dispatcher.broker.lost("refused")
        rest = ticker.run_once()
        assert 0 < rest <= 0.5
        assert ticker.state == "broker away"

    def test_a_database_that_is_away_from_the_start_is_waited_for(
        self, world: World, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared: list[bool] = []
        ticker = ticker_of(world, dispatcher)
        with monkeypatch.context() as broken:
            broken.setattr(world.durable, "prepare_tables", away)
            assert ticker.run_once() > 0
        monkeypatch.setattr(world.durable, "prepare_tables", lambda: prepared.append(True))
        ticker.run_once()
        ticker.run_once()
        assert prepared == [True]

    def test_tables_that_must_not_be_touched_and_do_not_fit_are_a_reason_to_end(
        self, world: World, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> None:
            raise ConfigurationError("the tables are at version 7")

        monkeypatch.setattr(world.durable, "prepare_tables", refuse)
        with pytest.raises(ConfigurationError, match="version 7"):
            ticker_of(world, dispatcher).run_once()

    def test_tables_that_do_not_fit_are_told_of_again_and_again(
        self, world: World, ticker: Ticker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Unlike an outage, which ends by itself."""

        def misfit() -> None:
            raise WrongTables("no such column: crashes")

        ticker.run_once()
        monkeypatch.setattr(world.store.due, "poll", misfit)
        for _ in range(3):
            assert 0 < ticker.run_once() <= 5
            world.travel(61)
        told = [record for record in caplog.records if record.message.startswith("The durable tables")]
        assert len(told) == 3
        assert "durable upgrade" in told[0].message

    @pytest.mark.report("unreadable-row")
    def test_anything_else_that_fails_is_logged_and_the_next_round_comes(
        self, ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ticker.run_once()
        with monkeypatch.context() as broken:
            broken.setattr(store.due, "poll", lambda: 1 / 0)
            assert ticker.run_once() > 0
        assert "This round of the scheduler failed" in caplog.text
        assert ticker.run_once() == POLL


class TestHouse:
    def test_it_tells_that_it_is_alive(self, world: World, ticker: Ticker, store: Store) -> None:
        ticker.run_once()
        for _ in range(60):
            world.travel(2)
            ticker.run_once()
            seconds = store.schedule.seconds_since_tick()
            assert seconds is not None
            assert seconds < 25

    def test_it_prunes_in_batches_now_and_then_and_without_a_pause_while_there_is_more(
        self, world: World, ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[float] = []
        answers = [PRUNE_BATCH, PRUNE_BATCH, 3]

        def prune(retention: float, retention_failed: float, limit: int) -> int:
            asked.append(world.clock.now)
            assert (retention, retention_failed, limit) == (7 * 86400, 30 * 86400, PRUNE_BATCH)
            return answers.pop(0) if answers else 0

        monkeypatch.setattr(store.queries, "prune", prune)
        for _ in range(90):
            ticker.run_once()
            world.travel(1)
        gaps = [round(after - before) for before, after in pairwise(asked)]
        assert gaps == [1, 1, 60]

    def test_finished_rows_go_and_their_tombstones_stay(
        self, world: World, ticker: Ticker, store: Store
    ) -> None:
        schedule(store, "old")
        edit(store, "old", status="succeeded", wake_at=None, finished_at=store.now())
        world.travel(8 * 86400)
        ticker.run_once()
        row = columns(store, "old")
        assert (row.status, row.body) == ("succeeded", None)

    def test_entries_are_shown_now_and_then(self, world: World, dispatcher: FakeDispatcher) -> None:
        plan = FakePlan()
        ticker = ticker_of(world, dispatcher, plan=plan)
        for _ in range(61):
            ticker.run_once()
            world.travel(10)
        assert plan.kept == 3

    def test_closing_lets_go_of_everything(
        self, world: World, dispatcher: FakeDispatcher, tmp_path: Path
    ) -> None:
        file = tmp_path / "health"
        ticker = ticker_of(world, dispatcher, health=HealthFile(file, world.clock))
        ticker.run_once()
        ticker.close()
        assert dispatcher.closed == 1
        assert not file.exists()


class TestHealthFile:
    @pytest.mark.report("database-restart")
    def test_it_says_how_it_goes(
        self, world: World, dispatcher: FakeDispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "health"
        ticker = ticker_of(world, dispatcher, health=HealthFile(file, world.clock))
        ticker.run_once()
        assert json.loads(file.read_text())["state"] == "ok"
        with monkeypatch.context() as broken:
            broken.setattr(world.store.due, "poll", away)
            ticker.run_once()
        assert json.loads(file.read_text())["state"] == "database away"

    def test_it_is_written_again_as_long_as_the_scheduler_ticks(self, tmp_path: Path) -> None:
        clock, file = StillClock(), tmp_path / "health"
        health = HealthFile(file, clock)
        health.write("ok")
        file.unlink()
        health.write("ok")
        assert not file.exists(), "not more than once a second"
        clock.now += 1
        health.write("ok")
        assert file.exists()

    def test_the_environment_may_name_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CELERY_DURABLE_HEALTH_FILE", str(tmp_path / "health"))
        HealthFile.of_environment().write("broker away")
        assert json.loads((tmp_path / "health").read_text())["state"] == "broker away"
        monkeypatch.delenv("CELERY_DURABLE_HEALTH_FILE")
        HealthFile.of_environment().write("ok")
        assert [path.name for path in tmp_path.iterdir()] == ["health"]

    def test_a_file_that_cannot_be_written_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock = StillClock()
        health = HealthFile(tmp_path / "missing" / "health", clock)
        for _ in range(3):
            health.write("ok")
            clock.now += 2
        assert len(caplog.records) == 1


def away(*_: Any) -> Any:
    raise StoreUnavailable("the database is away")
