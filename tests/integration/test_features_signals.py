"""What Celery's signals, hooks and monitors are told of a task that sleeps: the manual's table, counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest
from celery import group

from tests.integration.features_support import features_bench, seen
from tests.integration.support import wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers

START = ("task_received", "task_prerun", "before_start", "body")
PARK = ("task_parked", "task_postrun IGNORED")
WAKE = ("task_received", "task_woken", "task_prerun", "before_start", "body")
SUCCESS = ("on_success", "task_success", "after_return SUCCESS", "task_postrun SUCCESS")
FAILURE = ("on_failure", "task_failure", "after_return FAILURE", "task_postrun FAILURE")


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker, which sends events, and one beat for all tests of this module."""
    folder = tmp_path_factory.mktemp("signals")
    with features_bench("redis-postgres", servers, folder, "-E", result_expires=300) as bench:
        yield bench


def assert_told(bench: Bench, task_id: str, *steps: str) -> None:
    """Wait until the last of these was seen; then nothing else was, in no other order."""
    bench.wait_for(
        lambda: len(bench.witness.steps(task_id)) >= len(steps), 15, f"{task_id}: {len(steps)} steps"
    )
    assert bench.witness.steps(task_id) == list(steps)


class TestSignalsAndHooks:
    @pytest.mark.report("missing-signals")
    def test_two_sleeps_then_success(self, bench: Bench) -> None:
        result = bench.project.hooked.delay()
        assert result.get(timeout=20) == "done"
        assert_told(bench, result.id, *START, *PARK, *WAKE, *PARK, *WAKE, *SUCCESS)

    def test_a_sleep_then_a_failure(self, bench: Bench) -> None:
        result = bench.project.fails.delay(seconds=1.1)
        bench.wait_for(result.ready)
        assert_told(bench, result.id, *START, *PARK, *WAKE, *FAILURE)

    @pytest.mark.report("missing-signals")
    def test_cancelled_asleep(self, bench: Bench) -> None:
        result = bench.project.hooked.delay(seconds=600)
        wait_until_asleep(bench, result)
        result.revoke()
        wait_for_status(bench, result.id, "cancelled")
        assert_told(bench, result.id, *START, *PARK, "task_received", "task_revoked")

    def test_cancelled_while_it_runs(self, bench: Bench) -> None:
        result = bench.project.waits.delay()
        seen(bench, result.id, "body")
        result.revoke()
        bench.witness.saw(result.id, "go")
        wait_for_status(bench, result.id, "cancelled")
        seen(bench, result.id, "task_revoked")
        seen(bench, result.id, "lease_lost")
        seen(bench, result.id, "task_postrun IGNORED")
        for step in ("task_success", "task_failure", "task_postrun SUCCESS"):
            assert bench.witness.count(result.id, step) == 0

    @pytest.mark.report("missing-signals")
    def test_its_process_is_killed(self, bench: Bench) -> None:
        result = bench.project.killed.delay()
        assert result.get(timeout=20) == "done"
        recovered = ("task_received", "task_recovered", "task_prerun", "before_start", "body")
        assert_told(bench, result.id, *START, *recovered, *SUCCESS)

    @pytest.mark.report("running-for-ever", "kills-its-worker")
    def test_its_process_is_killed_too_often(self, bench: Bench) -> None:
        result = bench.project.crashes.delay()
        wait_for_status(bench, result.id, "quarantined")
        told = ("task_received", "task_prerun", "task_failure", "task_postrun FAILURE")
        assert_told(bench, result.id, "task_received", "task_prerun", "body", "task_quarantined", *told)

    def test_it_expires_before_it_starts(self, bench: Bench) -> None:
        result = bench.project.hooked.apply_async(countdown=600, expires=1)
        wait_for_status(bench, result.id, "cancelled")
        assert_told(bench, result.id, "task_received", "task_revoked")

    @pytest.mark.report("missing-signals")
    def test_a_receiver_that_raises_leaves_nothing_behind(self, bench: Bench) -> None:
        result = bench.project.hooked.delay("prerun raises")
        assert result.get(timeout=20) == "done"
        start = ("task_received", "task_prerun", "raised", "before_start", "body")
        assert_told(bench, result.id, *start, *PARK, *WAKE, *PARK, *WAKE, *SUCCESS)
        ended = wait_for_status(bench, result.id, "succeeded")
        assert (ended.owner, ended.wake_at) == (None, None)

    @pytest.mark.report("missing-signals")
    def test_a_slow_receiver_holds_up_no_sleep(self, bench: Bench) -> None:
        """It is still busy with the park when the sleep is over, and another process goes on."""
        result = bench.project.hooked.delay("postrun waits")
        assert result.get(timeout=20) == "done"
        assert_told(bench, result.id, *START, *PARK, *WAKE, *PARK, *WAKE, *SUCCESS)
        assert wait_for_status(bench, result.id, "succeeded").crashes == 0


