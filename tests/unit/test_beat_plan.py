"""Entries of a beat schedule: each due run is one message, whoever runs it and whatever happened before."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery.beat import BeatLazyFunc, Scheduler
from celery.schedules import BaseSchedule, crontab, schedule, solar

from celery_durable.beat import DurableScheduler
from celery_durable.records import Status
from celery_durable.scheduler.plan import ABANDONED, BUSY, FAILED, REFRESH
from tests.unit.schedulers import World

PLAIN = (Status.OUTBOX, "plain")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.dispose()


class WithJitter(schedule):
    """A class of somebody's own, which goes by when it last ran."""

    def is_due(self, last_run_at: Any) -> Any:
        return super().is_due(last_run_at)


class TestRuns:
    def test_a_schedule_of_somebody_s_own_first_runs_a_period_after_it_was_new(self, world: World) -> None:
        world.schedule(report={"schedule": WithJitter(20, app=world.app, nowfun=world.store.now)})
        beat = world.start()
        for _ in range(4):
            world.travel(5.1)
            beat.run()
        assert world.sent() == [PLAIN]

    def test_a_new_entry_first_runs_at_its_next_occurrence(self, world: World) -> None:
        world.schedule(report={})
        beat = world.start()
        assert world.sent() == []
        assert beat.due_in == pytest.approx(10, abs=1)
        world.travel(9)
        assert beat.run() == 0
        world.travel(1.1)
        assert beat.run() == 1
        assert world.sent() == [PLAIN]

    def test_an_interval_keeps_its_rhythm_however_late_it_runs(self, world: World) -> None:
        world.schedule(report={})
        beat = world.start()
        world.travel(12)
        assert beat.run() == 1
        assert beat.due_in == pytest.approx(8, abs=0.5)
        world.travel(27)
        assert beat.run() == 1
        assert beat.due_in == pytest.approx(1, abs=0.5)

    def test_a_plain_task_goes_to_the_outbox_and_a_durable_one_is_an_execution(self, world: World) -> None:
        world.schedule(a={"task": "plain"}, b={"task": "durable"}, c={"task": "unknown.here"})
        beat = world.start()
        world.travel(10.1)
        assert beat.run() == 3
        assert sorted(world.sent()) == [
            (Status.OUTBOX, "plain"),
            (Status.OUTBOX, "unknown.here"),
            (Status.SCHEDULED, "durable"),
        ]

    def test_the_message_is_as_celery_makes_it(self, world: World) -> None:
        options = {"queue": "slow", "priority": 3, "expires": 60, "headers": {"mine": 1}, "countdown": 5}
        world.schedule(report={"args": (1, 2), "kwargs": {"key": "value"}, "options": options})
        beat = world.start()
        world.travel(10.1)
        beat.run()
        (row,) = world.plain_messages()
        headers, properties = json.loads(row.headers), json.loads(row.properties)
        assert headers["task"] == "plain"
        assert headers["mine"] == 1
        assert headers["celery_beat_task"] is True
        assert headers["expires"]
        assert headers["eta"], "a countdown of a plain task is the broker's business, as with Celery"
        assert json.loads(row.body)[:2] == [[1, 2], {"key": "value"}]
        assert (row.exchange, row.routing_key, properties["priority"]) == ("", "slow", 3)
        assert row.task_id != headers["id"], "a task of this id may have a row of its own"

    def test_lazy_arguments_are_made_when_it_runs(self, world: World) -> None:
        counter = iter(range(10))
        world.schedule(report={"args": (BeatLazyFunc(lambda: next(counter)),)})
        beat = world.start()
        for _ in range(2):
            world.travel(10.1)
            beat.run()
        assert [json.loads(row.body)[0] for row in world.plain_messages()] == [[0], [1]]

    def test_what_it_has_done_shows_in_the_schedule(self, world: World) -> None:
        world.schedule(report={})
        beat = world.start()
        world.travel(10.1)
        beat.run()
        entry = beat.scheduler.schedule["report"]
        assert entry.total_run_count == 1
        assert abs(entry.last_run_at - world.store.now()) < timedelta(seconds=2)

    def test_an_eager_app_runs_it_in_place(self) -> None:
        world = World(task_always_eager=True)
        world.schedule(a={"args": (7,)})
        beat = world.start()
        world.travel(10.1)
        assert beat.run() == 0
        assert world.ran == [(7,)]
        assert beat.scheduler.schedule["a"].total_run_count == 1

    def test_an_entry_that_never_runs_is_never_due(self, world: World) -> None:
        world.schedule(never={"schedule": timedelta(days=3_000_000)})
        assert world.start().due_in is None


