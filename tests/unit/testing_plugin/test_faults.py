"""Runs that die and runs that lose their lease, where a test says so."""

from __future__ import annotations

import pytest
from celery import chain, chord

from celery_durable import DurableTask, LeaseLost, TaskQuarantined, current_lease, sleep, step
from celery_durable.points import Point
from celery_durable.store.engine import Database
from celery_durable.testing import DurableClock
from celery_durable.testing.app import durable_app as new_app
from celery_durable.testing.faults import WAYS_IN


@pytest.fixture
def did():
    """What tasks have done, in order."""
    return []


@pytest.fixture
def pay(durable_app, did):
    @durable_app.task(base=DurableTask, name="pay")
    def pay(amount):
        try:
            step(did.append, f"charge {amount}")
            sleep(days=1)
            step(did.append, "receipt")
            return amount
        finally:
            did.append("finally")

    return pay


class TestCrashes:
    @pytest.mark.parametrize(
        ("point", "charges"),
        [
            (Point.MESSAGE_ARRIVED, 1),
            (Point.CLAIM_COMMITTED, 1),
            (Point.STEP_RAN, 2),
            (Point.STEP_JOURNALED, 1),
            (Point.SLEEP_PARKED, 1),
            (Point.DUE_TAKEN, 1),
            (Point.WAKES_SENT, 1),
            (Point.END_WRITTEN, 1),
            (Point.RESULT_STORED, 1),
            (Point.OUTCOME_TOLD, 1),
            (Point.ROW_ENDED, 1),
        ],
    )
    def test_a_task_whose_worker_dies_anywhere_comes_to_its_end(
        self, durable_app, durable_clock, pay, did, point, charges
    ):
        durable_clock.crash_at(point)
        result = pay.delay(5)
        durable_clock.advance(days=2)

        assert result.get() == 5
        assert did.count("charge 5") == charges
        assert did.count("receipt") == 1
        assert durable_app.durable.get(result.id).status == "succeeded"

    def test_nothing_is_settled_by_a_dead_run_and_its_lease_has_to_run_out(
        self, durable_app, durable_clock, pay, did
    ):
        durable_clock.crash_at(Point.STEP_RAN)
        result = pay.delay(5)
        durable_clock.drain()

        execution = durable_app.durable.get(result.id)
        assert (execution.status, execution.crashes, result.state) == ("running", 0, "PENDING")
        assert list(durable_clock.journal(result)) == []
        durable_clock.advance(seconds=59)
        assert did.count("charge 5") == 1
        durable_clock.advance(minutes=2)
        assert did.count("charge 5") == 2
        assert result.state == "SLEEPING"

    def test_what_a_dead_run_does_on_its_way_out_is_not_written(self, durable_app, durable_clock, did):
        @durable_app.task(base=DurableTask, name="clean")
        def clean():
            try:
                step(did.append, "work")
            finally:
                step(did.append, "clean up")

        durable_clock.crash_at(Point.STEP_RAN)
        result = clean.delay()
        durable_clock.drain()

        assert list(durable_clock.journal(result)) == []
        assert durable_app.durable.get(result.id).status == "running"

    def test_no_statement_of_a_dead_run_is_let_through(self, durable_app, durable_clock, did):
        @durable_app.task(base=DurableTask, name="other")
        def other():
            did.append("other")

        @durable_app.task(base=DurableTask, name="deaf")
        def deaf():
            try:
                step(did.append, "work")
            except BaseException:  # noqa: BLE001 - a body that hears nothing
                other.apply_async(countdown=5)
            return "done"

        durable_clock.crash_at(Point.STEP_RAN)
        result = deaf.delay()
        durable_clock.drain()
        durable_clock.advance(seconds=10)

        assert durable_app.durable.get(result.id).status == "running"
        assert did == ["work"]

    def test_every_way_into_the_database_is_guarded(self):
        ways = {name for name, value in vars(Database).items() if callable(value) and name[0] != "_"}
        assert ways - {"dispose"} == set(WAYS_IN)

    @pytest.mark.parametrize("point", [None, Point.END_WRITTEN, Point.BODY_ENTERED])
    def test_a_failure_reaches_the_end_of_its_chain_and_the_chord_above_it(
        self, durable_app, durable_clock, point
    ):
        """At once, told by the next run, or as a quarantine."""

        @durable_app.task(base=DurableTask, name="fails", max_crashes=0)
        def fails():
            raise KeyError("bad")

        @durable_app.task(base=DurableTask, name="follows")
        def follows(value=0):
            return value

        durable_clock.propagate = False
        for canvas in (
            chain(fails.s(), follows.s()),
            chord([fails.s() | follows.s(), follows.s()], follows.s()),
        ):
            if point is not None:
                durable_clock.crash_at(point)
            result = canvas.delay()
            durable_clock.advance(hours=1)
            assert result.state == "FAILURE"

    def test_the_nth_time(self, durable_clock, pay, did):
        durable_clock.crash_at(Point.STEP_RAN, nth=2)
        result = pay.delay(5)
        durable_clock.advance(days=2)

        assert result.get() == 5
        assert (did.count("charge 5"), did.count("receipt")) == (1, 2)

    @pytest.mark.report("kills-its-worker")
    def test_a_task_that_kills_its_workers_is_quarantined_and_can_be_released(
        self, durable_app, durable_clock, pay
    ):
        for nth in (1, 2, 3):
            durable_clock.crash_at(Point.BODY_ENTERED, nth=nth)
        result = pay.delay(5)
        durable_clock.advance(hours=1)

        with pytest.raises(TaskQuarantined, match="3 times in a row"):
            result.get()
        durable_app.durable.release(result.id)
        durable_clock.advance(days=1)
        assert durable_app.durable.get(result.id).status == "succeeded"

    def test_a_task_that_ends_its_process_counts_as_a_crash(self, durable_app, durable_clock):
        @durable_app.task(base=DurableTask, name="exit", max_crashes=1)
        def leave():
            raise SystemExit(1)

        result = leave.delay()
        durable_clock.advance(minutes=10)
        with pytest.raises(TaskQuarantined):
            result.get()

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("step-run", r"did you mean step-ran or .*\?"),
            ("STEP_RAN", r"see celery_durable\.points\.Point"),
            ("body_entered", r"did you mean body-entered\?"),
            ("anywhere", r"see celery_durable\.points\.Point"),
        ],
    )
    def test_a_point_that_there_is_not_is_refused_with_those_that_may_be_meant(
        self, durable_clock, wrong, said
    ):
        with pytest.raises(ValueError, match=f"no crash point '{wrong}': {said}$") as refused:
            durable_clock.crash_at(wrong)
        assert len(str(refused.value)) < 110

    def test_nth_counts_from_one(self, durable_clock):
        with pytest.raises(ValueError, match="nth"):
            durable_clock.crash_at("step-ran", nth=0)

    def test_a_test_in_which_no_run_comes_to_the_point_fails(self):
        clock = DurableClock(new_app()).__enter__()
        clock.crash_at(Point.RETRY_STORED)
        with pytest.raises(AssertionError, match="retry-stored"):
            clock.__exit__(None, None, None)

    def test_a_test_that_fails_by_itself_is_left_to_say_why(self):
        clock = DurableClock(new_app()).__enter__()
        clock.crash_at(Point.RETRY_STORED)
        clock.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


