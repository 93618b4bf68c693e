"""Everything may be killed while a task sleeps: it wakes on time and goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_durable import Execution
from tests.integration.support import (
    assert_no_traceback,
    start_worker_and_beat,
    status,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, on


def wait_until_due(bench: Bench, row: Execution) -> None:
    """Wait until a row's time has come."""
    assert row.wake_at is not None
    due = row.wake_at.timestamp()
    bench.wait_for(lambda: time.time() > due, message="it is due")


class TestKill:
    def test_a_task_survives_the_death_of_worker_and_beat_in_its_sleep(self, bench: Bench) -> None:
        worker, beat = start_worker_and_beat(bench)
        result = bench.project.nap.delay(8, name="long")
        row = wait_until_asleep(bench, result)
        bench.wait_for(bench.queue_is_empty, message="the broker holds no message for it")
        worker.kill()
        beat.kill()
        assert (result.state, result.info["name"]) == ("SLEEPING", "long")

        wait_until_due(bench, row)
        assert bench.queue_is_empty()
        assert (result.state, status(bench, result.id)) == ("SLEEPING", "sleeping")
        worker.start(wait=False)
        beat.start(wait=False)
        assert result.get(timeout=20) == ["first", "second", 2]
        wait_for_status(bench, result.id, "succeeded")
        assert bench.witness.steps(result.id) == ["body", "before", "body", "after", "on_success"]
        bench.wait_for(bench.queue_is_empty)
        assert_no_traceback(bench)

    @pytest.mark.report("killed-while-parking")
    @on("redis-postgres")
    def test_a_sleep_keeps_its_time_when_only_the_worker_dies(self, bench: Bench) -> None:
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.nap.delay(4)
        row = wait_until_asleep(bench, result)
        worker.kill()
        worker.start(wait=False)
        assert result.get(timeout=20) == ["first", "second", 2]
        assert row.wake_at is not None
        (after,) = bench.witness.sightings(result.id, "after")
        assert after.time >= row.wake_at.timestamp()
        assert bench.witness.count(result.id, "body") == 2

    @on("rabbitmq-postgres")
    def test_a_wake_that_nobody_received_waits_for_a_worker(self, bench: Bench) -> None:
        worker, beat = start_worker_and_beat(bench)
        result = bench.project.nap.delay(2)
        wait_until_asleep(bench, result)
        worker.kill()
        bench.wait_for(lambda: tuple(bench.broker.messages()) == (1, 0), message="the wake is sent")
        beat.kill()
        worker.start(wait=False)
        assert result.get(timeout=20) == ["first", "second", 2]

    @on("embedded-sqlite", "redis-postgres", "rabbitmq-postgres")
    def test_a_broker_that_loses_everything_loses_no_sleep(self, bench: Bench) -> None:
        bench.configure(durable_resend_delay=1)
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.nap.delay(2)
        wait_until_asleep(bench, result)
        worker.kill()
        bench.wait_for(lambda: bench.broker.messages().ready > 0, message="the wake is sent")
        bench.broker.lose_everything()
        worker.start(wait=False)
        assert result.get(timeout=30) == ["first", "second", 2]
        assert bench.witness.count(result.id, "after") == 1


class TestRelease:
    """The code changes while a task sleeps."""

    @on("redis-sqlite", "rabbitmq-postgres")
    def test_another_call_at_a_journaled_place_sets_the_task_aside(self, bench: Bench) -> None:
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.renamed.apply_async(link_error=bench.project.failed.s())
        wait_until_asleep(bench, result)
        worker.kill()
        second = bench.worker(name="second", env={"PROJ_VERSION": "2"})
        row = wait_for_status(bench, result.id, "quarantined")
        assert (row.wake_at, row.owner, row.outcome) == (None, None, None)
        assert (result.state, result.ready()) == ("QUARANTINED", False)
        for said in ("tests.integration.proj.renamed", result.id, "position 1", "step 'did'", "step 'fail'"):
            assert said in result.info["reason"]
        assert result.info["reason"] in second.logs()
        assert bench.witness.steps(result.id) == ["body of 1", "first", "body of 2"]
        bench.wait_for(bench.queue_is_empty)

        second.kill()
        bench.worker(name="third", env={"PROJ_VERSION": "3"})
        bench.app().durable.release(result.id)
        assert result.get(timeout=20) == "release 3"
        assert bench.witness.steps(result.id) == ["body of 1", "first", "body of 2", "body of 3", "last"]
        wait_for_status(bench, result.id, "succeeded")
        assert_no_traceback(bench)


class TestDuringTheBody:
    """A worker that dies while the body runs: its lease runs out."""

    @on("embedded-sqlite", "redis-postgres", "rabbitmq-postgres")
    def test_a_killed_run_is_taken_over_after_its_last_step(self, bench: Bench) -> None:
        bench.configure(durable_lease_ttl=2, durable_heartbeat_interval=0.5)
        worker, _ = start_worker_and_beat(bench)
        result: Any = bench.project.end_once.delay("hang")
        bench.wait_for(lambda: bench.witness.count(result.id, "hangs"), message="it hangs in its body")
        bench.wait_for(bench.queue_is_empty, message="its message is acknowledged")
        worker.kill()
        worker.start(wait=False)
        assert result.get(timeout=20) == "second run"
        assert wait_for_status(bench, result.id, "succeeded").token == 2
        assert bench.witness.steps(result.id) == ["body", "step", "hangs", "body", "on_success"]