class TestManySchedulers:
    @pytest.mark.report("many-schedulers")
    def test_one_of_them_runs_it(self, world: World) -> None:
        world.schedule(report={}, other={"schedule": 7.0})
        beats = [world.start() for _ in range(3)]
        world.travel(10.1)
        assert sorted(beat.run() for beat in beats) == [0, 0, 2]
        assert [beat.scheduler.schedule["report"].total_run_count for beat in beats] == [1, 1, 1]
        world.travel(20)
        assert sum(beat.run() for beat in reversed(beats)) == 2

    def test_only_the_winner_builds_the_message(self, world: World) -> None:
        built: list[str] = []

        class Telling(DurableScheduler):
            def apply_entry(self, entry: Any, producer: Any = None) -> None:
                built.append(entry.name)
                super().apply_entry(entry, producer=producer)  # type: ignore[no-untyped-call]

        world.schedule(report={})
        beats = [world.start(Telling) for _ in range(3)]
        world.travel(10.1)
        for beat in beats:
            beat.run()
        assert built == ["report"]

    def test_one_that_dies_while_it_builds_the_message_leaves_it_to_another(self, world: World) -> None:
        class Dying(DurableScheduler):
            def apply_entry(self, entry: Any, producer: Any = None) -> None:
                raise SystemExit

        world.schedule(report={})
        dying, other = world.start(Dying), world.start()
        world.travel(10.1)
        with pytest.raises(SystemExit):
            dying.run()
        assert other.run() == 0
        assert other.due_in is not None
        assert other.due_in <= BUSY
        for _ in range(11):
            world.travel(1)
            other.run()
        assert world.sent() == [PLAIN]

    @pytest.mark.report("missed-runs")
    def test_a_restart_makes_up_for_missed_runs_with_one(self, world: World) -> None:
        world.schedule(report={})
        world.start()
        world.travel(95)
        late = world.start()
        assert world.sent() == [PLAIN]
        assert late.due_in is not None
        assert late.due_in <= 10

    @pytest.mark.report("missed-runs")
    def test_a_scheduler_that_is_restarted_all_the_time_still_runs_long_intervals(self, world: World) -> None:
        world.schedule(report={"schedule": 60.0})
        for _ in range(13):
            world.start()
            world.travel(5)
        world.start()
        assert world.sent() == [PLAIN]

    def test_misfire_skip_drops_what_is_late(self, world: World) -> None:
        world.schedule(
            skipped={"schedule": 3600.0, "misfire": "skip"},
            graced={"schedule": 3600.0, "misfire": "skip", "misfire_grace": 900},
        )
        world.start()
        world.travel(3600 + 600)
        late = world.start()
        assert len(world.sent()) == 1
        assert late.scheduler.schedule["skipped"].total_run_count == 0
        assert late.scheduler.schedule["graced"].total_run_count == 1

    def test_beat_cron_starting_deadline_is_the_grace_of_crontabs(self) -> None:
        world = World(beat_cron_starting_deadline=60)
        world.schedule(
            cron={"schedule": crontab(minute="*")}, hourly={"schedule": crontab(minute="0", hour="*/6")}
        )
        world.start()
        world.travel(86400 * 2)
        world.store.time_offset[0] += 120
        world.start()
        (only,) = world.plain_messages()
        assert only.task_name == "plain"


