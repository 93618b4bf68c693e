"""A run that loses its lease is stopped, on every pool, and the task goes on as if nothing had been."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from tests.integration.leases_support import (
    GRACE,
    INTERVAL,
    PROJECT,
    pid_of,
    revoked_ids,
    steal,
    time_of,
    tokens_of,
    wait_for_step,
)
from tests.integration.support import assert_no_traceback, wait_for_status
from tests.nodes import Bench, Worker, on

#: From the loss to the end of the run, with some room for a machine that is busy.
AT_ONCE = INTERVAL + 1.0
STOPPED = INTERVAL + GRACE + 1.0
LONG = 25


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
        bench.wait_for(partial(is_told_of, events, result), 10, "the event has come")
    assert sorted(revoked_events(events)) == sorted(result.id for result in results.values())
    assert not revoked_ids(bench, worker)


def is_told_of(events: Any, result: Any) -> bool:
    return result.id in revoked_events(events)


def revoked_events(events: Any) -> list[str]:
    """The tasks of whose revoke a monitor has heard."""
    return re.findall(r"task revoked: \S+\((\S+?)\) ", events.logs())


def assert_all_go_on(bench: Bench, worker: Worker, results: dict[str, Any]) -> None:
    """The recovered tasks run to their end, in this very worker."""
    bench.beat()
    for how, result in results.items():
        assert result.get(timeout=20) == [how, 3]
        assert tokens_of(bench, result) == [1, 3]
        assert pid_of(bench, result) in worker.tree()
        assert wait_for_status(bench, result.id, "succeeded").owner is None


class TestPrefork:
    @on("redis-postgres", "embedded-sqlite")
    def test_running_code_and_blocked_calls_are_stopped_and_the_task_runs_again(self, bench: Bench) -> None:
        worker = bench.worker("-E", concurrency=6, wait=False)
        events = bench.process("events", "--dump", name="events")
        worker.wait_until_ready()
        results = start_all(bench, "tick", "spin", "time.sleep", "socket", "lock", "sleep in place")
        stolen = steal(bench, *results.values())
        for how, result in results.items():
            wait_for_step(bench, result, "left", timeout=10)
            assert time_of(bench, result, "left") - stolen < AT_ONCE, how
        assert_told_once(bench, worker, events, results)
        assert_all_go_on(bench, worker, results)
        assert_no_traceback(bench)
