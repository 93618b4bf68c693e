"""DurableScheduler keeps the contract of a Celery beat scheduler, as Celery's service and others call it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import Service
from celery.schedules import crontab
from celery.signals import beat_init

import celery_durable.store.engine
from celery_durable import Durable
from celery_durable.beat import DurableScheduler
from celery_durable.errors import ConfigurationError
from tests.unit.schedulers import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.dispose()


@pytest.fixture
def scheduler(world: World) -> Iterator[DurableScheduler]:
    scheduler = DurableScheduler(app=world.app)
    yield scheduler
    scheduler.close()


class TestConstruction:
    def test_a_lazy_one_touches_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The command line makes one for its banner."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(celery_durable.store.engine, "create_engine", lambda *a, **k: 1 / 0)
        app = Celery("lazy", broker="amqp://nobody.invalid", set_as_current=False)
        Durable(app, database_url="postgresql://me:secret@nowhere.invalid/db")
        lazy = DurableScheduler(app=app, schedule_filename="x", max_interval=None, lazy=True)
        assert lazy.info.splitlines() == [
            "    . database -> postgresql+psycopg://me:***@nowhere.invalid/db",
            "    . namespace -> lazy",
        ]
        assert lazy.max_interval == 300
        lazy.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_real_one_does_not_ask_the_database_before_the_first_tick(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Celery's signal handler reaches for the scheduler, and would make a second one meanwhile."""
        monkeypatch.setattr(celery_durable.store.engine, "create_engine", lambda *a, **k: 1 / 0)
        app = Celery("real", broker="memory://", set_as_current=False)
        Durable(app, database_url="postgresql://me@nowhere.invalid/db")
        assert set(DurableScheduler(app=app).schedule) == {"celery.backend_cleanup"}

    def test_the_banner_of_an_app_without_a_database_is_not_where_it_fails(self) -> None:
        app = Celery("bare", broker="amqp://nobody.invalid", set_as_current=False)
        assert DurableScheduler(app=app, lazy=True).info == "    . database -> not configured"

    def test_an_app_that_is_not_durable_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="call Durable"):
            DurableScheduler(app=Celery("bare", broker="memory://", set_as_current=False))

    def test_a_wrong_setting_is_refused(self) -> None:
        app = Celery("wrong", broker="memory://", set_as_current=False)
        Durable(app, database_url="sqlite:///:memory:", poll_interval="often")
        with pytest.raises(ConfigurationError, match="poll_interval"):
            DurableScheduler(app=app)

    def test_it_takes_what_celery_and_others_pass(self, world: World) -> None:
        scheduler = DurableScheduler(
            app=world.app, schedule={}, max_interval=7, Producer=None, lazy=False, sync_every_tasks=3,
            schedule_filename="anything", something_else=1,
        )  # fmt: skip
        assert (scheduler.max_interval, scheduler.sync_every_tasks) == (7, 3)

    def test_the_class_that_celery_finds_by_its_short_name(self, world: World) -> None:
        service = Service(app=world.app, scheduler_cls="durable")
        assert type(service.get_scheduler(lazy=True)) is DurableScheduler


class TestSetup:
    def test_entries_come_from_the_configuration_and_from_add_periodic_task(self, world: World) -> None:
        world.schedule(report={})
        world.app.add_periodic_task(5.0, world.app.tasks["plain"].s(1), name="added", misfire="skip")
        schedule = DurableScheduler(app=world.app).schedule
        assert set(schedule) == {"report", "added"}
        assert schedule["added"].misfire == "skip"
        assert "misfire" not in schedule["added"].options

    def test_the_built_in_cleanup_stays_where_results_do_not_expire_by_themselves(self) -> None:
        world = World(result_backend="db+sqlite://")
        world.schedule(report={})
        cleanup = DurableScheduler(app=world.app).schedule["celery.backend_cleanup"]
        assert cleanup.schedule == crontab("0", "4", "*")
        assert cleanup.options == {"expires": 12 * 3600}

    def test_ones_own_cleanup_wins(self) -> None:
        world = World(result_backend="db+sqlite://")
        world.app.conf.beat_schedule = {
            "celery.backend_cleanup": {"task": "celery.backend_cleanup", "schedule": 60.0}
        }
        cleanup = DurableScheduler(app=world.app).schedule["celery.backend_cleanup"]
        assert cleanup.schedule.run_every.total_seconds() == 60

    def test_results_that_expire_by_themselves_need_none(self, world: World) -> None:
        assert DurableScheduler(app=world.app).schedule == {}

    def test_a_wrong_policy_is_refused_and_names_the_entry(self, world: World) -> None:
        world.schedule(report={"misfire": "never"})
        with pytest.raises(ConfigurationError, match="'report': misfire"):
            DurableScheduler(app=world.app)