class TestSleeping:
    def test_the_result_says_until_when(self, bench: Bench) -> None:
        result = bench.project.hooked.delay(seconds=600)
        row = wait_until_asleep(bench, result)
        assert set(result.info) == {"due_at", "name", "timer_id"}
        assert datetime.fromisoformat(result.info["due_at"]) == row.due_at
        assert not result.ready()
        assert f"hooked[{result.id}] sleeps until {result.info['due_at']}" in bench.processes[0].logs()

    def test_nothing_is_stored_for_ignore_result(self, bench: Bench) -> None:
        result = bench.project.forget.delay(600)
        wait_for_status(bench, result.id, "sleeping")
        seen(bench, result.id, "task_parked")
        assert result.state == "PENDING"

    def test_monitors_are_told(self, bench: Bench) -> None:
        with monitor(bench) as state:
            result = bench.project.nap.delay(7)
            bench.wait_for(
                lambda: state_of(state, result.id) == "SLEEPING", message="a monitor sees it asleep"
            )
            assert state.tasks[result.id].due_at is not None
            assert result.get(timeout=20) == 7
            bench.wait_for(lambda: state_of(state, result.id) == "SUCCESS")

    @pytest.mark.report("results-expire")
    def test_a_wait_that_outlives_the_results_of_its_group_is_warned_of(self, bench: Bench) -> None:
        t = bench.project
        long, short = group(t.nap.s(1, 600), t.nap.s(2, 200)).delay().results
        alone = t.nap.delay(3, 600)
        for result in (long, short, alone):
            wait_until_asleep(bench, result)
        bench.wait_for(lambda: warned(bench, long.id))
        assert not warned(bench, short.id)
        assert not warned(bench, alone.id)

    def test_started_is_told_at_each_run(self, bench: Bench) -> None:
        result = bench.project.tracked.delay()
        for number in (1, 2):
            seen(bench, result.id, f"body {number}" if number == 2 else "body 1")
            assert result.state == "STARTED"
            bench.witness.saw(result.id, "go")
            bench.wait_for(lambda: result.state != "STARTED")
        assert result.get(timeout=20) == "tracked"


def warned(bench: Bench, task_id: str) -> bool:
    """Whether the worker has warned that a task sleeps for longer than results are kept."""
    lines = bench.processes[0].logs().splitlines()
    return any("sleeps longer than result_expires" in line and task_id in line for line in lines)


def state_of(state: Any, task_id: str) -> str | None:
    """What a monitor knows of a task."""
    task = state.tasks.get(task_id)
    return None if task is None else task.state


@contextmanager
def monitor(bench: Bench) -> Iterator[Any]:
    """The picture that a monitor makes itself of the events."""
    app = bench.app()
    state, ready = app.events.State(), threading.Event()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": state.event})
        receiver.on_consume_ready = lambda *_, **__: ready.set()
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False}, daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield state
        finally:
            receiver.should_stop = True
            thread.join(10)
