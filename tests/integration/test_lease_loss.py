"""A run that loses its lease is stopped, on every pool, and the task goes on as if nothing had been."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.leases_support import (
    GRACE,
    INTERVAL,
    PROJECT,
    TTL,
    crashes_of,
    end_stolen_leases,
    execute,
    pid_of,
    revoked_ids,
    steal,
    time_of,
    tokens_of,
    wait_for_step,
)
from tests.integration.support import assert_no_traceback, row, wait_for_status
from tests.nodes import Bench, Worker, on

#: Seconds for which a body works if nobody stops it.
LONG = 120

on_both_databases = on("redis-postgres", "embedded-sqlite")


@pytest.fixture
def bench_module() -> str:
    return PROJECT


def start_all(bench: Bench, *bodies: str) -> dict[str, Any]:
    """Start a task for each of these bodies, and wait until all are at it."""
    results = {how: bench.project.work.delay(how, LONG) for how in bodies}
    for result in results.values():
        wait_for_step(bench, result, "body")
    return results


def assert_told_once(bench: Bench, worker: Worker, events: Any, results: dict[str, Any]) -> None:
    """The loss was told in every way that there is, once, and in no way that would end the task."""
    for how, result in results.items():
        assert result.state not in ("REVOKED", "FAILURE", "SUCCESS"), how
        for what in ("lease_lost", "revoked"):
            wait_for_step(bench, result, what)
            assert bench.witness.count(result.id, what) == 1, (how, what)
        assert bench.witness.count(result.id, "done") == 0, how
    bench.wait_for(lambda: events.logs().count("task revoked:") >= len(results), 10, "events have come")
    assert events.logs().count("task revoked:") == len(results)
    assert not revoked_ids(bench, worker)


def assert_all_go_on(bench: Bench, worker: Worker, results: dict[str, Any]) -> None:
    """The recovered tasks run to their end, in this very worker."""
    end_stolen_leases(bench)
    bench.beat()
    for how, result in results.items():
        assert result.get(timeout=20) == [how, 3]
        assert tokens_of(bench, result) == [1, 3]
        assert pid_of(bench, result) in worker.tree()
        assert wait_for_status(bench, result.id, "succeeded").owner is None


#: What each pool can stop while it runs.
STOPPABLE = {
    "prefork": ["tick", "spin", "time.sleep", "socket", "lock", "sleep in place"],
    "threads": ["tick", "spin", "polite", "sleep in place"],
    "gevent": ["tick", "time.sleep", "socket", "lock", "sleep in place"],
    "solo": ["tick"],
}


@pytest.mark.report("terminate-by-pool", "loss-is-no-failure")
@on_both_databases
@pytest.mark.parametrize("pool", STOPPABLE)
def test_a_run_that_loses_its_lease_is_stopped_and_the_task_goes_on(bench: Bench, pool: str) -> None:
    worker = bench.worker("-E", pool=pool, concurrency=8, wait=False)
    events = bench.process("events", "--dump", name="events")
    worker.wait_until_ready()
    results = start_all(bench, *STOPPABLE[pool])
    stolen = steal(bench, *results.values())
    for how, result in results.items():
        wait_for_step(bench, result, "left", timeout=15)
        assert time_of(bench, result, "left") - stolen < INTERVAL + GRACE, how
    assert_told_once(bench, worker, events, results)
    assert_all_go_on(bench, worker, results)
    assert_no_traceback(bench)


@pytest.mark.report("terminate-by-pool")
@on("redis-postgres")
def test_a_blocked_call_ends_in_the_solo_pool_too(bench: Bench) -> None:
    bench.worker(pool="solo")
    for how in ("time.sleep", "socket"):
        results = start_all(bench, how)
        stolen = steal(bench, *results.values())
        wait_for_step(bench, results[how], "left")
        assert time_of(bench, results[how], "left") - stolen < INTERVAL + GRACE
    assert_no_traceback(bench)


@pytest.mark.report("terminate-by-pool")
@on_both_databases
def test_a_body_that_asks_hears_of_the_loss_where_its_pool_cannot_stop_it(bench: Bench) -> None:
    worker = bench.worker(pool="threads", concurrency=4, env={"LEASES_NO_INTERRUPTS": "1"})
    results = start_all(bench, "polite", "sleep in place")
    stolen = steal(bench, *results.values())
    for how, result in results.items():
        wait_for_step(bench, result, "left")
        assert time_of(bench, result, "left") - stolen < INTERVAL + GRACE, how
        wait_for_step(bench, result, "revoked")
        assert bench.witness.count(result.id, "lease_lost") == 1
        assert bench.witness.count(result.id, "done") == 0
        assert result.state not in ("REVOKED", "FAILURE", "SUCCESS")
    assert_all_go_on(bench, worker, results)


@pytest.mark.report("loss-stops-the-run")
@on_both_databases
def test_a_pool_process_whose_task_does_not_stop_kills_itself_and_that_is_no_crash(bench: Bench) -> None:
    worker = bench.worker(concurrency=2)
    results = start_all(bench, "swallow", "swallow in step")
    bystanders = [bench.project.healthy.delay(number) for number in range(4)]
    pids = {pid_of(bench, result) for result in results.values()}
    # As an operator who has the tasks run again: due at once, with nobody's lease.
    execute(bench, "UPDATE durable_executions SET owner = NULL, token = token + 1 WHERE owner IS NOT NULL")
    stolen = time.time()
    bench.wait_for(lambda: not pids & set(worker.pool_pids()), 15, "the processes are gone")
    assert time.time() - stolen < INTERVAL + GRACE + 3
    for result in results.values():
        assert bench.witness.count(result.id, "swallowed") >= 2, "it was asked again before it was killed"
        assert bench.witness.count(result.id, "lease_lost") == 1
        wait_for_step(bench, result, "revoked")
        assert bench.witness.count(result.id, "revoked") == 1
        assert result.state not in ("REVOKED", "FAILURE", "SUCCESS")
        assert crashes_of(bench, result) == 0
    assert [result.get(timeout=20) for result in bystanders] == [0, 1, 2, 3]
    assert_all_go_on(bench, worker, results)


@pytest.mark.report("terminate-by-pool")
@on("redis-postgres")
def test_a_thread_inside_a_c_call_is_reported_until_it_ends_and_cannot_write(bench: Bench) -> None:
    worker = bench.worker(pool="threads", concurrency=2)
    result = bench.project.work.delay("time.sleep", INTERVAL + GRACE + 2)
    wait_for_step(bench, result, "body")
    steal(bench, result)
    bench.wait_for(lambda: "is a runaway" in worker.logs(), 15, "it is reported")
    wait_for_step(bench, result, "left")
    assert bench.witness.count(result.id, "done") == 0, "it is stopped when its call returns"
    assert result.state not in ("REVOKED", "FAILURE", "SUCCESS")
    found = row(bench, result.id)
    assert found is not None
    assert (found.owner, found.token, found.outcome) == ("x", 2, None)


@pytest.mark.report("taken-for-dead")
@on("redis-postgres")
def test_a_call_that_holds_the_interpreter_is_stopped_when_it_returns_and_cannot_write_before(
    bench: Bench,
) -> None:
    bench.worker(concurrency=1)
    held = bench.project.work.delay("hold", TTL + 3)
    wait_for_step(bench, held, "body")
    # Nothing renews its lease meanwhile, so it runs out by itself, and the task runs elsewhere.
    bench.worker(name="other", concurrency=1, wait=False)
    bench.beat()
    assert held.get(timeout=30) == ["hold", 2]
    wait_for_step(bench, held, "left", count=2)
    assert tokens_of(bench, held, "done") == [2]
    assert tokens_of(bench, held, "tick").count(1) < 10, "less than a second's"
    wait_for_step(bench, held, "revoked")
    assert held.state == "SUCCESS"
    assert tokens_of(bench, held, "lease_lost") == [1]


@on("redis-postgres")
def test_a_revoke_of_a_running_task_is_told_once(bench: Bench) -> None:
    """Its run loses the lease to the cancel: the loss is no second revoke."""
    bench.worker(concurrency=2)
    bench.beat()
    result = bench.project.work.delay("polite", LONG)
    wait_for_step(bench, result, "body")
    result.revoke()
    wait_for_step(bench, result, "left")
    wait_for_status(bench, result.id, "cancelled")
    assert result.state == "REVOKED"
    assert bench.witness.count(result.id, "revoked") == 1
    assert tokens_of(bench, result) == [1]