class TestLostLeases:
    @pytest.mark.report("loss-is-no-failure")
    def test_a_run_that_loses_its_lease_is_refused_and_another_one_goes_on(
        self, durable_app, durable_clock, did
    ):
        @durable_app.task(base=DurableTask, name="export")
        def export():
            token = current_lease().token
            did.append(f"begin {token}")
            if token == 1:
                durable_clock.lose_lease()
            assert current_lease().lost is (token == 1)
            step(did.append, f"upload {token}")
            return token

        result = export.delay()
        durable_clock.drain()

        assert result.get() == 2
        assert did == ["begin 1", "begin 2", "upload 2"]

    @pytest.mark.report("loss-stops-the-run")
    def test_the_next_run_loses_it_where_the_test_says(self, durable_clock, pay, did):
        durable_clock.lose_lease(at=Point.STEP_RAN)
        result = pay.delay(5)
        durable_clock.advance(days=1)

        assert result.get() == 5
        assert did.count("charge 5") == 2

    def test_the_next_run_loses_it_before_its_first_durable_call(self, durable_clock, pay, did):
        durable_clock.lose_lease()
        result = pay.delay(5)
        durable_clock.drain()

        assert did == ["finally", "charge 5", "finally"]
        assert result.state == "SLEEPING"

    def test_a_task_can_hear_of_it(self, durable_app, durable_clock, did):
        @durable_app.task(base=DurableTask, name="export")
        def export():
            if current_lease().token == 1:
                durable_clock.lose_lease()
                try:
                    current_lease().check()
                except LeaseLost as lost:
                    did.append(lost.token)
                    raise

        durable_clock.propagate = True
        assert durable_clock.finish(export.delay()) is None
        assert did == [1]

    def test_a_point_outside_of_a_run_has_no_lease(self, durable_clock, pay):
        durable_clock.lose_lease(at=Point.DUE_TAKEN)
        pay.delay(5)
        with pytest.raises(AssertionError, match="no lease to lose"):
            durable_clock.advance(days=1)
