"""A task whose worker dies, or stands still for too long, goes on elsewhere, once."""

from __future__ import annotations

import json
import signal
import time
from itertools import pairwise
from uuid import uuid4

import pytest
from redis import Redis

from tests.integration.leases_support import PROJECT, TTL, pid_of, time_of, tokens_of, wait_for_step
from tests.integration.support import assert_no_traceback, row, start_worker_and_beat, wait_for_status
from tests.nodes import Bench, on

#: Seconds for which a body works if nobody stops it: longer than it takes to start another worker.
LONG = 120

on_both_databases = on("redis-postgres", "embedded-sqlite")


@pytest.fixture
def bench_module() -> str:
    return PROJECT


class TestDeadProcesses:
    @pytest.mark.report("worker-killed")
    @on_both_databases
    def test_a_killed_pool_process_is_noticed_at_once_whatever_the_ttl(self, bench: Bench) -> None:
        bench.configure(durable_lease_ttl=30, durable_heartbeat_interval=5)
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.delay("tick", LONG, 0.5)
        wait_for_step(bench, result, "tick")
        worker.signal(signal.SIGKILL, pid_of(bench, result))
        killed = time.time()
        assert result.get(timeout=20) == ["tick", 2]
        assert time_of(bench, result, "done") - killed < 5
        assert tokens_of(bench, result) == [1, 2]
        assert tokens_of(bench, result, "recovered") == [2]
        assert len({seen.pid for seen in bench.witness.sightings(result.id, "body")}) == 2
        wait_for_status(bench, result.id, "succeeded")
        bench.wait_for(bench.queue_is_empty)

    @pytest.mark.report("worker-killed", "two-processes")
    @on("redis-postgres", "rabbitmq-postgres", "embedded-sqlite")
    def test_a_killed_worker_s_task_goes_on_elsewhere_when_its_lease_has_run_out(self, bench: Bench) -> None:
        # Whatever the broker does with messages that nobody acknowledges takes no part in it.
        bench.configure(broker_transport_options={"visibility_timeout": 3600})
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.delay("tick", LONG, 0.5)
        wait_for_step(bench, result, "tick")
        other = bench.worker(name="other")
        worker.kill()
        killed = time.time()
        assert result.get(timeout=TTL + 20) == ["tick", 2]
        assert time_of(bench, result, "body", 1) - killed < TTL + 3
        assert pid_of(bench, result) in other.tree()
        assert tokens_of(bench, result, "recovered") == [2]
        bench.wait_for(bench.queue_is_empty)

    @pytest.mark.report("taken-for-dead")
    @on_both_databases
    def test_a_worker_that_was_frozen_changes_nothing_when_it_comes_back(self, bench: Bench) -> None:
        frozen = bench.worker(concurrency=2)
        result = bench.project.works_and_naps.delay(LONG, 12)
        wait_for_step(bench, result, "tick")
        other = bench.worker(name="other", concurrency=1)
        bench.beat()
        frozen.freeze()
        wait_for_step(bench, result, "body", count=2)
        parked = wait_for_status(bench, result.id, "sleeping")
        ticks = bench.witness.count(result.id, "tick")
        frozen.thaw()
        wait_for_step(bench, result, "revoked")
        assert tokens_of(bench, result, "lease_lost") == [1]
        assert bench.witness.count(result.id, "tick") <= ticks + 2, "it stops at once"
        assert row(bench, result.id) == parked
        assert result.state == "SLEEPING"
        # And it is as good a worker for this task as any other.
        other.stop()
        assert result.get(timeout=25) == 3
        assert pid_of(bench, result) in frozen.tree()
        assert tokens_of(bench, result) == [1, 2, 3]
        assert tokens_of(bench, result, "awake") == [3]

    @on("redis-postgres")
    def test_a_run_whose_end_comes_after_its_lease_stores_no_result(self, bench: Bench) -> None:
        """The body is over in a moment; its process is frozen in the middle of it."""
        frozen = bench.worker(concurrency=1)
        result = bench.project.work.delay("time.sleep", 1.5, 0.1)
        wait_for_step(bench, result, "body")
        frozen.freeze()
        bench.worker(name="other", concurrency=1, wait=False)
        bench.beat()
        assert result.get(timeout=25) == ["time.sleep", 2]
        frozen.thaw()
        wait_for_step(bench, result, "left", count=2)
        wait_for_step(bench, result, "revoked")
        assert wait_for_status(bench, result.id, "succeeded").token == 2
        assert result.get() == ["time.sleep", 2]
        assert bench.witness.count(result.id, "success") == 1


class TestCopies:
    @pytest.mark.report("second-copy", "consumer-timeout")
    @on("redis-postgres", "redis-sqlite")
    def test_copies_of_a_running_task_s_message_are_dropped_whatever_their_number(self, bench: Bench) -> None:
        """The broker gives up on the message after 3 s, and there are five more of it."""
        options = {"visibility_timeout": 3, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        bench.configure(broker_transport_options=options, task_acks_late=True)
        result = bench.project.work.delay("tick", 8)
        copy_messages(bench, 5)
        worker = bench.worker(concurrency=4)
        assert result.get(timeout=40) == ["tick", 1]
        assert tokens_of(bench, result) == tokens_of(bench, result, "done") == [1]
        ticks = [seen.time for seen in bench.witness.sightings(result.id, "tick")]
        assert max(after - before for before, after in pairwise(ticks)) < 2
        bench.wait_for(bench.queue_is_empty, message="the copies are acknowledged")
        assert worker.logs().count("dropped: ") == 5
        assert wait_for_status(bench, result.id, "succeeded").token == 1
        assert_no_traceback(bench)


def copy_messages(bench: Bench, copies: int) -> None:
    """Put further copies of the one message in the queue, each as a delivery of its own."""
    assert bench.broker.url is not None
    with Redis.from_url(bench.broker.url) as client:
        (payload,) = client.lrange("celery", 0, -1)
        for _ in range(copies):
            message = json.loads(payload)
            message["properties"]["delivery_tag"] = str(uuid4())
            client.rpush("celery", json.dumps(message))