class TestChanges:
    def test_a_changed_entry_first_runs_at_its_next_occurrence(self, world: World) -> None:
        world.schedule(report={"schedule": 10.0})
        world.start()
        world.travel(9)
        world.schedule(report={"schedule": 30.0})
        beat = world.start()
        assert beat.due_in == pytest.approx(30, abs=1)
        world.travel(2)
        assert beat.run() == 0

    def test_an_unchanged_one_keeps_its_time_over_a_restart(self, world: World) -> None:
        world.schedule(report={"schedule": 10.0})
        world.start()
        world.travel(9)
        assert world.start().due_in == pytest.approx(1, abs=0.5)

    def test_the_header_that_celery_adds_is_no_change(self, world: World) -> None:
        world.schedule(report={"options": {"headers": {"mine": 1}}})
        beat = world.start()
        world.travel(10.1)
        beat.run()
        world.travel(5)
        # The configuration's own dict has the header in it by now.
        assert world.app.conf.beat_schedule["report"]["options"]["headers"]["celery_beat_task"]
        assert world.start().due_in == pytest.approx(5, abs=0.5)

    def test_a_removed_entry_is_not_run_and_keeps_its_row(self, world: World) -> None:
        world.schedule(old={}, kept={})
        world.start()
        world.schedule(kept={})
        world.travel(10.1)
        world.start()
        assert world.sent() == [PLAIN]
        assert set(world.store.schedule.load(["old", "kept"])[0]) == {"old", "kept"}

    def test_entries_may_come_and_go_while_it_runs(self, world: World) -> None:
        world.schedule(first={})
        beat = world.start()
        beat.scheduler.add(name="added", task="plain", schedule=5.0)
        del beat.scheduler.schedule["first"]
        beat.run()
        world.travel(5.1)
        assert beat.run() == 1
        beat.scheduler.schedule = {}
        world.travel(60)
        assert beat.run() == 0
        assert beat.due_in is None

    def test_an_entry_that_is_edited_in_place_is_a_changed_one(self, world: World) -> None:
        world.schedule(report={"schedule": 10.0})
        beat = world.start()
        beat.scheduler.schedule["report"].schedule = crontab(minute="0", hour="0")
        beat.run()
        world.travel(10.1)
        assert beat.run() == 0

    def test_an_older_scheduler_leaves_a_changed_entry_to_the_newer(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.schedule(report={"args": (1,)})
        older = world.start()
        world.schedule(report={"args": (2,)})
        newer = world.start()
        for _ in range(3):
            world.travel(10.1)
            older.run()
            newer.run()
        assert [json.loads(row.body)[0] for row in world.plain_messages()] == [[2], [2], [2]]
        (line,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert line.getMessage() == (
            "Entry 'report' was changed by another scheduler, which runs it from now on"
        )

    def test_and_takes_it_up_again_when_the_newer_is_gone_for_long(self, world: World) -> None:
        world.schedule(report={"schedule": 600.0, "args": (1,)})
        older = world.start()
        world.schedule(report={"schedule": 600.0, "args": (2,)})
        newer = world.start()
        for _ in range(6):
            world.travel(REFRESH)
            newer.plan.keep()
            older.plan.keep()
            newer.run()
            older.run()
        assert all(json.loads(row.body)[0] == [2] for row in world.plain_messages())
        before = len(world.sent())
        for _ in range(int(ABANDONED / REFRESH) + 4):
            world.travel(REFRESH)
            older.plan.keep()
            older.run()
        assert json.loads(world.plain_messages()[-1].body)[0] == [1]
        assert len(world.sent()) > before


class Fickle(BaseSchedule):
    """A schedule of a class of its own: due when it is told so."""

    def __init__(self, app: Any = None) -> None:
        super().__init__(app=app)
        self.is_on = False
        self.asked = 0

    def is_due(self, last_run_at: Any) -> tuple[bool, float]:
        self.asked += 1
        return self.is_on, 5.0

    def remaining_estimate(self, last_run_at: Any) -> timedelta:
        return timedelta(seconds=5)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        return type(self), ()


class Broken(Fickle):
    def is_due(self, last_run_at: Any) -> tuple[bool, float]:
        raise ZeroDivisionError


class TestSchedulesOfOthers:
    def test_a_custom_schedule_is_asked_when_it_wants_to_be(self, world: World) -> None:
        fickle = Fickle()
        world.schedule(report={"schedule": fickle})
        beat = world.start()
        assert beat.due_in == pytest.approx(5, abs=0.5)
        world.travel(5.1)
        assert beat.run() == 0
        asked = fickle.asked
        beat.run()
        assert fickle.asked == asked
        fickle.is_on = True
        world.travel(5.1)
        assert beat.run() == 1

    def test_a_solar_event_runs_when_it_happens_and_then_a_day_later(self, world: World) -> None:
        world.schedule(dawn={"schedule": solar("sunrise", 30, 31)})
        beat = world.start()
        assert beat.due_in is not None
        assert 0 < beat.due_in < 86400 + 180
        world.travel(beat.due_in - 1)
        assert beat.run() == 0
        world.travel(2)
        assert beat.run() == 1
        assert beat.run() == 0
        assert beat.due_in == pytest.approx(86400, abs=180)
        assert world.start().due_in == pytest.approx(beat.due_in, abs=5), "and so it is after a restart"

    def test_one_that_fails_is_said_and_tried_again_and_stops_nobody(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.schedule(broken={"schedule": Broken()}, good={})
        beat = world.start()
        world.travel(10.1)
        assert beat.run() == 1
        errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert errors == [f"Entry 'broken' cannot be run, trying again in {FAILED:.0f} s"]
        world.travel(FAILED)
        beat.run()
        assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 2

    def test_arguments_that_cannot_be_made_are_said_and_the_entry_goes_on(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> int:
            raise ZeroDivisionError

        world.schedule(bad={"args": (BeatLazyFunc(fail),)}, good={})
        beat = world.start()
        world.travel(10.1)
        assert beat.run() == 1
        assert "Couldn't apply scheduled task bad" in caplog.text
        assert beat.due_in is not None
        assert beat.due_in > 5


class TestOtherPeoplesCode:
    def test_a_patch_of_apply_entry_gets_two_positionals(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a well-known monitor does it, on the base class."""
        original, seen = Scheduler.apply_entry, []

        def patched(*args: Any, **kwargs: Any) -> Any:
            scheduler, entry = args
            seen.append((type(scheduler), entry.name, list(kwargs)))
            return original(*args, **kwargs)

        monkeypatch.setattr(Scheduler, "apply_entry", patched)
        world.schedule(report={})
        beat = world.start()
        world.travel(10.1)
        assert beat.run() == 1
        assert seen == [(DurableScheduler, "report", ["producer"])]

    def test_a_subclass_may_hook_into_every_stage(self, world: World) -> None:
        calls: list[str] = []

        class Hooked(DurableScheduler):
            def reserve(self, entry: Any) -> Any:
                calls.append("reserve")
                return super().reserve(entry)  # type: ignore[no-untyped-call]

            def apply_entry(self, entry: Any, producer: Any = None) -> Any:
                calls.append("apply_entry")
                return super().apply_entry(entry, producer=producer)  # type: ignore[no-untyped-call]

            def apply_async(
                self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
            ) -> Any:
                calls.append(f"apply_async, advance={advance}")
                return super().apply_async(entry, producer=producer, advance=advance, **kwargs)  # type: ignore[no-untyped-call]

        world.schedule(report={})
        beat = world.start(Hooked)
        world.travel(10.1)
        assert beat.run() == 1
        assert calls == ["reserve", "apply_entry", "apply_async, advance=False"]

    def test_an_entry_class_of_others_has_the_usual_policy(self, world: World) -> None:
        from celery.beat import ScheduleEntry

        class Plain(DurableScheduler):
            Entry = ScheduleEntry

        world.schedule(report={})
        world.start(Plain)
        world.travel(95)
        world.start(Plain)
        assert world.sent() == [PLAIN]
