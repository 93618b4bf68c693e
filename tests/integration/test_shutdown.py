"""Whatever way a worker is told to stop: nothing runs twice for it, waits for a ttl, or counts as a crash."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.integration.leases_support import (
    GRACE,
    INTERVAL,
    PROJECT,
    execute,
    pid_of,
    steal,
    time_of,
    tokens_of,
    wait_for_step,
)
from tests.integration.support import assert_no_traceback, start_worker_and_beat, wait_for_status
from tests.nodes import Bench, Worker, on


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.fixture
def no_crash(bench: Bench) -> None:
    """A single crash is the end of a task, and nobody waits for a lease to run out."""
    bench.configure(durable_max_crashes=0, durable_lease_ttl=120, durable_heartbeat_interval=1)


class TestWarm:
    @on("redis-postgres", "embedded-sqlite")
    def test_a_task_is_finished_though_it_takes_longer_than_its_ttl(self, bench: Bench) -> None:
        bench.configure(durable_lease_ttl=3, durable_heartbeat_interval=0.5)
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.delay("tick", 7)
        wait_for_step(bench, result, "tick")
        assert worker.stop() == 0
        assert result.get(timeout=5) == ["tick", 1]
        assert wait_for_status(bench, result.id, "succeeded").token == 1
        assert tokens_of(bench, result) == [1]
        assert bench.witness.count(result.id, "lease_lost") == 0
        assert_no_traceback(bench)

    @on("redis-postgres")
    @pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
    def test_a_loss_still_stops_a_run(self, bench: Bench, pool: str) -> None:
        worker = bench.worker(pool=pool)
        result = bench.project.work.delay("tick", 120)
        wait_for_step(bench, result, "tick")
        worker.signal(signal.SIGTERM)
        bench.wait_for(lambda: "Warm shutdown" in worker.logs())
        stolen = steal(bench, result)
        wait_for_step(bench, result, "left")
        assert time_of(bench, result, "left") - stolen < INTERVAL + GRACE
        assert worker.wait(20) == 0

    @pytest.mark.report("deploy", "shutdown-before-body")
    @on("redis-postgres")
    def test_what_has_not_begun_goes_back_and_runs_elsewhere(self, bench: Bench) -> None:
        worker = bench.worker(concurrency=1)
        running = bench.project.work.delay("tick", 4)
        wait_for_step(bench, running, "tick")
        waiting = [bench.project.healthy.delay(number) for number in range(3)]
        bench.wait_for(lambda: worker.logs().count("received") == 4, message="the worker holds them")
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0
        assert running.get(timeout=5) == ["tick", 1]
        assert bench.witness.count(step="body") == 1
        other = bench.worker(name="other")
        assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]
        for result in waiting:
            assert tokens_of(bench, result) == [1]
            assert pid_of(bench, result) in other.tree()
        bench.wait_for(bench.queue_is_empty)

    @pytest.mark.report("shutdown-before-body")
    @on("rabbitmq-postgres")
    def test_a_delivery_that_is_held_goes_back(self, bench: Bench) -> None:
        proxy = bench.proxy(bench.store_url)
        worker = bench.worker(concurrency=1, env={"CELERY_DURABLE_DATABASE_URL": proxy.url})
        proxy.refuse()
        result = bench.project.healthy.delay(1)
        bench.wait_for(lambda: "is held" in worker.logs(), message="it is held")
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0
        bench.wait_for(lambda: bench.broker.messages() == (1, 0), message="the broker has it back")
        bench.worker(name="other")
        assert result.get(timeout=20) == 1
        assert tokens_of(bench, result) == [1]


@pytest.mark.usefixtures("no_crash")
class TestCold:
    @pytest.mark.report("deploy", "loss-is-no-failure")
    @on("redis-postgres", "embedded-sqlite")
    @pytest.mark.parametrize("signals", ["SIGQUIT", "SIGINT SIGINT"])
    def test_leases_are_handed_back_at_once(self, bench: Bench, signals: str) -> None:
        worker, _ = start_worker_and_beat(bench)
        results = [bench.project.work.delay("tick", 120, 0.1) for _ in range(2)]
        for result in results:
            wait_for_step(bench, result, "tick")
        other = bench.worker(name="other")
        stopped = send(worker, signals)
        for result in results:
            assert result.get(timeout=20) == ["tick", 2]
            assert time_of(bench, result, "body", 1) - stopped < 8
            assert pid_of(bench, result) in other.tree()
        worker.wait(20)
        for result in results:
            assert tokens_of(bench, result) == [1, 2]
            assert wait_for_status(bench, result.id, "succeeded").crashes == 0

    @on("redis-postgres")
    @pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
    def test_other_pools_stop_their_runs_and_hand_back_too(self, bench: Bench, pool: str) -> None:
        worker, _ = start_worker_and_beat(bench, pool=pool)
        result = bench.project.work.delay("tick", 120, 0.1)
        wait_for_step(bench, result, "tick")
        bench.worker(name="other")
        stopped = send(worker, "SIGQUIT")
        assert result.get(timeout=20) == ["tick", 2]
        assert time_of(bench, result, "body", 1) - stopped < 8
        worker.wait(20)
        assert tokens_of(bench, result) == [1, 2]

    @on("redis-postgres")
    def test_a_soft_shutdown_lets_short_tasks_finish(self, bench: Bench) -> None:
        bench.configure(worker_soft_shutdown_timeout=4)
        worker, _ = start_worker_and_beat(bench)
        short = bench.project.work.delay("tick", 3)
        long = bench.project.work.delay("tick", 120, 0.1)
        for result in (short, long):
            wait_for_step(bench, result, "tick")
        stopped = send(worker, "SIGQUIT")
        bench.worker(name="other")
        assert short.get(timeout=10) == ["tick", 1]
        assert long.get(timeout=20) == ["tick", 2]
        assert 3.5 < time_of(bench, long, "body", 1) - stopped < 12
        assert tokens_of(bench, short) == [1]
        worker.wait(20)


def send(worker: Worker, signals: str) -> float:
    """Send signals one after the other, each when the one before has been heard. When that was."""
    for name in signals.split():
        heard = worker.logs().count("shutdown") + worker.logs().count("Hitting Ctrl+C")
        worker.signal(signal.Signals[name])
        while worker.running and heard == worker.logs().count("shutdown") + worker.logs().count("Hitting"):
            time.sleep(0.05)
    return time.time()


class TestDeploys:
    @pytest.mark.report("deploy")
    @on("redis-postgres")
    def test_term_and_then_kill_three_times_in_a_row_is_no_crash(self, bench: Bench) -> None:
        bench.configure(durable_max_crashes=1, durable_lease_ttl=3, durable_heartbeat_interval=0.5)
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.delay("tick", 120, 120)
        for deploy in range(3):
            wait_for_step(bench, result, "body", deploy + 1)
            worker.signal(signal.SIGTERM)
            bench.wait_for(lambda: is_draining(bench), 10, "its lease is marked")
            worker.kill()
            worker.start(wait=False)
        wait_for_step(bench, result, "body", 4)
        assert tokens_of(bench, result) == [1, 2, 3, 4]
        assert execute(bench, "SELECT status, crashes FROM durable_executions") == [("running", 0)]
        assert not is_draining(bench), "a claim clears the mark"

    @on("redis-postgres")
    @pytest.mark.usefixtures("no_crash")
    def test_a_signal_to_the_whole_process_group_is_no_crash_either(self, bench: Bench) -> None:
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.delay("tick", 120, 0.1)
        wait_for_step(bench, result, "tick")
        bench.worker(name="other")
        os.killpg(worker.pid, signal.SIGTERM)
        assert result.get(timeout=20) == ["tick", 2]
        worker.wait(20)
        assert tokens_of(bench, result) == [1, 2]


def is_draining(bench: Bench) -> Any:
    return execute(bench, "SELECT 1 FROM durable_executions WHERE draining")
