"""Moving durable time: what becomes due runs, in order, and at its own time."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from celery import chain, chord, group
from celery.exceptions import TimeoutError as ResultTimeout

from celery_durable import DurableTask, sleep, sleep_until, step
from celery_durable.testing import DurableClock, Sent
from celery_durable.testing.app import durable_app as new_app


@pytest.fixture
def seen():
    """What tasks have done, in order."""
    return []


@pytest.fixture
def onboard(durable_app, seen):
    @durable_app.task(base=DurableTask, name="onboard")
    def onboard(user_id):
        step(seen.append, "welcome")
        sleep(days=3)
        step(seen.append, "three days")
        sleep(days=14)
        return user_id

    return onboard


@pytest.fixture
def add(durable_app):
    @durable_app.task(base=DurableTask, name="add")
    def add(one, other, days=1):
        sleep(days=days)
        return one + other

    return add


class TestSleeping:
    def test_time_stands_still_until_it_is_moved_and_then_everything_on_the_way_runs(
        self, durable_clock, onboard, seen
    ):
        began = durable_clock.now()
        result = onboard.delay(7)

        assert durable_clock.drain() == 1
        assert (seen, result.state) == (["welcome"], "SLEEPING")
        assert durable_clock.now() == began
        durable_clock.advance(days=3, milliseconds=-1)
        assert seen == ["welcome"]
        durable_clock.advance(milliseconds=1)
        assert seen == ["welcome", "three days"]
        durable_clock.advance(timedelta(days=14))
        assert result.get() == 7
        assert durable_clock.now() == began + timedelta(days=17)

    def test_one_advance_goes_over_two_sleeps(self, durable_clock, onboard, seen):
        result = onboard.delay(7)

        assert durable_clock.advance(days=17) == 3
        assert result.get() == 7
        assert seen == ["welcome", "three days"]

    def test_tasks_run_in_the_order_in_which_they_are_due(self, durable_app, durable_clock, seen):
        def note(name):
            seen.append((name, durable_clock.now()))

        @durable_app.task(base=DurableTask, name="tick")
        def tick(name, hours):
            for _ in range(2):
                sleep(hours=hours)
                step(note, name)

        began = durable_clock.now()
        tick.delay("slow", 3)
        tick.delay("quick", 2)
        durable_clock.advance(days=1)

        assert [(name, now - began) for name, now in seen] == [
            ("quick", timedelta(hours=2)),
            ("slow", timedelta(hours=3)),
            ("quick", timedelta(hours=4)),
            ("slow", timedelta(hours=6)),
        ]

    def test_a_short_sleep_takes_no_time_and_neither_does_a_long_one_until_an_instant(
        self, durable_app, durable_clock
    ):
        @durable_app.task(base=DurableTask, name="nap")
        def nap():
            for _ in range(70):
                sleep(0.9)  # in place: longer than the lease, all of them together
            sleep_until(durable_app.now() + timedelta(days=2))
            return "rested"

        began = durable_clock.now()
        result = nap.delay()
        durable_clock.drain()

        assert durable_clock.now() - began == timedelta(seconds=63)
        durable_clock.move_to(began + timedelta(days=2, seconds=63))
        assert result.get() == "rested"

    def test_a_sleep_until_a_time_of_the_wall_clock_is_not_later_than_one_of_that_length(
        self, durable_app, durable_clock, add
    ):
        from datetime import datetime, timezone

        @durable_app.task(base=DurableTask, name="until")
        def until():
            sleep_until(datetime.now(timezone.utc) + timedelta(days=2))

        result = until.delay()
        durable_clock.advance(days=2)
        assert result.ready()

    @pytest.mark.report("eager")
    def test_finish_goes_from_sleep_to_sleep(self, durable_clock, onboard):
        began = durable_clock.now()

        assert durable_clock.finish(onboard.delay(7)) == 7
        assert durable_clock.now() - began == timedelta(days=17)

    @pytest.mark.parametrize("wrong", [{}, {"duration": 1, "days": 1}])
    def test_advance_takes_a_duration_or_units(self, durable_clock, wrong):
        with pytest.raises(TypeError, match="advance"):
            durable_clock.advance(**wrong)

    def test_time_does_not_go_back(self, durable_clock):
        with pytest.raises(ValueError, match="back"):
            durable_clock.advance(days=-1)

    def test_a_task_cannot_move_time(self, durable_app, durable_clock):
        @durable_app.task(base=DurableTask, name="forward")
        def forward():
            durable_clock.advance(days=1)

        with pytest.raises(RuntimeError, match="do it in the test"):
            durable_clock.finish(forward.delay())

    def test_what_goes_round_in_circles_is_found_out(self, durable_app, durable_clock, monkeypatch):
        monkeypatch.setattr("celery_durable.testing.clock.MOST_RUNS", 5)

        @durable_app.task(name="again")
        def again():
            again.delay()

        again.delay()
        with pytest.raises(RuntimeError, match="5 runs"):
            durable_clock.drain()


class TestResults:
    def test_get_runs_what_is_due_now(self, durable_app):
        @durable_app.task(base=DurableTask, name="quick")
        def quick():
            return "done"

        assert quick.delay().get(timeout=1) == "done"

    def test_get_of_what_sleeps_says_until_when_and_does_not_wait(self, durable_clock, onboard):
        result = onboard.delay(7)

        with pytest.raises(ResultTimeout, match=r"onboard.* is sleeping until .*durable_clock\.advance"):
            result.get()
        with pytest.raises(ResultTimeout, match="sleeping until"):
            group(onboard.s(1), onboard.s(2)).delay().get()

    def test_it_says_so_in_the_time_of_the_app(self):
        app = new_app()
        with DurableClock(app, {"timezone": "Asia/Tokyo"}) as clock:

            @app.task(base=DurableTask, name="nap")
            def nap():
                sleep(days=3)

            began = app.now()
            due = began + timedelta(days=3)
            said = re.escape(f"sleeping until {due}; durable time is {began}.")
            assert str(due).endswith("+09:00")
            result = nap.delay()
            clock.drain()
            with pytest.raises(ResultTimeout, match=said):
                result.get()

    def test_get_of_what_was_never_sent(self, durable_app):
        with pytest.raises(ResultTimeout, match="nobody has no result: it was not sent"):
            durable_app.AsyncResult("nobody").get()

    def test_an_exception_is_a_failed_result(self, durable_app, durable_clock):
        @durable_app.task(base=DurableTask, name="fail")
        def fail():
            raise ValueError("no")

        result = fail.delay()
        durable_clock.drain()

        assert result.state == "FAILURE"
        with pytest.raises(ValueError, match="no"):
            result.get()

    @pytest.mark.parametrize("base", [{"base": DurableTask}, {}], ids=["durable", "plain"])
    def test_an_exception_is_raised_in_the_test_where_that_is_asked_for(
        self, durable_app, durable_clock, base
    ):
        @durable_app.task(name="fail", **base)
        def fail():
            raise ValueError("no")

        durable_clock.propagate = True
        result = fail.delay()
        with pytest.raises(ValueError, match="no") as raised:
            durable_clock.drain()

        assert result.state == "FAILURE"
        assert raised.traceback[-1].name == "fail"

    def test_an_interrupt_by_the_keyboard_reaches_the_test(self, durable_app, durable_clock):
        @durable_app.task(base=DurableTask, name="stop")
        def stop():
            raise KeyboardInterrupt

        stop.delay()
        with pytest.raises(KeyboardInterrupt):
            durable_clock.drain()


class TestCelery:
    def test_retry_waits_and_keeps_its_steps(self, durable_app, durable_clock, seen):
        @durable_app.task(base=DurableTask, name="fetch", bind=True)
        def fetch(self):
            step(seen.append, "once")
            if self.request.retries < 2:
                raise self.retry(countdown=3600)
            return self.request.retries

        result = fetch.delay()
        durable_clock.advance(minutes=119)
        assert (result.state, seen) == ("RETRY", ["once"])
        durable_clock.advance(minutes=1)
        assert (result.get(), seen) == (2, ["once"])

    def test_countdown_and_eta_of_the_first_start(self, durable_app, durable_clock, seen):
        @durable_app.task(base=DurableTask, name="later")
        def later(what):
            seen.append(what)

        later.apply_async(("eta",), eta=durable_clock.now() + timedelta(hours=2))
        later.apply_async(("countdown",), countdown=3600)
        durable_app.send_task("later", ("by name",), countdown=1800)
        durable_clock.advance(minutes=59)
        assert seen == ["by name"]
        durable_clock.advance(hours=2)
        assert seen == ["by name", "countdown", "eta"]

    def test_a_plain_task_runs_too_and_waits_for_its_countdown(self, durable_app, durable_clock, seen):
        @durable_app.task(name="mail", bind=True)
        def mail(self, what):
            seen.append(what)
            if self.request.retries < 1:
                raise self.retry(countdown=60)

        @durable_app.task(base=DurableTask, name="parent")
        def parent():
            mail.delay("now")
            mail.apply_async(("in a day",), countdown=86_400)

        parent.delay()
        durable_clock.drain()
        assert seen == ["now"]
        durable_clock.advance(hours=23)
        assert seen == ["now", "now"]
        durable_clock.advance(hours=2)
        assert seen == ["now", "now", "in a day", "in a day"]

    def test_what_goes_to_another_program_is_kept_for_the_test_to_look_at(self, durable_app, durable_clock):
        durable_app.send_task("billing.charge", (7,), {"amount": 3}, task_id="1")
        durable_clock.drain()

        assert durable_clock.sent == [Sent("billing.charge", "1", (7,), {"amount": 3})]

    def test_chain(self, durable_clock, add):
        result = chain(add.s(1, 2), add.s(3), add.s(4)).delay()

        durable_clock.advance(days=2)
        assert not result.ready()
        durable_clock.advance(days=1)
        assert result.get() == 10

    def test_group_and_link(self, durable_app, durable_clock, add, seen):
        @durable_app.task(name="note")
        def note(value):
            seen.append(value)

        result = group(add.s(1, 2, days=2), add.s(3, 4)).delay()
        add.apply_async((5, 6), link=note.s())
        durable_clock.advance(days=2)

        assert result.get() == [3, 7]
        assert seen == [11]

    def test_chord(self, durable_clock, durable_app, add):
        @durable_app.task(base=DurableTask, name="total")
        def total(values):
            sleep(days=1)
            return sum(values)

        result = chord([add.s(1, 2, days=2), add.s(3, 4)])(total.s())
        durable_clock.advance(days=3)
        assert result.get() == 10

    def test_cancel(self, durable_app, durable_clock, onboard, seen):
        first, second = onboard.delay(1), onboard.delay(2)
        durable_clock.drain()
        durable_app.durable.cancel(first.id)
        second.revoke()
        durable_clock.advance(days=30)

        assert [first.state, second.state] == ["REVOKED", "REVOKED"]
        assert seen == ["welcome", "welcome"]
        assert durable_app.durable.get(first.id).status == "cancelled"

    def test_operators_move_a_sleep(self, durable_app, durable_clock, onboard, seen):
        result = onboard.delay(1)
        durable_clock.drain()
        durable_app.durable.postpone(result.id, by=timedelta(days=1))
        durable_clock.advance(days=3)
        assert seen == ["welcome"]
        durable_app.durable.wake(result.id)
        durable_clock.drain()
        assert seen == ["welcome", "three days"]
