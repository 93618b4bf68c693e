"""The database is away, slow or stands still: no lease is lost before its time, and no run outlives it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.leases_support import PROJECT, TTL, execute, time_of, tokens_of, wait_for_step
from tests.integration.support import assert_no_traceback, row, wait_for_status
from tests.nodes import Bench, FaultProxy, Worker, on


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.fixture
def proxy(bench: Bench) -> FaultProxy:
    """What stands between all processes of the bench and its database; the test has its own way."""
    bench.configure(durable_heartbeat_interval=2)
    proxy = bench.proxy(bench.store_url)
    bench.env["CELERY_DURABLE_DATABASE_URL"] = proxy.url
    return proxy


@contextmanager
def away(proxy: FaultProxy) -> Iterator[None]:
    proxy.refuse()
    yield
    proxy.heal()


def assert_ran_once(bench: Bench, results: list) -> None:  # type: ignore[type-arg]
    for result in results:
        assert tokens_of(bench, result) == tokens_of(bench, result, "done") == [1]
        assert bench.witness.count(result.id, "lease_lost") == 0
        wait_for_status(bench, result.id, "succeeded")


@on("redis-postgres")
class TestShortOutages:
    @pytest.mark.report("taken-for-dead")
    @pytest.mark.parametrize("pool", ["prefork", "threads"])
    def test_no_lease_of_6_s_is_lost_when_the_database_is_away_for_4(
        self, bench: Bench, proxy: FaultProxy, pool: str
    ) -> None:
        worker = bench.worker(pool=pool, concurrency=4)
        results = [bench.project.work.delay("polite", 9 + number) for number in range(3)]
        for result in results:
            # The outage finds each at another moment between two renewals.
            wait_for_step(bench, result, "tick", 2)
        with away(proxy):
            time.sleep(4)
        assert [result.get(timeout=30) for result in results] == [["polite", 1]] * 3
        assert_ran_once(bench, results)
        assert "Leases are being renewed again" in worker.logs()
        assert_no_traceback(bench)

    @pytest.mark.report("taken-for-dead")
    def test_a_process_that_stands_still_for_less_than_its_ttl_goes_on(self, bench: Bench) -> None:
        worker = bench.worker(concurrency=1)
        bench.beat()
        result = bench.project.work.delay("polite", 8)
        wait_for_step(bench, result, "tick")
        (child,) = worker.pool_pids()
        worker.freeze(child)
        time.sleep(3)
        worker.thaw(child)
        assert result.get(timeout=30) == ["polite", 1]
        assert_ran_once(bench, [result])

    @pytest.mark.report("lock-out")
    def test_neither_a_database_that_stands_still_nor_locks_that_others_hold_cost_a_lease(
        self, bench: Bench
    ) -> None:
        bench.configure(durable_heartbeat_interval=2)
        bench.worker(concurrency=4)
        bench.beat()
        results = [bench.project.work.delay("polite", 11) for _ in range(4)]
        for result in results:
            wait_for_step(bench, result, "tick")
        assert bench.store_server is not None
        bench.store_server.freeze()
        time.sleep(3)
        bench.store_server.thaw()
        # Each is renewed again before the next stretch.
        time.sleep(2)
        store = bench.app().durable.store
        with store.database.transaction() as connection:
            connection.exec_driver_sql("SELECT * FROM durable_executions FOR UPDATE").all()
            time.sleep(3)
        assert [result.get(timeout=30) for result in results] == [["polite", 1]] * 4
        assert_ran_once(bench, results)

    def test_a_row_that_is_locked_for_too_long_costs_its_own_lease_only(self, bench: Bench) -> None:
        """One process has all the leases, and renews them together."""
        bench.worker(pool="threads", concurrency=4)
        bench.beat()
        results = [bench.project.work.delay("polite", TTL + 5, 0.1) for _ in range(4)]
        for result in results:
            wait_for_step(bench, result, "tick")
        locked, *others = results
        store = bench.app().durable.store
        with store.database.transaction() as connection:
            select = "SELECT * FROM durable_executions WHERE task_id = %(id)s FOR UPDATE"
            connection.exec_driver_sql(select, {"id": locked.id}).one()
            wait_for_step(bench, locked, "left", timeout=TTL + 3)
        assert [result.get(timeout=30) for result in results] == [["polite", 2], *[["polite", 1]] * 3]
        assert_ran_once(bench, others)
        assert tokens_of(bench, locked, "lease_lost") == [1]
        assert tokens_of(bench, locked) == [1, 2]


@on("redis-postgres")
class TestLongOutages:
    @pytest.mark.report("two-processes")
    @pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
    def test_every_run_stops_before_its_lease_ends_and_every_task_is_done_afterwards(
        self, bench: Bench, proxy: FaultProxy, pool: str
    ) -> None:
        # A single crash would be the end of a task.
        bench.configure(durable_max_crashes=0)
        worker = bench.worker(pool=pool, concurrency=4)
        bench.beat()
        results = [bench.project.work.delay(how, 120, 1) for how in ("tick", "polite", "sleep in place")]
        for result in results:
            wait_for_step(bench, result, "body")
        time.sleep(1.5)
        with away(proxy):
            for result in results:
                wait_for_step(bench, result, "left", timeout=TTL + 3)
                found = row(bench, result.id)
                assert found is not None
                assert found.wake_at is not None
                assert time_of(bench, result, "left") < found.wake_at.timestamp(), "too late"
                # A body may find it out itself, a moment before it is told.
                wait_for_step(bench, result, "lease_lost")
                assert tokens_of(bench, result, "lease_lost") == [1]
            # The leases end meanwhile.
            time.sleep(3)
        for result in results:
            assert result.get(timeout=30)[1] == tokens_of(bench, result)[-1]
            assert len(tokens_of(bench, result, "done")) == 1
            wait_for_step(bench, result, "success")
            assert bench.witness.count(result.id, "success") == 1
        assert worker.running


@on("redis-postgres", "rabbitmq-postgres")
def test_a_first_delivery_is_held_while_the_database_is_away(bench: Bench, proxy: FaultProxy) -> None:
    bench.worker(concurrency=2)
    with away(proxy):
        results = [bench.project.healthy.delay(number) for number in range(3)]
        bench.wait_for(lambda: "is held" in bench.processes[0].logs(), 20, "one is being held")
        assert sum(bench.broker.messages()) == 3, "none is acknowledged"
        assert {result.state for result in results} == {"PENDING"}
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    for result in results:
        assert tokens_of(bench, result) == [1]
    bench.wait_for(bench.queue_is_empty)


@on("redis-postgres")
def test_a_process_that_dies_in_an_outage_is_recovered_after_it(bench: Bench, proxy: FaultProxy) -> None:
    """Without waiting for the end of a lease of 60 s."""
    bench.configure(durable_lease_ttl=60, durable_heartbeat_interval=10)
    worker = bench.worker(concurrency=1)
    bench.beat()
    result = bench.project.work.delay("tick", 120, 0.1)
    wait_for_step(bench, result, "tick")
    with away(proxy):
        os.kill(worker.pool_pids()[0], signal.SIGKILL)
        bench.wait_for(lambda: "wait for the database" in worker.logs(), 20, "the worker has noticed")
    assert result.get(timeout=30) == ["tick", 2]
    assert execute(bench, "SELECT crashes FROM durable_executions") == [(0,)]


def held_by(worker: Worker) -> int:
    return worker.logs().count("is held")