class TestTick:
    def test_outside_a_service_it_returns_the_delay_and_does_not_wait(
        self, scheduler: DurableScheduler
    ) -> None:
        assert 0 < scheduler.tick() <= 2

    def test_it_takes_the_arguments_of_celerys(self, scheduler: DurableScheduler) -> None:
        assert scheduler.tick(event_t=tuple, min=min, heappop=None, heappush=None) > 0

    def test_its_own_limit_bounds_the_delay(self, world: World) -> None:
        hasty = DurableScheduler(app=world.app, max_interval=1)
        assert 0 < hasty.tick() <= 1
        hasty.close()

    def test_within_a_service_it_waits_by_itself(
        self, scheduler: DurableScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class FakeService:
            pass

        other, own = FakeService(), FakeService()
        other.scheduler, own.scheduler = object(), scheduler  # type: ignore[attr-defined]
        beat_init.send(sender=other)
        assert scheduler.tick() > 0
        beat_init.send(sender=own)
        waits: list[float] = []
        assert scheduler._ticker is not None
        monkeypatch.setattr(scheduler._ticker, "wait", waits.append)
        assert scheduler.tick() == 0
        assert len(waits) == 1
        assert 0 < waits[0] <= 2

    def test_a_service_runs_what_is_due_until_it_is_stopped(self, world: World) -> None:
        world.schedule(report={"schedule": 60.0})
        service = Service(app=world.app, scheduler_cls=DurableScheduler)
        ticks = []

        class Counting(DurableScheduler):
            def tick(self, *args: Any, **kwargs: Any) -> float:
                if len(ticks) == 3:
                    raise SystemExit
                ticks.append(1)
                world.store.time_offset[0] += 61
                self._is_served = False
                return super().tick(*args, **kwargs) * 0

        service.scheduler_cls = Counting
        service.start()
        assert len(ticks) == 3
        assert service.scheduler.schedule["report"].total_run_count == 2


class TestClose:
    def test_within_a_tick_it_touches_nothing(
        self, scheduler: DurableScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A signal handler calls it so; what the tick is using must stay as it is."""
        scheduler.tick()
        ticker = scheduler._ticker
        assert ticker is not None
        closed: list[bool] = []
        monkeypatch.setattr(ticker, "close", lambda: closed.append(True))

        def interrupted() -> float:
            scheduler.close()
            scheduler.close()
            raise SystemExit

        monkeypatch.setattr(ticker, "run_once", interrupted)
        with pytest.raises(SystemExit):
            scheduler.tick()
        assert closed == []
        scheduler.close()
        scheduler.close()
        assert closed == [True]

    def test_before_the_first_tick_it_has_nothing_to_do(self, world: World) -> None:
        scheduler = DurableScheduler(app=world.app)
        scheduler.close()
        scheduler.close()

    def test_it_may_go_on_afterwards(self, scheduler: DurableScheduler) -> None:
        scheduler.tick()
        scheduler.close()
        assert scheduler.tick() > 0

    def test_there_is_nothing_to_sync(self, scheduler: DurableScheduler) -> None:
        scheduler.sync()
        assert scheduler.should_sync()
        scheduler._do_sync()
        assert not scheduler.should_sync()

    def test_the_producer_of_entries_is_not_connected(self, scheduler: DurableScheduler) -> None:
        assert scheduler.producer.connection is scheduler.connection
        assert not scheduler.connection.connected
